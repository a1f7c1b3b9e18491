"""What the engine raises, named for what the caller should do.

EngineError
|- RequestRefused           nothing was queued or taken
|  |- InvalidRequest        tell the client: the request itself is wrong
|  |- CapacityExceeded      tell the client: it can never fit here
|  |- NoRoom                try later or elsewhere
|  `- QueueFull             try again when the engine has taken some in
|- UnknownRequest           the id is not (or no longer) in that state here
|- ModelRefused             choose another model directory
|  |- UnsupportedModel      this engine cannot run it correctly
|  `- IncompleteModel       files are missing
|- UnusableFile             name another file to read or write
|- NoDevice                 choose a device that this machine and this build of torch have
|- DeviceRefused            see what the driver said: this device, or its driver, cannot do that
|- ForwardFailed            fail the requests of that batch
|- DeviceLost               a device's process has ended or hangs, and the engine with it: restart the node
|- CollectiveBroken         find out which rank is gone or late: this one cannot go on without it
|- PoisonBroken             a bug: somebody wrote to a free page
|- KernelsUnavailable       run the slower path in torch, or compile the extension
|- LoopPaused               leave the pause first
|- LoopNotStarted           start it first
`- LoopStopped              the engine's thread has ended; restart the node
"""


class EngineError(Exception):
    """Base of all."""


class RequestRefused(EngineError):
    """Nothing was queued or taken."""


class InvalidRequest(RequestRefused, ValueError):
    """Empty prompt, bad token ids, duplicate id, ..."""


class CapacityExceeded(RequestRefused):
    """The prompt can never fit, even into an empty cache."""


class NoRoom(RequestRefused):
    """Not enough free pages now."""


class QueueFull(RequestRefused):
    """The bounded queue to the engine's thread stayed full."""


class UnknownRequest(EngineError):
    """No request of that id is in the state that the call needs."""


class ModelRefused(EngineError):
    """The model directory cannot be served."""


class UnsupportedModel(ModelRefused, ValueError):
    """The model has something that this engine would compute wrongly."""


class IncompleteModel(ModelRefused):
    """The directory lacks files."""


class UnusableFile(EngineError):
    """It cannot be read or written."""


class NoDevice(EngineError):
    """The device that was asked for is not there."""


class DeviceRefused(EngineError):
    """A call of the device's driver failed, or the device lacks what is needed."""


class ForwardFailed(EngineError):
    """The device raised while a batch ran."""


class DeviceLost(EngineError):
    """One of the processes that an engine is made of has ended or hangs: the engine is of no use any more."""


class CollectiveBroken(EngineError):
    """A sum over the ranks did not come about: one of them is gone or late."""


class PoisonBroken(EngineError):
    """A free page was written to."""


class KernelsUnavailable(EngineError):
    """The C kernels were not compiled, or cannot run in this process."""


class LoopPaused(EngineError):
    """The call would wait for its own caller, who keeps the engine's thread paused."""


class LoopNotStarted(EngineError):
    """The call would wait for an engine's thread that nobody has started."""


class LoopStopped(EngineError):
    """The engine's thread has ended."""

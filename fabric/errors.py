"""The error tree of the fabric. Each class means one thing to do.

FabricError
|-- FabricUnavailable   the library or a usable provider is missing: fix the machine, do not retry
|-- RegistrationFailed  memory could not be registered: raise the limit that the message names
|-- FenceFailed         an endpoint could not be closed: end the process, and reuse none of its memory until then
|-- EndpointClosed      the endpoint was closed (fenced) by our own side: the caller's view is late
`-- FabricUsageError    our own caller broke the contract (unknown handle, slot armed twice)

Failures of the network are not raised: they arrive as events that carry an `OperationError`.
"""

from dataclasses import dataclass


class FabricError(Exception):
    """Root of everything this package raises."""


class FabricUnavailable(FabricError):
    """No usable libfabric or provider; the message says what to install."""


class RegistrationFailed(FabricError):
    """Memory registration was refused; the message gives the size asked, the limit and the remedy."""


class FenceFailed(FabricError):
    """The network library refused to close an endpoint. There is no fence: what the peer posts may still land, and
    what we posted may still be read, in any registered memory. No page may be freed or reused, closing again proves
    nothing, and the end of the process is the one fence that is left: the node has to die."""


class EndpointClosed(FabricError):
    """The endpoint was closed on this side before the call."""


class FabricUsageError(FabricError):
    """A call that the contract of `fabric.api` forbids."""


@dataclass(frozen=True, slots=True)
class OperationError:
    """Why a network operation failed, as a value.

    call: the libfabric (or simulated) call, e.g. "fi_writedata" or "fi_cq_read".
    code: its error number (positive errno or FI_E... value), with `text` the library's words for it and
    `provider_text` the provider's own. peer: the label that the endpoint was opened with.
    """

    call: str
    code: int
    text: str
    provider_text: str
    peer: str

    def __str__(self) -> str:
        detail = f" ({self.provider_text})" if self.provider_text else ""
        return f"{self.call} to {self.peer}: {self.text} [{self.code}]{detail}"

"""What the engine asks of a device: launch a forward, later take its tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from engine.errors import DeviceLost
from engine.forward_batch import ForwardBatch

if TYPE_CHECKING:
    import torch  # takes seconds, and records between processes are made of what is here


class SampledToken(NamedTuple):
    """`logprob`: natural logarithm of the token's share under the processed logits; None unless asked for."""

    token: int
    logprob: float | None = None


@dataclass(frozen=True)
class ForwardResult:
    """`tokens`: one per entry of `batch.samples`, in order; an exception's text where that request alone went wrong
    (its logits were not finite, ...). Times are of CLOCK_MONOTONIC, of the device's work. `contexts`: one per row that
    wants one, in order, in host memory: a row of `contexts.pack`."""

    tokens: list[SampledToken | str]
    started_ns: int
    ended_ns: int
    contexts: "Sequence[torch.Tensor]" = ()


class PendingForward(Protocol):
    """A forward under way."""

    def result(self) -> ForwardResult:
        """Blocks until it is done. Raises whatever the device raised: the batch has then failed as a whole."""


class Runner(Protocol):
    """One device, or several as one. Forwards run one after the other, in order of `launch`; at most two are under
    way, and only then may the second one's rows carry tokens of the first (see BatchRow.carry)."""

    def launch(self, batch: ForwardBatch) -> PendingForward:
        """Returns once the batch's lists may change; on a synchronous runner the forward has run by then."""

    def close(self) -> None:
        """Nothing is under way. The runner's threads end, and its processes."""

    def when_lost(self, call: Callable[[DeviceLost], None]) -> None:
        """Called once, from any thread, if a process that it runs in ends or hangs: `launch` and forwards raise that
        error from then on. Replaces the one before. A runner without processes has nothing to say."""
        return

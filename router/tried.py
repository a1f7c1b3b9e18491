"""What a request has behind it when it is sent again."""

from dataclasses import dataclass, field

from protocol.messages import Failure, FailureCode


@dataclass(slots=True)
class Tried:
    """By instance: the decode nodes that have failed it, and the prefill nodes that were offered to them. `attempts`:
    how many were made by then, over all nodes."""

    decodes: set[str] = field(default_factory=set)
    prefills: set[str] = field(default_factory=set)
    attempts: int = 0

    def note(self, decode: str, failure: Failure, attempts: int) -> None:
        """How one try ended. A decode node that was left without prefill nodes is not to blame."""
        self.attempts = max(self.attempts, attempts)
        if failure.code is not FailureCode.NO_PREFILL:
            self.decodes.add(decode)

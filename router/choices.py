"""The texts of one attempt's choices, each with a detokeniser and a watch for stop strings of its own."""

from collections.abc import Callable
from dataclasses import dataclass

from protocol.messages import FinishReason
from router.text_output import TextOutput
from router.token_request import ChoiceDone, Ended, Tokens


@dataclass(frozen=True, slots=True)
class Progress:
    """What one event meant for its choice. `text`: may be shown now. `finish_reason`: "stop" or "length" where it ends
    the choice, else ""."""

    choice: int
    text: str = ""
    finish_reason: str = ""


class Choices:
    """`output`: makes the state of one choice. `tokens`: that make up all outputs together, so far. `over`: every
    choice is."""

    def __init__(self, n: int, output: Callable[[], TextOutput]) -> None:
        self._outputs = [output() for _ in range(n)]
        self._living = set(range(n))
        self.tokens = 0

    @property
    def over(self) -> bool:
        return not self._living

    def take(self, said: Tokens | ChoiceDone | Ended) -> Progress:
        """Of a choice that was over before nothing counts. The node's last word is on the only one that is not."""
        choice = min(self._living) if isinstance(said, Ended) else said.choice
        if choice not in self._living:
            return Progress(choice)
        output = self._outputs[choice]
        before = output.tokens
        text = output.feed(said.ids) if isinstance(said, Tokens) else output.finish()
        self.tokens += output.tokens - before
        finish_reason = _finish_reason(said, output)
        if finish_reason:
            self._living.discard(choice)
        return Progress(choice, text, finish_reason)


def _finish_reason(said: Tokens | ChoiceDone | Ended, output: TextOutput) -> str:
    if output.stopped:
        return "stop"
    if isinstance(said, Tokens):
        return ""
    return "length" if said.reason is FinishReason.LENGTH else "stop"

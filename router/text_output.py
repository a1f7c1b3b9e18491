"""The text of one attempt: detokenised token by token, cut at the first stop string."""

from collections.abc import Collection, Sequence

from router.stop_strings import StopMatcher
from router.tokenizer import Tokenizer


class TextOutput:
    """`stop_tokens`: end an output, and are not shown. `tokens`: how many make up the output. `stopped`: a stop string
    is complete, the output is over."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], stop_tokens: Collection[int]) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._matcher = StopMatcher(stops)
        self._stop_tokens = frozenset(stop_tokens)
        self.tokens = 0
        self.stopped = False

    def feed(self, tokens: Sequence[int]) -> str:
        """Text that may be shown now. Tokens after the one that completed a stop string do not count."""
        shown = []
        for token in tokens:
            self.tokens += 1
            piece = "" if token in self._stop_tokens else self._detokenizer.feed(token)
            text, self.stopped = self._matcher.feed(piece)
            shown.append(text)
            if self.stopped:
                break
        return "".join(shown)

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        text, self.stopped = self._matcher.feed(self._detokenizer.finish())
        return text if self.stopped else text + self._matcher.finish()

"""Token ids to text, one token at a time, in constant time per token, never half a character."""

import codecs
from collections.abc import Callable


class Detokenizer:
    """One output's state. The pieces of text, `finish` included, join to the decoding of all its tokens at once.

    `piece`: a token's bytes (empty for tokens that are not shown). Bytes that can never become a character come out
    as U+FFFD, as in any UTF-8 decoder; a character that may still be completed is held back.
    """

    def __init__(self, piece: Callable[[int], bytes], leading_spaces: int) -> None:
        self._piece = piece
        self._spaces_to_drop = leading_spaces
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        return self._without_leading(self._characters.decode(self._piece(token)))

    def finish(self) -> str:
        """The output is over: what was held back, as U+FFFD."""
        return self._without_leading(self._characters.decode(b"", final=True))

    def _without_leading(self, text: str) -> str:
        while self._spaces_to_drop and text:
            if text[0] != " ":
                self._spaces_to_drop = 0
                break
            text = text[1:]
            self._spaces_to_drop -= 1
        return text

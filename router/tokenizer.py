"""Text to token ids and back, over the tokenizers library: no torch, no model."""

from collections.abc import Mapping, Sequence

import tokenizers

from router.chat_template import ChatTemplate
from router.detokenizer import Detokenizer
from router.pieces import PieceDecoder


class Tokenizer:
    """Encoding may run on any thread; a piece once looked up is kept, so detokenising costs a list access."""

    def __init__(
        self, backend: tokenizers.Tokenizer, pieces: PieceDecoder, hidden: frozenset[int], template: ChatTemplate | None
    ) -> None:
        """`hidden`: tokens that are never shown as text (the special ones, and those that end an output)."""
        self._backend = backend
        self._pieces = pieces
        self._hidden = hidden
        self._template = template
        self.vocabulary_size = backend.get_vocab_size(with_added_tokens=True)
        self._bytes: list[bytes | None] = [None] * self.vocabulary_size

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """With the tokens that this model's tokenizer adds around a text."""
        return list(self._backend.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The template writes its own special tokens. Raises TemplateRefused."""
        assert self._template is not None
        return list(self._backend.encode(self._template.render(messages), add_special_tokens=False).ids)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self.piece, self._pieces.leading_spaces)

    def piece(self, token: int) -> bytes:
        """The bytes that `token` shows; none for hidden and unknown ones."""
        if token >= self.vocabulary_size:
            return b""
        known = self._bytes[token]
        if known is None:
            known = self._bytes[token] = self._look_up(token)
        return known

    def _look_up(self, token: int) -> bytes:
        text = None if token in self._hidden else self._backend.id_to_token(token)
        return b"" if text is None else self._pieces.to_bytes(text)

"""Text to token ids and back for one model folder. Loads tokenizer.json alone: no torch, no model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from protocol.digest import tokenizer_digest
from router.chat_template import ChatTemplate, read_chat_template, special_tokens
from router.detokenizer import Detokenizer
from router.pieces import PieceDecoder, UnsupportedTokenizer, piece_decoder


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


class ModelFolder:
    """The files of a model folder that a router reads. Raises UnsupportedTokenizer, BadTemplate, OSError."""

    def __init__(self, path: Path) -> None:
        if not (path / "tokenizer.json").is_file():
            raise UnsupportedTokenizer(f"{path} has no tokenizer.json: save the model's fast tokenizer there")
        self.path = path
        self._config = _read(path / "config.json")
        self._tokenizer_config = _read(path / "tokenizer_config.json")
        self.digest = tokenizer_digest(path)

    @property
    def max_context(self) -> int:
        """Most tokens, prompt and output together, that the model was made for."""
        text_config = self._config.get("text_config", self._config)
        return int(text_config["max_position_embeddings"])

    def tokenizer(self) -> Tokenizer:
        raw = _read(self.path / "tokenizer.json")
        backend = tokenizers.Tokenizer.from_file(str(self.path / "tokenizer.json"))
        backend.no_truncation()
        backend.no_padding()
        special = frozenset(token["id"] for token in raw.get("added_tokens", []) if token["special"])
        return Tokenizer(
            backend,
            piece_decoder(raw.get("decoder")),
            special | self._end_tokens(backend),
            read_chat_template(self.path, self._tokenizer_config),
        )

    def _end_tokens(self, backend: tokenizers.Tokenizer) -> frozenset[int]:
        found: set[int] = set()
        for config in (self._config, _read(self.path / "generation_config.json")):
            ids = config.get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
        eos = backend.token_to_id(special_tokens(self._tokenizer_config).get("eos_token", ""))
        return frozenset(found if eos is None else found | {eos})


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}

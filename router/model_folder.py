"""The files of a model folder that a router reads: tokenizer, chat template, end tokens, context. No weights."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from protocol.digest import tokenizer_digest
from router.chat_template import read_chat_template, special_tokens
from router.model_errors import BadModelFolder, UnsupportedTokenizer
from router.pieces import piece_decoder
from router.tokenizer import Tokenizer


class ModelFolder:
    """`digest`: of the tokenizer's files, equal on all nodes that serve this model."""

    def __init__(self, path: Path) -> None:
        """Raises BadModelFolder, UnsupportedTokenizer."""
        if not (path / "tokenizer.json").is_file():
            raise UnsupportedTokenizer(f"{path} has no tokenizer.json: save the model's fast tokenizer there")
        self.path = path
        self._config = _read(path / "config.json")
        self._tokenizer_config = _read(path / "tokenizer_config.json")
        self.digest = tokenizer_digest(path)

    @property
    def max_context(self) -> int:
        """Most tokens, prompt and output together, that the model was made for. Raises BadModelFolder."""
        limit = self._config.get("text_config", self._config).get("max_position_embeddings")
        if not isinstance(limit, int) or limit < 1:
            raise BadModelFolder(f"{self.path}/config.json names no max_position_embeddings")
        return limit

    def tokenizer(self) -> Tokenizer:
        """Raises BadModelFolder, UnsupportedTokenizer, BadTemplate."""
        raw = _read(self.path / "tokenizer.json")
        backend = self._backend()
        special = frozenset(token["id"] for token in raw.get("added_tokens", []) if token["special"])
        return Tokenizer(
            backend,
            piece_decoder(raw.get("decoder")),
            special | self._end_tokens(backend),
            read_chat_template(self.path, self._tokenizer_config),
        )

    def _backend(self) -> tokenizers.Tokenizer:
        try:
            backend = tokenizers.Tokenizer.from_file(str(self.path / "tokenizer.json"))
        except Exception as error:  # the library raises nothing more exact
            raise BadModelFolder(f"{self.path}/tokenizer.json: {error}") from error
        backend.no_truncation()
        backend.no_padding()
        return backend

    def _end_tokens(self, backend: tokenizers.Tokenizer) -> frozenset[int]:
        found: set[int] = set()
        for config in (self._config, _read(self.path / "generation_config.json")):
            ids = config.get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
        eos = backend.token_to_id(special_tokens(self._tokenizer_config).get("eos_token", ""))
        return frozenset(found if eos is None else found | {eos})


def _read(path: Path) -> dict[str, Any]:
    """Empty for a file that is not there. Raises BadModelFolder."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadModelFolder(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise BadModelFolder(f"{path} holds no JSON object")
    return value

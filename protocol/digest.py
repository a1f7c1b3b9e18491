"""Digests that decide whether two processes serve the same model."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from protocol import PROTOCOL_VERSION
from protocol.layout import KVLayout

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Which model a node serves. `digest` covers weights and config, `tokenizer` what the router must share."""

    name: str
    digest: str
    tokenizer: str


def served_model(folder: Path) -> ServedModel:
    return ServedModel(folder.resolve().name, model_digest(folder), tokenizer_digest(folder))


def tokenizer_digest(model: Path) -> str:
    """Over the tokenizer and chat template files of a model folder, by name and content."""
    return _digest_files(model / name for name in _TOKENIZER_FILES if (model / name).is_file())


def model_digest(model: Path) -> str:
    """Over config, weights and tokenizer of a model folder."""
    weights = sorted(model.glob("*.safetensors"))
    return _digest_files([model / "config.json", *weights]) + tokenizer_digest(model)


def compatibility_digest(model: str, layout: KVLayout) -> str:
    """What must be equal before two nodes exchange KV: protocol version, model, and what its KV consists of. How that
    is cut into pages and over ranks may differ: the handshake judges it."""
    facts = [
        PROTOCOL_VERSION,
        model,
        layout.dtype,
        [[group.layers, group.window] for group in layout.groups],
        layout.kv_heads,
        layout.parts,
        layout.head_dim,
    ]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _digest_files(files: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()

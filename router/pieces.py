"""What bytes each token stands for, read from the decoder section of a tokenizer.json.

Byte-level BPE (Llama 3, Qwen, SmolLM2, gpt-oss, DeepSeek) writes each byte as one printable character; SentencePiece
style (Llama 2, Mistral, Gemma) writes a space as U+2581 and rare bytes as <0xNN>. With bytes per token, text can be
given out as soon as its characters are whole, without ever decoding a token twice.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from router.model_errors import UnsupportedTokenizer

SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class PieceDecoder:
    """`to_bytes` maps one token's text. `leading_spaces`: so many spaces at the start of an output are not shown."""

    to_bytes: Callable[[str], bytes]
    leading_spaces: int


def piece_decoder(decoder: Mapping[str, Any] | None) -> PieceDecoder:
    """`decoder`: that section of tokenizer.json. Raises UnsupportedTokenizer."""
    steps = _steps(decoder)
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return PieceDecoder(_byte_level, 0)
    if "Metaspace" in kinds:
        strips = steps[kinds.index("Metaspace")].get("prepend_scheme") != "never"
        return PieceDecoder(_sentencepiece, int(strips))
    if any(step["type"] == "Replace" and step["pattern"] == {"String": SPACE} for step in steps):
        strip = next((step for step in steps if step["type"] == "Strip"), None)
        return PieceDecoder(_sentencepiece, strip["start"] if strip else 0)
    raise UnsupportedTokenizer(f"tokenizer.json decodes by {kinds or 'nothing'}: only byte-level and SentencePiece do")


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the rest for characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTES = _byte_alphabet()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(_BYTES[character] for character in piece)
    except KeyError:  # an added token, written as plain text
        return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ").encode()

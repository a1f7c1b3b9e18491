"""One record, one MessagePack frame. Decoding is bounded and typed: nothing unexpected comes through."""

from typing import Any, TypeVar

import msgpack
import msgspec

MAX_FRAME_BYTES = 16 << 20
MAX_ITEMS = 1 << 20
MAX_KEYS = 64

T = TypeVar("T")


class BadFrame(ValueError):
    """The frame is too large, not MessagePack, or not a record of the expected type. Count it and drop it."""


def encode(message: msgspec.Struct) -> bytes:
    """Raises BadFrame if the record is too large to be decoded by a peer."""
    frame: bytes = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)), use_bin_type=True)
    if len(frame) > MAX_FRAME_BYTES:
        raise BadFrame(f"{type(message).__name__} takes {len(frame)} bytes, limit {MAX_FRAME_BYTES}")
    return frame


def decode(frame: bytes, expected: type[T] | Any) -> T:
    """`expected`: a Struct, or a union of tagged ones. Raises BadFrame."""
    if len(frame) > MAX_FRAME_BYTES:
        raise BadFrame(f"frame of {len(frame)} bytes, limit {MAX_FRAME_BYTES}")
    try:
        plain = msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            max_str_len=1 << 16,
            max_bin_len=MAX_FRAME_BYTES,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_KEYS,
            max_ext_len=0,
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise BadFrame(f"not a MessagePack frame: {error}") from error
    try:
        record: T = msgspec.convert(plain, expected, strict=True, builtin_types=(bytes,))
    except (msgspec.ValidationError, RecursionError) as error:
        raise BadFrame(f"not a {getattr(expected, '__name__', 'known message')}: {error}") from error
    return record

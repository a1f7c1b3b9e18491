"""The bytes by which a landing is reached: its address on each rail, and its name on its own host.

They cross the network inside a greeting: four bytes that say the format, then items of kind (u8), size (u16), bytes.
"""

import struct
from dataclasses import dataclass
from typing import Self

_FORMAT = b"KVF1"
_ITEM = struct.Struct("<BH")
_RAIL, _SAME_HOST = 1, 2


@dataclass(frozen=True, slots=True)
class LandingAddress:
    """`rails`: as the provider has them. `same_host`: the name of the socket where processes of the same host may come,
    empty for none."""

    rails: tuple[bytes, ...] = ()
    same_host: bytes = b""

    def encode(self) -> bytes:
        items = [(_RAIL, rail) for rail in self.rails]
        if self.same_host:
            items.append((_SAME_HOST, self.same_host))
        return _FORMAT + b"".join(_ITEM.pack(kind, len(value)) + value for kind, value in items)

    @classmethod
    def decode(cls, address: bytes) -> Self | None:
        """None for what is no landing's address. Kinds that are not known are another version's, and skipped."""
        if not address.startswith(_FORMAT):
            return None
        rails, same_host, at = [], b"", len(_FORMAT)
        while at < len(address):
            begin = at + _ITEM.size
            if begin > len(address):
                return None
            kind, size = _ITEM.unpack_from(address, at)
            at = begin + size
            if at > len(address):
                return None
            if kind == _RAIL:
                rails.append(address[begin:at])
            elif kind == _SAME_HOST:
                same_host = address[begin:at]
        return cls(tuple(rails), same_host)

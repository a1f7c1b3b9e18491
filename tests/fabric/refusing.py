"""A provider whose endpoint refuses to be closed: libfabric's own, with one entry of its table of calls replaced.

The layout is libfabric's public one: an endpoint begins with its fid (class, context, table), a table of calls with
its size and `close`. Our C endpoint begins with its id, and a pointer to its ports; a port begins with libfabric's.
"""

import ctypes
import errno

from fabric.api import Landing, Sending
from fabric.libfabric import LibfabricEngine
from fabric.native import core

_WORD = ctypes.sizeof(ctypes.c_void_p)
_Close = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class RefusingEndpoint:
    """From now on closing it, on its first rail, fails with EBUSY. `asked` counts how often that was tried."""

    def __init__(self, engine: LibfabricEngine, endpoint: Landing | Sending) -> None:
        self.asked = 0
        self._close = _Close(self._refuse)
        address = int(core().ffi.cast("uintptr_t", engine._endpoints[endpoint.id].raw))
        table_at = _pointer(_pointer(address + _WORD)) + 2 * _WORD
        table = _pointer(table_at)
        self._table = ctypes.create_string_buffer(ctypes.string_at(table, ctypes.c_size_t.from_address(table).value))
        ours = ctypes.addressof(self._table)
        ctypes.c_void_p.from_address(ours + _WORD).value = ctypes.cast(self._close, ctypes.c_void_p).value
        ctypes.c_void_p.from_address(table_at).value = ours

    def _refuse(self, fid: int) -> int:
        self.asked += 1
        return -errno.EBUSY


def _pointer(address: int) -> int:
    value = ctypes.c_void_p.from_address(address).value
    assert value
    return value

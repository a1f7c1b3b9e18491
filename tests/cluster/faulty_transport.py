"""A node whose transport does what a script says, which a test may replace while the node runs.

Everything of ours is what always runs, the C core included: libfabric's endpoints have one entry of their table of
calls replaced, and the engine above them may be made to raise. The layouts are libfabric's public ones: an endpoint
begins with its fid (three words) and the tables for its own calls, connections, messages and RMA; `writemsg` is the
sixth call of the latter; a message ends with its immediate. A domain has its table for memory there, too, which begins
with the call that registers. Our C endpoint begins with its id and a pointer to its
ports, a port with libfabric's endpoint. Peers on the same host have none: such nodes need --no-same-host.
"""

import ctypes
import errno
import importlib
import json
import os
import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fabric.api import Event, Landing, MemoryRegion, PageWrites, Sending
from fabric.errors import FabricUsageError, FenceFailed
from fabric.libfabric import LibfabricEngine
from fabric.native import core
from kv_messenger import data_plane
from tests.cluster.repeated_words import RepeatingPeers

_WORD = ctypes.sizeof(ctypes.c_void_p)
_RMA_TABLE_AT = 6 * _WORD
_WRITEMSG_AT = 6 * _WORD
_IMMEDIATE_AT = 7 * _WORD
_REGISTRATION_TABLE_AT = 4 * _WORD
_Register = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_uint64] * 5, *[ctypes.c_void_p] * 2)
_WriteMessage = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)
_FOREIGN = 1 << 31
"""Makes an immediate another slot's, which nobody expects."""
_SEED = 20261130


@dataclass(frozen=True)
class Script:
    """Posts, batches and calls count from 1, from when the node read it; 0: never.

    fail_post: is refused with EIO. lose_immediate: its bytes land, with an immediate that nobody expects. busy_from:
    it and all later ones find the provider busy. busy_share: of all posts. raise_in: the method that raises at its
    `raise_at`-th call: "write" (a batch is not taken), "close_endpoint" (no fence), or "progress" (the thread's end).
    fail_registration: is refused with ENOMEM, by the NIC. repeat_words: see `repeated_words`; read at the start alone.
    """

    fail_post: int = 0
    lose_immediate: int = 0
    busy_from: int = 0
    busy_share: float = 0.0
    raise_in: str = ""
    raise_at: int = 1
    fail_registration: int = 0
    repeat_words: bool = False

    def write(self, path: Path) -> None:
        """For the node to find, whole."""
        fresh = path.with_suffix(".fresh")
        fresh.write_text(json.dumps(asdict(self)))
        os.replace(fresh, path)


class _Reader:
    """The script as it is now, and how far it has come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = (0, 0)
        self.script = Script()
        self.posts = self.calls = 0
        self.chance = random.Random(_SEED)

    def now(self) -> Script:
        status = self._path.stat() if self._path.exists() else None
        written = (status.st_ino, status.st_mtime_ns) if status else (0, 0)  # an inode comes again
        if written != self._seen:
            self._seen, self.posts, self.calls = written, 0, 0
            self.script = Script(**json.loads(self._path.read_text())) if status else Script()
        return self.script


class FaultyEngine:
    """A libfabric engine, but for what the script says."""

    def __init__(self, engine: LibfabricEngine, script: Path) -> None:
        self._engine = engine
        self._reader = _Reader(script)
        self._kept: list[Any] = []
        self._callback = _WriteMessage(self._post)
        self._real: Any = None
        self._registrations = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def connect(self, *where: Any, **how: Any) -> Sending:
        sending = self._engine.connect(*where, **how)
        self._replace_writemsg(sending)
        return sending

    def write(self, endpoint: Sending, batch: PageWrites) -> int:
        self._may_raise("write", FabricUsageError("not taken, by the script"))
        return self._engine.write(endpoint, batch)

    def write_when(self, endpoint: Sending, word_address: int, threshold: int, batch: PageWrites) -> int:
        self._may_raise("write", FabricUsageError("not taken, by the script"))
        return self._engine.write_when(endpoint, word_address, threshold, batch)

    def close_endpoint(self, endpoint: Landing | Sending) -> None:
        self._may_raise("close_endpoint", FenceFailed("not closed, by the script"))
        self._engine.close_endpoint(endpoint)

    def register(self, *memory: Any, **how: Any) -> MemoryRegion:
        self._registrations += 1
        if self._registrations == self._reader.now().fail_registration:
            self._refuse_registrations()
        return self._engine.register(*memory, **how)

    def progress(self, timeout: float) -> list[Event]:
        self._may_raise("progress", RuntimeError("the thread ends here, by the script"))
        return self._engine.progress(timeout)

    def _may_raise(self, method: str, error: Exception) -> None:
        script = self._reader.now()
        if script.raise_in == method:
            self._reader.calls += 1
            if self._reader.calls == script.raise_at:
                raise error

    def _replace_writemsg(self, sending: Sending) -> None:
        endpoint = _pointer(_pointer(self._address_of(sending) + _WORD))
        at = self._own_table(endpoint + _RMA_TABLE_AT)
        self._real = _WriteMessage(_pointer(at + _WRITEMSG_AT))
        ctypes.c_void_p.from_address(at + _WRITEMSG_AT).value = ctypes.cast(self._callback, ctypes.c_void_p).value

    def _refuse_registrations(self) -> None:
        """Of the domain, which any endpoint of ours leads to: port, rail, its fourth pointer behind two of names."""
        landing = self._engine.open_landing("nobody")
        port = _pointer(self._address_of(landing) + _WORD)
        domain = _pointer(_pointer(port + 2 * _WORD) + 4 * _WORD)
        self._kept.append(refuse := _Register(lambda *_: -errno.ENOMEM))
        at = self._own_table(domain + _REGISTRATION_TABLE_AT)
        ctypes.c_void_p.from_address(at + _WORD).value = ctypes.cast(refuse, ctypes.c_void_p).value

    def _address_of(self, endpoint: Landing | Sending) -> int:
        return int(core().ffi.cast("uintptr_t", self._engine._endpoints[endpoint.id].raw))

    def _own_table(self, table_at: int) -> int:
        """A copy of a table of calls, which begins with its size, in its place."""
        table = _pointer(table_at)
        self._kept.append(ours := ctypes.create_string_buffer(ctypes.string_at(table, _size_at(table))))
        ctypes.c_void_p.from_address(table_at).value = ctypes.addressof(ours)
        return ctypes.addressof(ours)

    def _post(self, endpoint: int, message: int, flags: int) -> int:
        """In place of libfabric's: `posts` counts those that went through, or failed."""
        reader, script = self._reader, self._reader.now()
        number = reader.posts + 1
        if (script.busy_from and number >= script.busy_from) or reader.chance.random() < script.busy_share:
            return -errno.EAGAIN
        if number == script.fail_post:
            reader.posts = number
            return -errno.EIO
        if number == script.lose_immediate:
            ctypes.c_uint64.from_address(message + _IMMEDIATE_AT).value ^= _FOREIGN
        result = int(self._real(endpoint, message, flags))
        reader.posts += result == 0
        return result


def run(program: str, arguments: list[str], script: str) -> int:
    """The node's own `main`, over such a transport."""
    if Script(**json.loads(Path(script).read_text())).repeat_words:
        vars(importlib.import_module("prefill_node.node"))["DecodePeers"] = RepeatingPeers
    opened = vars(data_plane)["open_engine"]
    vars(data_plane)["open_engine"] = lambda *args, **options: FaultyEngine(opened(*args, **options), Path(script))
    return int(importlib.import_module(program).main(arguments))


def _pointer(address: int) -> int:
    value = ctypes.c_void_p.from_address(address).value
    assert value
    return value


def _size_at(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value

"""The transfer engine over libfabric: Python keeps handles and contracts, the C core does the work."""

import resource
import secrets
import threading
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from fabric import paged
from fabric.api import (
    Event,
    FabricCounters,
    FabricGauges,
    Landing,
    MemoryRegion,
    PageWrites,
    RailKey,
    RemoteRegion,
    Sending,
    TransferEngine,
    WritesEnded,
)
from fabric.errors import EndpointClosed, FabricUnavailable, FabricUsageError, FenceFailed, RegistrationFailed
from fabric.immediates import unpack
from fabric.landing_address import LandingAddress
from fabric.limits import Limits
from fabric.native import core, describe
from fabric.native_events import decode, decode_doubt
from fabric.native_writes import encode
from fabric.same_host import SAME_HOST

_ADDRESS_BYTES = 256
_EVENTS_PER_CALL = 256


def _remedy(device: int | None) -> str:
    """What to look at where memory could not be registered."""
    if device is not None:
        return (
            f"memory of CUDA device {device}: the NIC's driver must reach it, by dmabuf (libfabric 1.20, Linux 5.12, "
            "the open NVIDIA kernel modules) or through nvidia-peermem"
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return f"locked memory is limited to {soft} bytes (hard limit {hard}, -1: none): raise `ulimit -l` or LimitMEMLOCK"


@dataclass(frozen=True, slots=True)
class _Opened:
    """`fenced`: rails of a landing."""

    raw: Any
    peer: str
    landing: bool
    fenced: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Registered:
    """`shared`: a peer on this host can read it. `device`: nobody on the host can."""

    raw: Any
    shared: bool
    device: bool


class LibfabricEngine(TransferEngine):
    """Made by `fabric.libfabric.open_engine`. Owns every libfabric object; handles and ids are never reused. `nics`:
    its rails, in words."""

    def __init__(self, raw: Any, provider: str, same_host: bool, nics: Sequence[str], limits: Limits) -> None:
        self._ffi, self._lib = core()
        self._raw = raw
        self.provider = provider
        self.nics = nics
        self.rails = max(1, len(nics))
        self._same_host = same_host
        self._limits = limits
        self._ids = count(1)
        self._regions: dict[int, _Registered] = {}
        self._endpoints: dict[int, _Opened] = {}
        self._batches: dict[int, tuple[Any, str]] = {}  # handle -> (batch, peer)
        self._expectations: dict[int, tuple[int, int]] = {}  # handle -> (landing id, slot)
        self._forgotten = array("I")  # slots of expectations that are over, of which the core was not told yet
        self._error = self._ffi.new("kf_error *")
        self._events = self._ffi.new("kf_event[]", _EVENTS_PER_CALL)
        self._wake_lock = threading.Lock()

    @property
    def delivery_complete(self) -> bool:
        """Whether a completed write is known to have been delivered, not just sent."""
        return bool(self._lib.kf_delivery_complete(self._open()))

    def _open(self) -> Any:
        if self._raw is None:
            raise FabricUsageError("the engine is closed")
        return self._raw

    @property
    def device_memory(self) -> bool:
        """Whether memory of CUDA devices can be registered."""
        return bool(self._lib.kf_takes_device_memory(self._open()))

    def register(
        self,
        address: int,
        length: int,
        device: int | None = None,
        file: int | None = None,
        file_offset: int = 0,
        rails: Sequence[int] | None = None,
    ) -> MemoryRegion:
        paged.check_memory(address, length)
        reached = paged.check_rails(rails, self.rails)
        if device is not None and not self.device_memory:
            raise FabricUsageError("memory of CUDA devices needs an engine opened with device_memory=True")
        if device is not None and device < 0:
            raise FabricUsageError(f"there is no CUDA device {device}")
        ordinal = -1 if device is None else device
        mask, fd = sum(1 << rail for rail in reached), file if self._same_host and file is not None else -1
        memory = self._ffi.new("kf_memory *", (address, length, secrets.randbits(64), ordinal, fd, file_offset, mask))
        raw = self._lib.kf_register(self._open(), memory, self._error)
        if raw == self._ffi.NULL:
            raise RegistrationFailed(f"{describe(self._error)} for {length} bytes at {address:#x}; {_remedy(device)}")
        region = next(self._ids)
        self._regions[region] = _Registered(raw, bool(self._lib.kf_region_is_shared(raw)), device is not None)
        keys = tuple(RailKey(rail, self._lib.kf_region_key(raw, rail)) for rail in reached)
        return MemoryRegion(region, address, length, RemoteRegion(keys, self._lib.kf_region_base(raw), length))

    def is_dmabuf(self, region: MemoryRegion) -> bool:
        """Whether the NIC was given the device's pages by a dmabuf; otherwise by address."""
        return bool(self._lib.kf_region_is_dmabuf(self._region(region).raw))

    def _region(self, region: MemoryRegion) -> _Registered:
        registered = self._regions.get(region.id)
        if registered is None:
            raise FabricUsageError(f"region {region.id} is not registered here")
        return registered

    def deregister(self, region: MemoryRegion) -> None:
        self._lib.kf_deregister(self._raw, self._region(region).raw)
        del self._regions[region.id]

    def open_landing(self, peer: str) -> Landing:
        endpoint = next(self._ids)
        same_host = self._same_host and not any(region.device for region in self._regions.values())
        raw = self._lib.kf_open_landing(self._open(), endpoint, same_host, self._error)
        self._add_endpoint(endpoint, raw, peer, landing=True)
        name = self._lib.kf_same_host_name(raw)
        address = LandingAddress(self._addresses(endpoint, raw), self._ffi.string(name) if name else b"")
        return Landing(endpoint, peer, address.encode())

    def _addresses(self, endpoint: int, raw: Any) -> tuple[bytes, ...]:
        """By rail."""
        if self.provider == SAME_HOST:
            return ()
        room = _ADDRESS_BYTES * self.rails
        buffer, size = self._ffi.new("char[]", room), self._ffi.new("size_t *", room)
        if self._lib.kf_endpoint_address(raw, buffer, size, self._error):
            peer = self._endpoints[endpoint].peer
            self._close(endpoint)
            raise FabricUnavailable(f"no address for {peer}: {describe(self._error)}")
        whole, each = self._ffi.buffer(buffer, size[0])[:], size[0] // self.rails
        return tuple(whole[at : at + each] for at in range(0, len(whole), each))

    def connect(
        self, peer: str, landing_address: bytes, without: Collection[int] = (), asks_peer: bool = False
    ) -> Sending:
        paged.check_without(without, self.rails)
        endpoint, address = next(self._ids), LandingAddress.decode(landing_address) or LandingAddress()
        raw = self._connect_same_host(endpoint, address.same_host)
        if raw == self._ffi.NULL:
            rails = b"".join(address.rails)
            mask = sum(1 << rail for rail in set(without))
            raw = self._lib.kf_connect(self._open(), endpoint, rails, len(rails), mask, asks_peer, self._error)
        self._add_endpoint(endpoint, raw, peer, landing=False)
        return Sending(endpoint, peer)

    def _connect_same_host(self, endpoint: int, name: bytes) -> Any:
        """NULL where that way is not to be taken; with it as the only one, an endpoint that has failed."""
        alone = self.provider == SAME_HOST
        shared = self._same_host and all(region.shared for region in self._regions.values())
        if not alone and not (shared and name):
            return self._ffi.NULL
        raw = self._lib.kf_connect_same_host(self._open(), endpoint, name, len(name), self._error)
        if raw == self._ffi.NULL and alone:
            return self._lib.kf_connect_failed(self._open(), endpoint, self._error, self._error)
        return raw

    def provider_of(self, endpoint: Landing | Sending) -> str:
        raw = self._find(endpoint).raw
        # C is asked only where there is a choice: each call gives the GIL away, and waits for it afterwards
        return SAME_HOST if self._same_host and self._lib.kf_is_same_host(raw) else self.provider

    def fence_needs_dead_peer(self, landing: Landing) -> bool:
        return bool(self._lib.kf_closes_dead_only(self._open())) and self.provider_of(landing) != SAME_HOST

    def _add_endpoint(self, endpoint: int, raw: Any, peer: str, *, landing: bool) -> None:
        if raw == self._ffi.NULL:
            raise FabricUnavailable(f"no endpoint for {peer}: {describe(self._error)}")
        self._endpoints[endpoint] = _Opened(raw, peer, landing)

    def close_endpoint(self, endpoint: Landing | Sending) -> None:
        self._find(endpoint)
        self._tell_forgotten()
        self._expectations = {h: at for h, at in self._expectations.items() if at[0] != endpoint.id}
        self._close(endpoint.id)

    def _close(self, endpoint: int) -> None:
        opened = self._endpoints.pop(endpoint)
        if self._lib.kf_close_endpoint(self._raw, opened.raw, self._error):
            raise FenceFailed(f"endpoint {endpoint} to {opened.peer} is not closed: {describe(self._error)}")

    def fence_rails(self, landing: Landing, rails: Collection[int], completed: Mapping[int, int]) -> list[int]:
        opened = self._find(landing)
        paged.check_fenced(rails, self.rails, opened.fenced)
        if self._lib.kf_closes_dead_only(self._open()):
            raise FabricUsageError(f"{self.provider} closes endpoints of dead peers alone")
        opened.fenced.update(rails)
        self._tell_forgotten()
        doubts = self._ffi.new("kf_doubt[]", [(immediate, 0, count) for immediate, count in completed.items()])
        mask = sum(1 << rail for rail in set(rails))
        if self._lib.kf_fence_rails(self._open(), opened.raw, mask, doubts, len(doubts), self._error):
            raise FenceFailed(f"rails {sorted(rails)} of {opened.peer} are not closed: {describe(self._error)}")
        return [doubt.immediate for doubt in doubts if doubt.again]

    def settle_rail(self, endpoint: Sending, rail: int, again: Collection[int]) -> None:
        opened = self._find(endpoint)
        self._lib.kf_settle_rail(self._open(), opened.raw, rail, list(again), len(again))

    def _find(self, endpoint: Landing | Sending) -> _Opened:
        opened = self._endpoints.get(endpoint.id)
        if opened is None or opened.landing != isinstance(endpoint, Landing):
            raise EndpointClosed(f"endpoint {endpoint.id} to {endpoint.peer} is closed")
        return opened

    def write(self, endpoint: Sending, batch: PageWrites) -> int:
        return self._submit(endpoint, batch, 0, 0)

    def write_when(self, endpoint: Sending, word_address: int, threshold: int, batch: PageWrites) -> int:
        paged.check_word(word_address, threshold)
        return self._submit(endpoint, batch, word_address, threshold)

    def _submit(self, endpoint: Sending, batch: PageWrites, word_address: int, threshold: int) -> int:
        opened = self._find(endpoint)
        paged.check(batch)
        region, local = self._region(batch.source), self.provider_of(endpoint) == SAME_HOST
        if local and not region.shared:
            raise FabricUsageError("this memory is not shared with peers on this host: register it with its file")
        flat = encode(batch, region.raw, local, chance=endpoint.id)
        handle = next(self._ids)
        raw = self._lib.kf_write(self._raw, opened.raw, handle, flat.record, word_address, threshold)
        if raw == self._ffi.NULL:
            raise MemoryError(f"{len(batch.source_indices)} writes")
        self._batches[handle] = raw, opened.peer
        return handle

    def cancel(self, handle: int) -> tuple[int, int]:
        if handle not in self._batches:
            return 0, 0
        posted, completed = self._ffi.new("int64_t *"), self._ffi.new("int64_t *")
        self._lib.kf_cancel(self._raw, self._batches[handle][0], posted, completed)
        return posted[0], completed[0]

    def expect(self, landing: Landing, immediate: int, count: int) -> int:
        opened = self._find(landing)
        paged.check_count(count, at_least=1)
        paged.check_immediate(immediate)
        handle, (slot, _) = next(self._ids), unpack(immediate)
        self._tell_forgotten()
        if self._lib.kf_expect(self._raw, opened.raw, handle, immediate, count):
            raise FabricUsageError(f"transfer slot {slot} is armed already")
        self._expectations[handle] = landing.id, slot
        return handle

    def _slot(self, handle: int) -> int:
        if handle not in self._expectations:
            raise FabricUsageError(f"no expectation {handle}")
        return self._expectations[handle][1]

    def revise(self, handle: int, count: int) -> None:
        paged.check_count(count, at_least=0)
        self._lib.kf_revise(self._raw, self._slot(handle), count)

    def counted(self, handle: int) -> int:
        return int(self._lib.kf_counted(self._raw, self._slot(handle)))

    def forget(self, handle: int) -> None:
        """The core is told before it is asked for anything that depends on it. Each call of it gives the GIL away, and
        transfers that arrive together would each hand it to a thread that cannot keep it."""
        if handle in self._expectations:
            self._forgotten.append(self._expectations.pop(handle)[1])

    def _tell_forgotten(self) -> None:
        if self._forgotten:
            slots, self._forgotten = self._forgotten, array("I")
            self._lib.kf_forget(self._open(), self._ffi.from_buffer("uint32_t[]", slots), len(slots))

    def progress(self, timeout: float) -> list[Event]:
        self._tell_forgotten()
        n = self._lib.kf_progress(self._open(), int(timeout * 1e9), self._events, _EVENTS_PER_CALL)
        return [self._event(self._events[i]) for i in range(n)]

    def _event(self, raw: Any) -> Event:
        if raw.kind == self._lib.KF_RAIL_IN_DOUBT:
            return decode_doubt(raw, self._peer_of(raw.id), self._doubts(raw.id, raw.count))
        event = decode(raw, self._peer_of(raw.id))
        if isinstance(event, WritesEnded):
            del self._batches[event.handle]
        return event

    def _doubts(self, endpoint: int, rail: int) -> dict[int, int]:
        """By immediate, how many of its writes on that rail have completed."""
        doubts = self._ffi.new("kf_doubt[]", self._limits.endpoint_writes)
        found = self._lib.kf_read_doubts(self._open(), self._endpoints[endpoint].raw, rail, doubts, len(doubts))
        return {doubt.immediate: doubt.completed for doubt in doubts[0:found]}

    def _peer_of(self, subject: int) -> str:
        if subject in self._batches:
            return self._batches[subject][1]
        return self._endpoints[subject].peer if subject in self._endpoints else ""

    def wake(self) -> None:
        with self._wake_lock:
            if self._raw is not None:
                self._lib.kf_wake(self._raw)

    def counters(self) -> FabricCounters:
        raw = self._read_counters()
        return FabricCounters(**{name: getattr(raw, name) for name in FabricCounters.__dataclass_fields__})

    def writes_by_rail(self) -> list[int]:
        return [int(self._lib.kf_rail_posted(self._open(), rail)) for rail in range(self.rails)]

    def gauges(self) -> FabricGauges:
        raw = self._read_counters()
        return FabricGauges(**{name: getattr(raw, name) for name in FabricGauges.__dataclass_fields__})

    @property
    def sleeps(self) -> int:
        """How often `progress` went to sleep so far: what an idle or a waiting engine costs."""
        return int(self._read_counters().sleeps)

    def _read_counters(self) -> Any:
        self._tell_forgotten()
        raw = self._ffi.new("kf_counters *")
        self._lib.kf_read_counters(self._open(), raw)
        return raw

    def close(self) -> None:
        with self._wake_lock:
            raw, self._raw = self._raw, None
        for kept in (self._regions, self._endpoints, self._batches, self._expectations):
            kept.clear()
        if raw is not None and self._lib.kf_close(raw, self._error):
            raise FenceFailed(f"an endpoint is not closed: {describe(self._error)}")

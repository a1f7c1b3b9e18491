"""The interface of the fabric: records, events, and the `TransferEngine` that libfabric and the simulator implement.

Thread rule: one thread (the messenger's pump) makes every call of a `TransferEngine`; only `wake` may come
from any thread. Nothing here raises for a failure of the network: those are events.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fabric.errors import OperationError


class RailKey(NamedTuple):
    """The protection key of a memory on one rail of its engine."""

    rail: int
    key: int


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """What a peer needs to write into a memory: its keys, on the rails that reach it, the base that byte offsets are
    added to (the virtual address, or 0 where the provider counts from the region's start), and the length in bytes."""

    keys: tuple[RailKey, ...]
    base: int
    length: int


@dataclass(frozen=True, slots=True)
class MemoryRegion:
    """Registered local memory. `address` and `length` in bytes; stays valid until `deregister`."""

    id: int
    address: int
    length: int
    remote: RemoteRegion


@dataclass(frozen=True, slots=True)
class PageWrites:
    """`len(source_indices)` writes of `length` bytes, write i going

        from  source.address + source_indices[i] * source_stride + source_offset
        to    target         + target_indices[i] * target_stride + target_offset

    each carrying `immediate`. A single write has one index; an immediate-only write has length 0.
    The source bytes must stay unchanged until the handle's `WritesEnded`.
    """

    source: MemoryRegion
    source_indices: Sequence[int]
    source_stride: int
    source_offset: int
    target: RemoteRegion
    target_indices: Sequence[int]
    target_stride: int
    target_offset: int
    length: int
    immediate: int


@dataclass(frozen=True, slots=True)
class Landing:
    """A receiving endpoint opened for one peer instance, on every rail. `address`: opaque bytes that the peer connects
    to. What arrives is counted over all rails together."""

    id: int
    peer: str
    address: bytes


@dataclass(frozen=True, slots=True)
class Sending:
    """A sending endpoint, connected (lazily) to one landing endpoint of a peer."""

    id: int
    peer: str


@dataclass(frozen=True, slots=True)
class WritesFailed:
    """The first failure of a batch, at once: nothing more of it will be posted. `posted` is final.
    A `WritesEnded` follows when no posted write is outstanding any more."""

    handle: int
    posted: int
    error: OperationError


@dataclass(frozen=True, slots=True)
class WritesEnded:
    """The one terminal event of a batch: nothing of it is outstanding, its source bytes may be reused.

    posted / completed: writes handed to the network, and those that completed without error. `error` is None
    unless a write failed. Times are CLOCK_MONOTONIC nanoseconds, 0 where it never happened.
    `cancelled`: ended by `cancel` or by closing the endpoint.
    """

    handle: int
    posted: int
    completed: int
    bytes: int
    cancelled: bool
    error: OperationError | None
    first_posted_ns: int
    last_posted_ns: int
    completed_ns: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """An expectation saw exactly its count. Every byte of those writes is readable."""

    handle: int
    count: int
    first_ns: int
    last_ns: int


@dataclass(frozen=True, slots=True)
class OverCounted:
    """An expectation saw more than its count: the transfer must fail, closed. Reported once."""

    handle: int
    count: int


@dataclass(frozen=True, slots=True)
class EndpointFailed:
    """The connection of an endpoint broke. Writes on it end with their own events; close the endpoint.

    A write that fails breaks its sending endpoint on every provider, as verbs has it: what was not posted yet
    fails with the same error, and so does every later write on it. A landing reports it where the provider
    notices its peer's end (`net` does, in the middle of a write); silence proves nothing.

    Of several rails one that breaks is left out, silently but for `rails_lost`, as long as none of its writes is on its
    way. One with writes on their way, which may have landed and been counted or not, is in doubt (see RailInDoubt), or
    breaks the endpoint where nobody could tell what became of them: `rail` says which of ours it was, so that the next
    endpoint to this peer can do without it.
    """

    endpoint: int
    peer: str
    error: OperationError
    rail: int | None = None


@dataclass(frozen=True, slots=True)
class RailInDoubt:
    """One rail of a sending endpoint broke; nothing goes over it any more, and the others go on. Batches with writes on
    their way there do not end until `settle_rail` has said what became of these, or they are cancelled: whoever hears
    of this asks the peer, which calls `fence_rails` with `remotes`, those of its rails that were written to, and
    `completed`: for each immediate with writes in doubt, how many of its writes on this rail have completed. Where that
    is empty, nobody needs to be asked.

    With writes on their way only for endpoints that were opened for it; where completed writes are known to be
    delivered, and a landing may be closed while its peer lives; and if no other rail of ours has written to the same
    ones of the peer.
    """

    endpoint: int
    peer: str
    error: OperationError
    rail: int
    remotes: tuple[int, ...]
    completed: Mapping[int, int]


Event = WritesFailed | WritesEnded | Arrived | OverCounted | EndpointFailed | RailInDoubt


@dataclass(frozen=True, slots=True)
class FabricCounters:
    """What one engine has done since it was opened, for metrics: every number only grows. A write that moves from a
    rail that failed to another one was posted twice, and failed once."""

    writes_posted: int
    writes_completed: int
    writes_failed: int
    bytes_posted: int
    immediates_counted: int
    stale_immediates: int
    over_counts: int
    post_retries: int
    rails_lost: int


@dataclass(frozen=True, slots=True)
class FabricGauges:
    """What one engine holds now, for metrics and for the leak test: writes that are outstanding, batches that are
    armed, expectations, endpoints and regions."""

    outstanding: int
    armed: int
    expectations: int
    endpoints: int
    regions: int


class TransferEngine(ABC):
    """One per node. See the package docstring for the life of a write."""

    provider: str
    """libfabric's name of it ("net", "tcp;ofi_rxm", "efa", ...), "same-host" where there is none, or "simulated"."""

    rails: int
    """NICs, or interfaces, that it uses side by side; memory, endpoints and batches may use all of them."""

    @abstractmethod
    def register(
        self,
        address: int,
        length: int,
        device: int | None = None,
        file: int | None = None,
        file_offset: int = 0,
        rails: Sequence[int] | None = None,
    ) -> MemoryRegion:
        """Name `length` bytes at `address` to the network. The memory must not move or be freed before `deregister`.
        `device`: the ordinal of the CUDA device whose memory it is; None: the host's. `file`: a memfd that the
        memory is a shared mapping of, from `file_offset` on. It is sealed against growing, shrinking and
        further writable mappings; where that is possible, peers of this user on this host may be given it to
        read, and may read on after `deregister`. `rails`: those that shall carry its pages; None: all. Raises
        RegistrationFailed, FabricUsageError for what is no memory or no rail, and where devices' memory cannot
        be registered."""

    @abstractmethod
    def deregister(self, region: MemoryRegion) -> None:
        """No fence: close the endpoints that may still be writing first."""

    @abstractmethod
    def open_landing(self, peer: str) -> Landing:
        """A fresh receiving endpoint for one instance of a peer (`peer` is a label for errors)."""

    @abstractmethod
    def connect(
        self, peer: str, landing_address: bytes, without: Collection[int] = (), asks_peer: bool = False
    ) -> Sending:
        """A sending endpoint to a peer's landing. Connects with the first write; an address that is none fails then.
        `without`: rails not to use. `asks_peer`: the caller answers RailInDoubt; otherwise a rail that fails with
        writes on their way breaks the endpoint. Raises FabricUsageError if no rail is left."""

    @abstractmethod
    def provider_of(self, endpoint: Landing | Sending) -> str:
        """By way of what it moves bytes: "same-host", or the engine's provider. A landing that nobody has connected to
        yet has the engine's."""

    @abstractmethod
    def fence_needs_dead_peer(self, landing: Landing) -> bool:
        """Whether it may be closed only once the peer's process is proven dead."""

    @abstractmethod
    def close_endpoint(self, endpoint: Landing | Sending) -> None:
        """Synchronous and local. For a Landing this is the fence: nothing its peer posts can land once this
        returns, and its expectations are dropped without events. For a Sending: armed and unposted writes are
        cancelled, and every batch of it gets its `WritesEnded` from the next `progress`.

        Raises FenceFailed where the network library refuses: then the fence did not happen and no batch ends. The
        endpoint is lost, and the process must reuse no registered memory any more: the node dies."""

    @abstractmethod
    def fence_rails(self, landing: Landing, rails: Collection[int], completed: Mapping[int, int]) -> list[int]:
        """The fence for some rails of a landing, each once: nothing of its peer lands on them any more. `completed`: of
        RailInDoubt, with the sender's immediates. Returns those whose writes in doubt have to come again: they are
        expected and not whole, and are not counted any more. Of all others every write in doubt has landed, or they
        are over, and must not come again.

        Raises EndpointClosed, FabricUsageError for what is no rail, was fenced before, or is the only one, and where
        `fence_needs_dead_peer`; FenceFailed as `close_endpoint` does."""

    @abstractmethod
    def settle_rail(self, endpoint: Sending, rail: int, again: Collection[int]) -> None:
        """The peer's answer to RailInDoubt, what its `fence_rails` returned: writes in doubt with these immediates are
        posted again on other rails, before any others, and all others have completed. A rail that is not in doubt
        (any more) is ignored. Raises EndpointClosed."""

    @abstractmethod
    def write(self, endpoint: Sending, batch: PageWrites) -> int:
        """Queue a batch for posting now; returns its handle. Posting happens in C, within the cap on outstanding
        writes, fairly between endpoints, the rails of its source taking turns. Raises EndpointClosed, and
        FabricUsageError for a batch that leaves its regions or the address space."""

    @abstractmethod
    def write_when(self, endpoint: Sending, word_address: int, threshold: int, batch: PageWrites) -> int:
        """Arm a batch: it is posted once the u64 at `word_address` is >= `threshold`. The word is monotone and
        must stay mapped until the batch ended. Raises as `write` does, and FabricUsageError for what is no aligned
        u64 or a threshold that it cannot hold."""

    @abstractmethod
    def cancel(self, handle: int) -> tuple[int, int]:
        """Post nothing more of this batch. Returns (posted, completed) so far; `posted` is final, and
        `WritesEnded` follows once nothing is outstanding. A batch that ended already answers with the counts of its
        `WritesEnded` until `progress` has returned that event; from then on, as for an unknown handle: (0, 0)."""

    @abstractmethod
    def expect(self, landing: Landing, immediate: int, count: int) -> int:
        """Arm an immediate on one landing: `Arrived` when exactly `count` (> 0) writes carrying it have landed
        there. Any other immediate that lands counts as stale. Raises FabricUsageError if its slot is armed, for a
        count below 1 and for what is no 32-bit immediate."""

    @abstractmethod
    def revise(self, handle: int, count: int) -> None:
        """Change an expectation's count (the sender stopped early). `Arrived` is emitted again if the count
        seen already equals it; count 0 arrives at once if nothing landed. Raises FabricUsageError below that."""

    @abstractmethod
    def counted(self, handle: int) -> int:
        """Writes seen so far for an expectation."""

    @abstractmethod
    def forget(self, handle: int) -> None:
        """Disarm an expectation; later immediates of its generation are stale. An unknown handle is ignored: its
        landing may have been closed. (`revise` and `counted` raise FabricUsageError for it.)"""

    @abstractmethod
    def progress(self, timeout: float) -> list[Event]:
        """Poll words, post, drain completions and count immediates, with the GIL released, until an event is
        there, `wake` is called, or `timeout` seconds have passed. Sleeps on file descriptors while nothing is
        armed. Never raises for the network. Between two calls an engine may go on with all of that by itself; events
        wait for the next one."""

    @abstractmethod
    def wake(self) -> None:
        """End the current or next `progress` early. From any thread."""

    @abstractmethod
    def counters(self) -> FabricCounters: ...

    @abstractmethod
    def writes_by_rail(self) -> list[int]:
        """Writes posted on each rail since the engine was opened."""

    @abstractmethod
    def gauges(self) -> FabricGauges: ...

    @abstractmethod
    def close(self) -> None:
        """Close endpoints, regions and the domain. Idempotent. Raises FenceFailed, as `close_endpoint` does, once all
        that can be closed is closed."""

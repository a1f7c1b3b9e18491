"""One node's end of the fabric under a schedule: it takes its turns when its pump does, and waits for nothing."""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from fabric.api import EndpointFailed, Event, Landing, Sending
from fabric.errors import OperationError
from fabric.limits import Limits
from fabric.simulated import SimulatedEngine
from fabric.simulated_batches import SimulatedEndpoint, SimulatedWrite
from tests.simulation.counted import Counted
from tests.simulation.flights import Flight
from tests.simulation.schedule import Process

if TYPE_CHECKING:
    from tests.simulation.network import ScheduledNetwork

OnLanding = Callable[[Flight], None]


class ScheduledEngine(SimulatedEngine):
    """`on_change`: something may have to be reported or posted. `on_landing` looks at each write before it lands."""

    def __init__(
        self,
        network: "ScheduledNetwork",
        process: Process,
        on_change: Callable[[], None],
        rails: int = 1,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(network, process.name, limits, rails)
        self.process = process
        self.on_landing: OnLanding = lambda flight: None
        self.transfer_of: Callable[[int], str] = lambda handle: ""
        """By a batch's handle."""
        self.held: list[Flight] = []
        """Writes that wait for this process to go on."""
        self.to_repeat: set[tuple[int, int, int]] = set()
        """(landing, rail, immediate) of writes in doubt that it has asked to be written again."""
        self.counts = Counted(self.counted)
        self._needs_dead_peer = network.needs_dead_peer
        self.moves_writes = not (network.needs_dead_peer or network.manners.early_share)
        self.changed: Any = _Notice(on_change)

    def fence_needs_dead_peer(self, landing: Landing) -> bool:
        return self._needs_dead_peer

    def expect(self, landing: Landing, immediate: int, count: int) -> int:
        handle = super().expect(landing, immediate, count)
        self.counts.expect(handle, landing.id, immediate)
        return handle

    def forget(self, handle: int) -> None:
        self.counts.forget(handle)
        super().forget(handle)

    def close_endpoint(self, endpoint: Landing | Sending) -> None:
        super().close_endpoint(endpoint)
        self.counts.close(endpoint.id)

    def fence_rails(self, landing: Landing, rails: Collection[int], completed: Mapping[int, int]) -> list[int]:
        again = super().fence_rails(landing, rails, completed)
        self.counts.fenced(landing.id, rails, again)
        self.to_repeat |= {(landing.id, rail, immediate) for rail in rails for immediate in again}
        return again

    def progress(self, timeout: float) -> list[Event]:
        sender = self._sender
        if any(endpoint.batches for endpoint in sender.endpoints.values()):
            sender.fire()
            sender.post()
        return self._take_events()

    @property
    def has_news(self) -> bool:
        """Something of its writes is to be reported, after a batch was cancelled or an endpoint closed."""
        return bool(self._sender.events)

    @property
    def stuck(self) -> bool:
        """Something could be posted but for EAGAIN: nobody but time will change that."""
        return any(endpoint.queue and not _awaits(endpoint) for endpoint in self.sendings)

    @property
    def unposted(self) -> list[tuple[list[bytes], int]]:
        """(landing, by rail; address) of each write that may still be posted."""
        return [
            (batch.endpoint.landing_addresses, target)
            for batch in self._sender.batches
            if batch.unposted
            for target in (batch.addresses[index][1] for index in batch.to_post)
        ]

    @property
    def doubtful(self) -> list[SimulatedWrite]:
        """Those that the peer may ask for again."""
        return [w for endpoint in self.sendings for rail in endpoint.doubtful for w in endpoint.in_flight[rail]]

    @property
    def landings(self) -> list[Landing]:
        return list(self._landings.values())

    @property
    def sendings(self) -> list[SimulatedEndpoint]:
        return list(self._sender.endpoints.values())

    def landing_failed(self, landing: Landing, error: OperationError) -> None:
        if landing.id in self._landings:
            self._sender.events.append(EndpointFailed(landing.id, landing.peer, error))
            self.changed.notify_all()


class _Notice:
    """What the engine takes for its condition."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.notify_all = call


def _awaits(endpoint: SimulatedEndpoint) -> bool:
    """A completion of one of its writes will come."""
    return any(writes and rail not in endpoint.doubtful for rail, writes in endpoint.in_flight.items())

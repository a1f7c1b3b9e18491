"""Which nodes there are, by instance. Pure: the clock is an argument, and nothing is sent from here.

Each process has a random instance id. A new instance at an address that an older one announced is that node restarted:
everything of the old one is dropped at once and it is never taken back.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from protocol import PROTOCOL_VERSION
from protocol.messages import NodeStatus, Role

HEARTBEAT_S = 1.0
MISSES = 3
LOST_AFTER_S = HEARTBEAT_S * (MISSES + 1)
"""With a heartbeat due every second, the third is certainly missed when the fourth is due."""
MAX_NODES = 1024
MAX_REMEMBERED = 4096


@dataclass(slots=True)
class Member:
    """One live node. `in_flight`: requests that this router has there (decode) or ranked it first for (prefill)."""

    status: NodeStatus
    seen_at: float
    refusal: str | None
    in_flight: int = 0

    @property
    def instance(self) -> str:
        return self.status.instance

    @property
    def usable(self) -> bool:
        return self.refusal is None and self.status.ready and not self.status.draining

    @property
    def load(self) -> int:
        """Requests there: as the node said a moment ago, or as we know by now."""
        return max(self.in_flight, self.status.running + self.status.waiting)


class Membership:
    """`tokenizer`: the digest that a node must share with us."""

    def __init__(self, tokenizer: str, now: float) -> None:
        self._tokenizer = tokenizer
        self._members: dict[str, Member] = {}
        self._listens: dict[str, str] = {}
        self._replaced: dict[str, str] = {}
        self._swept_at = now

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members.values())

    def get(self, instance: str) -> Member | None:
        return self._members.get(instance)

    def of_role(self, role: Role) -> list[Member]:
        return [member for member in self._members.values() if member.status.role is role]

    def observe(self, status: NodeStatus, now: float) -> tuple[str | None, list[Member]]:
        """A heartbeat. Returns why the node is refused (or None), and the nodes that are lost because of it."""
        if status.instance in self._replaced:
            return f"replaced by {self._replaced[status.instance]} at the same address", []
        lost = self._replace_predecessors(status)
        refusal = self._refusal(status)
        member = self._members.get(status.instance)
        if member is None and len(self._members) >= MAX_NODES:
            return f"this router already has {MAX_NODES} nodes", lost
        if member is None:
            self._members[status.instance] = Member(status, now, refusal)
        else:
            self._forget_addresses(member.status)
            member.status, member.seen_at, member.refusal = status, now, refusal
        self._listens.update(dict.fromkeys(_addresses(status), status.instance))
        return refusal, lost

    def sweep(self, now: float) -> list[Member]:
        """Call about four times a second, after the heartbeats at hand were read. Returns the nodes lost.

        Time in which this process itself did not run counts for no node.
        """
        paused = now - self._swept_at
        self._swept_at = now
        if paused > HEARTBEAT_S:
            for member in self._members.values():
                member.seen_at += paused
        lost = [instance for instance, member in self._members.items() if now - member.seen_at > LOST_AFTER_S]
        return self._drop(lost)

    def max_context(self, model: int) -> int:
        """Most tokens that a request may reach on every node in use."""
        return min([model, *(member.status.max_context for member in self._members.values() if member.usable)])

    def _refusal(self, status: NodeStatus) -> str | None:
        version = status.protocol_version
        if version != PROTOCOL_VERSION:
            return f"protocol version {version} differs from the router's {PROTOCOL_VERSION}: run the same kvferry"
        if status.tokenizer != self._tokenizer:
            return f"tokenizer {status.tokenizer} differs from the router's {self._tokenizer}: serve the same model"
        return None

    def _replace_predecessors(self, status: NodeStatus) -> list[Member]:
        addresses = _addresses(status)
        known = {self._listens[address] for address in addresses if address in self._listens}
        lost = self._drop(sorted(known - {status.instance}))
        for member in lost:
            self._replaced[member.instance] = status.instance
        while len(self._replaced) > MAX_REMEMBERED:
            del self._replaced[next(iter(self._replaced))]
        return lost

    def _drop(self, instances: Iterable[str]) -> list[Member]:
        dropped = [self._members.pop(instance) for instance in instances]
        for member in dropped:
            self._forget_addresses(member.status)
        return dropped

    def _forget_addresses(self, status: NodeStatus) -> None:
        for address in _addresses(status):
            del self._listens[address]


def _addresses(status: NodeStatus) -> set[str]:
    """Where the node listens: no two live processes share one."""
    return {address for address in (status.control_address, status.status_address) if address}

"""A gate of the product, held in some processes: requests stop there until a test has done what it wants."""

from collections.abc import Mapping
from contextlib import suppress

from protocol.gates import GateClient
from tests.cluster.waiting import DEADLINE_S, eventually


class HeldGate:
    """`clients`: by the name of the process, each holding `gate`."""

    def __init__(self, gate: str, clients: Mapping[str, GateClient]) -> None:
        self._gate = gate
        self._clients = clients
        self._holding = set(clients)

    def reached(self, name: str) -> None:
        """Wait until a request stands there."""
        assert self._clients[name].reached(self._gate, DEADLINE_S), f"nothing reached {self._gate} in {name}"

    def reached_first(self) -> str:
        """Wait until a request stands there in any of the processes."""
        there: list[str] = []

        def look() -> bool:
            there.extend(name for name, client in self._clients.items() if client.reached(self._gate, 0.0))
            return bool(there)

        eventually(look, f"a request stands at {self._gate}")
        return there[0]

    def release(self, name: str) -> None:
        self._holding.discard(name)
        self._clients[name].release(self._gate)

    def release_rest(self) -> None:
        """Wherever it is still held. A process that has ended holds nothing."""
        for name in self._holding:
            with suppress(ConnectionError):
                self._clients[name].release(self._gate)

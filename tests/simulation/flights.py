"""Writes on their way."""

import ctypes
from dataclasses import dataclass

from fabric.simulated_batches import SimulatedEndpoint, SimulatedWrite
from fabric.simulated_network import NetworkUser


@dataclass(eq=False, slots=True)
class Flight:
    """A posted write on its way. `payload`: its bytes, once the sender does not keep the source for it any more: then
    it has completed for its sender, or will never. `derailed`: its rail is broken; wherever it goes, its sender gets no
    word of it. `completed`: its sender has the word that it landed."""

    sender: NetworkUser
    write: SimulatedWrite
    transfer: str
    """Whose page it brings, as its sender has it."""
    payload: bytes | None = None
    derailed: bool = False
    completed: bool = False

    @property
    def endpoint(self) -> SimulatedEndpoint:
        return self.write.batch.endpoint

    @property
    def brings(self) -> tuple[NetworkUser, int, int]:
        """Which page, whichever way: a write that moves brings the same again."""
        return self.sender, self.write.batch.handle, self.write.index

    @property
    def target(self) -> int:
        return self.write.target

    @property
    def rail(self) -> int:
        return self.write.lane.rail

    @property
    def remote_rail(self) -> int:
        return self.write.lane.remote.rail

    @property
    def immediate(self) -> int:
        return self.write.batch.writes.immediate

    @property
    def landing(self) -> bytes | None:
        return self.endpoint.address_of(self.write.lane)

    @property
    def awaited(self) -> bool:
        """Its sender will end it by its completion: it was neither given up nor is it in doubt."""
        return self.rail not in self.endpoint.lost and self.write in self.endpoint.in_flight[self.rail]

    def detach(self) -> None:
        if self.payload is None:
            self.payload = self.bytes

    @property
    def bytes(self) -> bytes:
        """What would land now."""
        return self.payload or ctypes.string_at(self.write.source, self.write.batch.writes.length)

    def move(self) -> None:
        ctypes.memmove(self.target, self.payload or self.write.source, self.write.batch.writes.length)

"""Contexts: what the model made of the position before a prompt's last token, for whoever goes on from there.

The forward that computes that position hands its context over with its tokens. An engine whose layout has a context
computes one for every prompt that has such a position. That of a prompt which runs here stays with the request. Between
two engines a context goes through slots of registered memory, which are taken and given back with a request's blocks:

    prefill-only request     its own values -> slot --> network
    reserved request                           network --> slot -> the request, when it is resumed
"""

from typing import NamedTuple

import torch

from engine.cache_pool import POISON_BYTE, PoolMemory
from engine.errors import PoisonBroken
from engine.shared_file import shared_bytes
from protocol.context import ContextLayout

VALUE_BYTES = torch.float32.itemsize


class Context(NamedTuple):
    """Float32, whatever the model's dtype. `hidden` `[hidden size]`: what the head is given, the final norm applied.
    `logits` `[vocab]`: what it makes of it. None: not wanted here."""

    hidden: torch.Tensor | None = None
    logits: torch.Tensor | None = None


def pack(layout: ContextLayout, hidden: torch.Tensor | None, logits: torch.Tensor | None) -> torch.Tensor:
    """Rows of hidden states and of logits, `[rows, ...]`, as rows of whole contexts `[rows, values of a slot]`."""
    parts = Context(hidden, logits)._asdict()
    return torch.cat([parts[name].float() for name in layout.names], dim=1)


def split(layout: ContextLayout, values: torch.Tensor) -> Context:
    """Of one row of `pack`: views of it."""
    sizes = [part.bytes // VALUE_BYTES for part in layout.parts]
    return Context(**dict(zip(layout.names, torch.split(values, sizes), strict=True)))


class ContextSlots:
    """`count` slots in memory of their own, page-aligned, which never moves. In debug mode free ones are poisoned."""

    def __init__(self, layout: ContextLayout, count: int, debug: bool = False) -> None:
        assert layout.parts, "slots of nothing"
        self.layout = layout
        self.count = count
        self._debug = debug
        memory, self._file = shared_bytes("kvferry-contexts", count * layout.slot_bytes)
        self._slots = memory.view(count, layout.slot_bytes)
        self._free = list(range(count - 1, -1, -1))
        if debug:
            self._slots[:] = POISON_BYTE

    @property
    def memory(self) -> PoolMemory:
        """What is to be registered."""
        return PoolMemory(self._slots.data_ptr(), self._slots.nbytes, file=self._file.fd)

    @property
    def free(self) -> int:
        return len(self._free)

    def free_list(self) -> list[int]:
        return list(self._free)

    def take(self) -> int:
        """Raises PoisonBroken, in debug mode, if somebody wrote to it while it was free."""
        slot = self._free.pop()
        if self._debug and not bool((self._slots[slot] == POISON_BYTE).all()):
            raise PoisonBroken(f"context slot {slot} was written to while free")
        return slot

    def give_back(self, slot: int) -> None:
        """Nobody, here or on another machine, may still read it or write to it."""
        self._free.append(slot)
        if self._debug:
            self._slots[slot] = POISON_BYTE

    def write(self, slot: int, values: torch.Tensor) -> None:
        """A row of `pack`."""
        self._slots[slot].view(torch.float32).copy_(values)

    def read(self, slot: int) -> Context:
        """A copy."""
        return split(self.layout, self._slots[slot].view(torch.float32).clone())

"""The 32-bit immediate that every write carries: 12 bits of transfer slot, 20 bits of its generation.

    31            20 19                         0
    +---------------+---------------------------+
    |  slot (4096)  |  generation (1 .. 2^20-1) |
    +---------------+---------------------------+

A slot is re-armed only after its previous generation is accounted for, so a late write of an old generation
is recognised (it counts as stale) and can never complete a newer transfer.
"""

from collections import deque

SLOT_BITS = 12
GENERATION_BITS = 20
SLOTS = 1 << SLOT_BITS
MAX_GENERATION = (1 << GENERATION_BITS) - 1


def pack(slot: int, generation: int) -> int:
    assert 0 <= slot < SLOTS and 1 <= generation <= MAX_GENERATION, (slot, generation)
    return slot << GENERATION_BITS | generation


def unpack(immediate: int) -> tuple[int, int]:
    """(slot, generation)"""
    return immediate >> GENERATION_BITS, immediate & MAX_GENERATION


class ImmediateSlots:
    """Hands out immediates; the receiving side's only owner of slots. Generations advance per slot and wrap to 1."""

    def __init__(self) -> None:
        self._free = deque(range(SLOTS))
        self._taken = bytearray(SLOTS)
        self._generation = [0] * SLOTS

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """The next immediate, oldest freed slot first, or None when all 4096 are in use."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._taken[slot] = True
        self._generation[slot] = self._generation[slot] % MAX_GENERATION + 1
        return pack(slot, self._generation[slot])

    def give_back(self, immediate: int) -> None:
        """Call only once every write of this generation is accounted for or its sender is fenced."""
        slot, generation = unpack(immediate)
        assert self._generation[slot] == generation and self._taken[slot], immediate
        self._taken[slot] = False
        self._free.append(slot)

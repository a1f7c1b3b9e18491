"""Context slots of one word each: what is in one says of which prompt it is, as a page's tag does."""

import ctypes
from collections.abc import Callable

from engine.request import Owner, Request
from protocol.context import ContextLayout, ContextPart
from tests.simulation.books import NOTHING, WORD, Tag, family_of, tag_of
from tests.simulation.errors import Violation

CONTEXT = ContextLayout(parts=(ContextPart("hidden", WORD),))


def context_tag(request: Request, computed: int) -> Tag:
    """What a prompt's context is, once so many of its tokens are computed: all but the last."""
    return Tag(family_of(request), computed, 0)


class Contexts:
    """`count` slots. A free one is empty. `on_free` looks at the address of each that comes free."""

    def __init__(self, count: int) -> None:
        self._words = (ctypes.c_uint64 * max(1, count))()
        self._free = list(range(count))
        self._slots: dict[Owner, int] = {}
        self.count = count
        self.address = ctypes.addressof(self._words)
        self.bytes = ctypes.sizeof(self._words)
        self.on_free: Callable[[Owner, int], None] = lambda owner, address: None

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def wanting(self) -> bool:
        """There are slots, but none is free."""
        return bool(self.count) and not self._free

    def slot(self, owner: Owner) -> int | None:
        return self._slots.get(owner)

    def owner_at(self, address: int) -> Owner | None:
        slot = (address - self.address) // WORD
        return next((owner for owner, taken in self._slots.items() if taken == slot), None)

    def holds(self, address: int) -> bool:
        return self.address <= address < self.address + self.bytes

    def take(self, owner: Owner) -> int | None:
        """None where there are no slots at all."""
        if not self.count:
            return None
        slot = self._slots[owner] = self._free.pop()
        if found := self._words[slot]:
            raise Violation(f"context slot {slot}, now of {owner}, was free but holds {tag_of(found)}")
        return slot

    def give_back(self, owner: Owner) -> None:
        """Unknown owners are ignored."""
        slot = self._slots.pop(owner, None)
        if slot is not None:
            self.on_free(owner, self.address + slot * WORD)
            self._words[slot] = NOTHING
            self._free.append(slot)

    def write(self, owner: Owner, tag: Tag) -> None:
        if owner in self._slots:
            self._words[self._slots[owner]] = tag.word

    def read(self, owner: Owner) -> Tag | None:
        return tag_of(self._words[self._slots[owner]])

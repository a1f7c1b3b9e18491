"""Small layouts, tickets and plans for the messenger's tests."""

from collections.abc import Callable, Sequence

from fabric.api import MemoryRegion, RailKey, RemoteRegion
from kv_messenger.plan import TransferPlan
from kv_messenger.sources import Source
from protocol.context import ContextLayout, ContextPart
from protocol.layout import KVLayout, full_layout
from protocol.messages import Failure
from protocol.ticket import ContextSlot, RankRegion, TransferKey, TransferTicket

IMMEDIATE = 7 << 20 | 3
KEY = TransferKey("request", 1, "decode-instance")
HIDDEN, LOGITS = ContextPart("hidden", 24), ContextPart("logits", 40)
BOTH = ContextLayout((HIDDEN, LOGITS))
SLOTS = 4
"""Of each side's contexts."""
TARGET_SLOT = 2


class ScriptedEngine:
    """Takes note of what the sender asks; the test plays the forwards."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.aborted: list[str] = []
        self.released: list[str] = []
        self.refuse: Callable[[Failure], None] = lambda _: None

    def submit(self, request_id: str, tokens: Sequence[int], refused: Callable[[Failure], None]) -> None:
        self.submitted.append(request_id)
        self.refuse = refused

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


def layout(layers: int = 2, page_size: int = 4) -> KVLayout:
    return full_layout(layers=layers, kv_heads=2, page_size=page_size, head_dim=2, dtype="float32")


def region(number: int, length: int) -> MemoryRegion:
    """Memory that is nowhere: its offsets count from 0."""
    return MemoryRegion(id=number, address=0, length=length, remote=RemoteRegion((RailKey(0, number),), 0, length))


def plan(
    of: KVLayout, tokens: int, target_blocks: Sequence[int], first_page: int = 0, pool_blocks: int = 64
) -> TransferPlan:
    """Of one full group on one rank on both sides, with the context that the layout asks for."""
    size = pool_blocks * of.block_bytes(0)
    ticket = TransferTicket(
        key=KEY,
        landing=1,
        first_page=first_page,
        immediate=IMMEDIATE,
        blocks=[list(target_blocks)],
        regions=[RankRegion(keys=[(0, 1)], base=0, length=size)],
        context=context_slot(of.context),
    )
    slots = region(8, SLOTS * of.context.slot_bytes) if of.context.parts else None
    return TransferPlan(of, [region(9, size)], of, ticket, tokens, slots)


def context_slot(of: ContextLayout) -> ContextSlot | None:
    """Of a target that wants this."""
    if not of.parts:
        return None
    return ContextSlot(region=RankRegion(keys=[(0, 2)], base=0, length=SLOTS * of.slot_bytes), slot=TARGET_SLOT)


def no_source() -> Source:
    return Source(ScriptedEngine(), 0, ())

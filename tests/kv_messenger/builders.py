"""Small layouts, tickets and plans for the messenger's tests."""

from collections.abc import Sequence

from fabric.api import MemoryRegion, RemoteRegion
from kv_messenger.plan import TransferPlan
from protocol.layout import KVLayout
from protocol.ticket import RankTicket, TransferKey, TransferTicket

IMMEDIATE = 7 << 20 | 3
KEY = TransferKey("request", 1, "decode-instance")


def layout(layers: int = 2, page_size: int = 4) -> KVLayout:
    return KVLayout(layers=layers, kv_heads=2, page_size=page_size, head_dim=2, dtype="float32")


def plan(
    of: KVLayout, tokens: int, target_blocks: Sequence[int], first_page: int = 0, pool_blocks: int = 64
) -> TransferPlan:
    size = pool_blocks * of.block_bytes
    rank = RankTicket(region_key=1, region_base=0, region_length=size, blocks=list(target_blocks), immediate=IMMEDIATE)
    ticket = TransferTicket(key=KEY, landing=1, first_page=first_page, ranks=[rank])
    region = MemoryRegion(id=1, address=0, length=size, remote=RemoteRegion(key=9, base=0, length=size))
    return TransferPlan(of, region, ticket, tokens)

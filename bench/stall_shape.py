"""What the processes of `python -m bench stall` agree on."""

from bench.messenger_ends import Means
from bench.shared_pool import SharedPool
from protocol.curve import ClusterKey
from protocol.layout import KVLayout, full_layout

LAYOUT: KVLayout = full_layout(layers=30, kv_heads=8, page_size=16, head_dim=64, dtype="float32")
"""Pages of 64 KiB."""
PAGES = 4
"""Of each prompt, in each layer."""
TOKENS = PAGES * LAYOUT.page_size
TRANSFER_BYTES = PAGES * LAYOUT.block_bytes(0)


def means(provider: str, places: int, key: ClusterKey) -> Means:
    """With a pool for so many prompts."""
    return Means(provider, LAYOUT, SharedPool(places * TRANSFER_BYTES).register, key)


def tables(place: int) -> list[list[int]]:
    """The blocks of one prompt."""
    return [list(range(place * PAGES, (place + 1) * PAGES))]

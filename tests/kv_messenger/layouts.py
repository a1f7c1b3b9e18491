"""Small layouts: of full attention, of windows, of both."""

import msgspec

from protocol.layout import GroupLayout, KVLayout

FULL = (GroupLayout(layers=(0, 1)),)
HYBRID = (GroupLayout(layers=(1,)), GroupLayout(layers=(0, 2, 3), window=21))
SLIDING = (GroupLayout(layers=(0,), window=16),)


def of(heads: int, ranks: int, page: int, groups: tuple[GroupLayout, ...] = FULL, parts: int = 2) -> KVLayout:
    facts = {"groups": groups, "kv_heads": heads, "parts": parts, "page_size": page, "tensor_parallel": ranks}
    return msgspec.convert({**facts, "head_dim": 1, "dtype": "float32"}, KVLayout)

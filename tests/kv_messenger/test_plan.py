"""The plan against a byte-for-byte model: numpy pools, and writes applied by the formula of `PageWrites`."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.api import PageWrites
from kv_messenger.plan import expected_writes, page_advice, pages_to_move, refuse_pair
from kv_messenger.sender_transfer import Arm, Chunk, SenderTransfer
from protocol.layout import KVLayout
from tests.kv_messenger.builders import IMMEDIATE, KEY, layout, plan

POOL_BLOCKS = 64


def apply(writes: PageWrites, source: np.ndarray, target: np.ndarray, written: np.ndarray) -> int:
    """Carry out a batch as the fabric's contract says; `written` counts how often each byte was written."""
    for index, source_index in enumerate(writes.source_indices):
        start = source_index * writes.source_stride + writes.source_offset
        to = writes.target_indices[index] * writes.target_stride + writes.target_offset
        target[to : to + writes.length] = source[start : start + writes.length]
        written[to : to + writes.length] += 1
    return len(writes.source_indices)


def cuts_of(tokens: int, sizes: list[int]) -> list[tuple[int, int]]:
    """Prefill chunks of the given sizes, repeated, until the prompt ends."""
    chunks, start, turn = [], 0, 0
    while start < tokens:
        end = min(tokens, start + sizes[turn % len(sizes)])
        chunks.append((start, end))
        start, turn = end, turn + 1
    return chunks


@given(data=st.data())
def test_every_page_of_every_layer_is_written_once_and_nothing_else(data: st.DataObject) -> None:
    page_size = data.draw(st.sampled_from([4, 16, 64]))
    of = layout(layers=data.draw(st.integers(1, 3)), page_size=page_size)
    tokens = data.draw(st.integers(1, 20 * page_size))
    pages = of.pages_for(tokens)
    first_page = data.draw(st.integers(0, pages - 1))
    chunks = cuts_of(tokens, data.draw(st.lists(st.integers(1, 3 * page_size), min_size=1, max_size=4)))
    order = st.permutations(range(POOL_BLOCKS))
    source_blocks, target_blocks = data.draw(order)[:pages], data.draw(order)[: pages - first_page]

    random = np.random.default_rng(0)
    source = random.integers(0, 256, POOL_BLOCKS * of.block_bytes, dtype=np.uint8)
    target, written = np.zeros_like(source), np.zeros(source.shape, dtype=np.int64)
    transfer = SenderTransfer(KEY, plan(of, tokens, target_blocks, first_page), 0, 0.0)
    sent = 0
    for start, end in chunks:
        for arm in transfer.on_chunk(Chunk(start, end, source_blocks, 1)):
            assert isinstance(arm, Arm)
            assert arm.writes.immediate == IMMEDIATE
            sent += apply(arm.writes, source, target, written)

    assert sent == expected_writes(of, of, tokens, first_page) == (pages - first_page) * of.layers
    target_view = target.reshape(POOL_BLOCKS, of.block_bytes)
    for position, block in enumerate(target_blocks):
        expected = source.reshape(POOL_BLOCKS, of.block_bytes)[source_blocks[first_page + position]]
        assert np.array_equal(target_view[block], expected)
    times = written.reshape(POOL_BLOCKS, of.block_bytes)
    assert (times[list(target_blocks)] == 1).all()
    assert times.sum() == len(target_blocks) * of.block_bytes


@given(page_size=st.sampled_from([4, 16]), tokens=st.integers(1, 70), chunk=st.sampled_from([1, 3, 8, 16, 24, 64]))
def test_a_chunk_never_sends_a_page_that_will_still_change(page_size: int, tokens: int, chunk: int) -> None:
    of = layout(page_size=page_size)
    pages = of.pages_for(tokens)
    transfer = SenderTransfer(KEY, plan(of, tokens, range(pages)), 0, 0.0)
    for start, end in cuts_of(tokens, [chunk]):
        for arm in transfer.on_chunk(Chunk(start, end, range(pages), 1)):
            assert isinstance(arm, Arm)
            for page in arm.writes.source_indices:
                assert (page + 1) * page_size <= end or end == tokens


def test_layer_l_is_armed_on_the_word_that_layer_l_bumps() -> None:
    of = layout(layers=3)
    arms = SenderTransfer(KEY, plan(of, 8, [5, 6]), 0, 0.0).on_chunk(Chunk(0, 8, [1, 2], first_threshold=301))
    assert [(arm.layer, arm.threshold) for arm in arms if isinstance(arm, Arm)] == [(0, 301), (1, 302), (2, 303)]


def test_pages_from_the_prefill_sides_own_cache_go_at_once() -> None:
    of = layout(layers=1)
    arms = SenderTransfer(KEY, plan(of, 12, [5, 6, 7]), 0, 0.0).on_chunk(Chunk(8, 12, [1, 2, 3], first_threshold=9))
    assert [(a.threshold, list(a.writes.source_indices)) for a in arms if isinstance(a, Arm)] == [
        (None, [1, 2]),
        (9, [3]),
    ]


@pytest.mark.parametrize(
    ("tokens", "first_page", "pages"), [(1, 0, 1), (4, 0, 1), (5, 0, 2), (8, 1, 1), (8, 2, 0), (9, 2, 1)]
)
def test_pages_to_move(tokens: int, first_page: int, pages: int) -> None:
    assert pages_to_move(layout(page_size=4), tokens, first_page) == pages


def test_a_ticket_that_does_not_fit_is_refused_with_the_reason() -> None:
    of = layout()
    assert plan(of, 8, [1, 2]).refusal() is None
    assert "2 blocks, 9 tokens need 3" in (plan(of, 9, [1, 2]).refusal() or "")
    assert "outside the registered pool" in (plan(of, 8, [1, 64]).refusal() or "")
    assert "need 0" in (plan(of, 8, [1], first_page=2).refusal() or "")


def test_unequal_layouts_are_refused_with_both_sides_named() -> None:
    reason = refuse_pair(layout(page_size=16), layout(page_size=64)) or ""
    assert "page_size=16" in reason and "page_size=64" in reason
    assert refuse_pair(layout(), layout()) is None


def test_pages_too_small_for_a_nic_are_advised_against() -> None:
    small = KVLayout(layers=2, kv_heads=3, page_size=4, head_dim=64, dtype="float32")
    advice = page_advice(small)
    assert advice is not None and "6144 bytes" in advice and "--page-size" in advice
    assert page_advice(msgspec.structs.replace(small, page_size=16)) is None

"""The plan against a brute-force model of numpy pools (`moving`): every element once, from the right rank, no other.

The grid covers every pair of numbers of ranks, every number of KV heads and every pair of page sizes; lengths around
page edges, prefixes, chunk cuts, windows and MLA are drawn, by seed, for each of its points.
"""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_messenger.plan import expected, page_advice, pages_to_move
from kv_messenger.runs import count_runs, runs
from kv_messenger.sender_transfer import Arm, Chunk, SenderTransfer
from protocol.layout import GroupLayout, KVLayout, full_layout
from tests.kv_messenger.builders import KEY, layout, plan
from tests.kv_messenger.layouts import FULL, HYBRID, SLIDING, of
from tests.kv_messenger.moving import Transfer

RANKS = HEADS = (1, 2, 3, 4, 8)
PAGES = (4, 16, 48, 64)


def fits(heads: int, ranks: int) -> bool:
    return heads % ranks == 0 or ranks % heads == 0


SHARDINGS = [(h, p, d) for h, p, d in itertools.product(HEADS, RANKS, RANKS) if fits(h, p) and fits(h, d)]


def edges(*sizes: int) -> list[int]:
    """Lengths at, before and behind the ends of the first pages."""
    return sorted({max(1, size * k + by) for size in sizes for k in (1, 2) for by in (-1, 0, 1)} | {1})


def cuts_of(tokens: int, sizes: Sequence[int], start: int = 0) -> list[tuple[int, int]]:
    """Prefill chunks of the given sizes, repeated, from `start` until the prompt ends; if it has, one empty chunk."""
    chunks = [] if start < tokens else [(tokens, tokens)]
    for size in itertools.cycle(sizes):
        if start >= tokens:
            return chunks
        chunks.append((start, min(tokens, start + size)))
        start += size
    raise AssertionError("no sizes")


def move(source: KVLayout, target: KVLayout, tokens: int, rng: random.Random) -> None:
    """A transfer with a prefix and chunks that the rng chooses, carried out and checked."""
    held = source.is_full and rng.random() < 0.5
    first_page = rng.randrange(target.pages_for(0, tokens)) if held else 0
    start = rng.randrange(tokens // source.page_size + 1) * source.page_size if source.is_full else 0
    transfer = Transfer(source, target, tokens, first_page, rng.randrange(1 << 30))
    transfer.run(cuts_of(tokens, [rng.choice([1, 7, 16, 24, 64, 1000]), rng.randint(1, 40)], start))
    transfer.check()
    assert (transfer.count, transfer.moved) == expected(source, target, tokens, first_page)
    shares = [transfer.plan.assigned.count(replica_set) for replica_set in range(source.replica_sets)]
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize(("heads", "source_ranks", "target_ranks"), SHARDINGS)
def test_every_sharding_with_every_pair_of_page_sizes(heads: int, source_ranks: int, target_ranks: int) -> None:
    rng = random.Random(f"{heads}/{source_ranks}/{target_ranks}")
    for source_page, target_page in itertools.product(PAGES, PAGES):
        groups = rng.choice([FULL, HYBRID, SLIDING])
        parts = 1 if heads == 1 and rng.random() < 0.5 else 2
        source = of(heads, source_ranks, source_page, groups, parts)
        target = of(heads, target_ranks, target_page, groups, parts)
        move(source, target, rng.choice(edges(source_page, target_page)), rng)


@pytest.mark.parametrize("groups", [FULL, HYBRID, SLIDING], ids=["full", "hybrid", "sliding"])
@pytest.mark.parametrize(("source_page", "target_page"), list(itertools.product(PAGES, PAGES)))
def test_every_length_around_the_edges_of_pages_and_windows(
    source_page: int, target_page: int, groups: tuple[GroupLayout, ...]
) -> None:
    rng = random.Random(f"{source_page}/{target_page}")
    windows = [group.window for group in groups if group.window]
    for tokens in edges(source_page, target_page, *windows):
        move(of(2, 1, source_page, groups), of(2, 2, target_page, groups), tokens, rng)


@settings(deadline=None, max_examples=100)
@given(
    sharding=st.sampled_from(SHARDINGS),
    pages=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    window=st.none() | st.integers(1, 80),
    tokens=st.integers(1, 300),
    seed=st.integers(0, 1 << 30),
)
def test_any_page_sizes_windows_and_lengths(
    sharding: tuple[int, int, int], pages: tuple[int, int], window: int | None, tokens: int, seed: int
) -> None:
    heads, source_ranks, target_ranks = sharding
    groups = FULL if window is None else (GroupLayout(layers=(2,)), GroupLayout(layers=(0, 1), window=window))
    source, target = of(heads, source_ranks, pages[0], groups), of(heads, target_ranks, pages[1], groups)
    move(source, target, tokens, random.Random(seed))


@given(
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    tokens=st.integers(1, 500),
    first_page=st.integers(0, 5),
    window=st.none() | st.integers(1, 80),
)
def test_the_number_of_runs_needs_no_listing(
    sizes: tuple[int, int], tokens: int, first_page: int, window: int | None
) -> None:
    group = GroupLayout(layers=(0,), window=window)
    listed = list(runs(group, *sizes, tokens, first_page))
    assert count_runs(group, *sizes, tokens, first_page) == len(listed)
    assert sum(run.length for run in listed) == max(0, group.slots(tokens) - first_page * sizes[1])


@pytest.mark.parametrize(
    ("source_page", "target_page", "runs_each"), [(16, 64, 7), (64, 16, 7), (48, 64, 4), (16, 16, 7)]
)
def test_unequal_pages_take_a_write_for_each_head_part_and_run(
    source_page: int, target_page: int, runs_each: int
) -> None:
    writes = expected(of(4, 2, source_page), of(4, 4, target_page), 100, 0).writes
    assert writes == runs_each * 2 * (4 if source_page == target_page else 4 * 2)


def test_the_count_depends_on_neither_blocks_nor_chunks() -> None:
    source, target = of(4, 2, 48), of(4, 8, 64)
    transfers = []
    for seed, chunk in enumerate([1, 5, 64, 1000]):
        transfers.append(Transfer(source, target, 150, 1, seed))
        transfers[-1].run(cuts_of(150, [chunk]))
        transfers[-1].check()
    assert len({(transfer.count, transfer.moved) for transfer in transfers}) == 1


def test_layer_l_is_armed_on_the_word_that_layer_l_bumps() -> None:
    arms = SenderTransfer(KEY, plan(layout(layers=3), 8, [5, 6]), 0, 0.0).on_chunk(Chunk(0, 8, [[1, 2]], 301))
    assert [(arm.layer, arm.threshold) for arm in arms if isinstance(arm, Arm)] == [(0, 301), (1, 302), (2, 303)]


def test_sliding_layers_go_with_the_last_chunk_in_the_models_order_of_layers() -> None:
    transfer = Transfer(of(1, 1, 16, HYBRID), of(1, 1, 16, HYBRID), 40)
    sender = SenderTransfer(KEY, transfer.plan, 0, 0.0)
    first = sender.on_chunk(Chunk(0, 32, transfer.source.tables, 11))
    last = sender.on_chunk(Chunk(32, 40, transfer.source.tables, 21))
    armed = [
        [(a.layer, a.threshold, len(a.writes.source_indices)) for a in arms if isinstance(a, Arm)]
        for arms in (first, last)
    ]
    assert armed == [[(1, 12, 2)], [(0, 21, 2), (1, 22, 1), (2, 23, 2), (3, 24, 2)]]


def test_pages_from_the_prefill_sides_own_cache_go_at_once() -> None:
    transfer = SenderTransfer(KEY, plan(layout(layers=1), 12, [5, 6, 7]), 0, 0.0)
    arms = transfer.on_chunk(Chunk(8, 12, [[1, 2, 3]], first_threshold=9))
    assert [(a.threshold, list(a.writes.source_indices)) for a in arms if isinstance(a, Arm)] == [
        (None, [1, 2]),
        (9, [3]),
    ]


@pytest.mark.parametrize(
    ("tokens", "first_page", "pages"), [(1, 0, 1), (4, 0, 1), (5, 0, 2), (8, 1, 1), (8, 2, 0), (9, 2, 1)]
)
def test_pages_to_move(tokens: int, first_page: int, pages: int) -> None:
    assert pages_to_move(layout(page_size=4), 0, tokens, first_page) == pages


def test_a_ticket_that_does_not_fit_is_refused_with_the_reason() -> None:
    one = layout()
    assert plan(one, 8, [1, 2]).refusal() is None
    assert "2 blocks, 9 tokens need 3" in (plan(one, 9, [1, 2]).refusal() or "")
    assert "outside the registered pool" in (plan(one, 8, [1, 64]).refusal() or "")
    assert "need 0" in (plan(one, 8, [1], first_page=2).refusal() or "")


def test_a_ticket_for_another_number_of_ranks_tables_or_a_held_window_is_refused() -> None:
    hybrid = Transfer(of(4, 1, 4, HYBRID), of(4, 2, 4, HYBRID), 30).plan
    assert hybrid.refusal() is None

    def refusal(**changes: object) -> str:
        ticket = msgspec.structs.replace(hybrid.ticket, **changes)
        return replace(hybrid, ticket=ticket).refusal() or ""

    assert "1 ranks, its node has 2" in refusal(regions=hybrid.ticket.regions[:1])
    assert "1 block tables, the model has 2" in refusal(blocks=hybrid.ticket.blocks[:1])
    assert "full attention" in refusal(first_page=1)


def test_pages_too_small_for_a_nic_are_advised_against() -> None:
    small = full_layout(layers=2, kv_heads=3, page_size=4, head_dim=64, dtype="float32")
    advice = page_advice(small)
    assert advice is not None and "6144 bytes" in advice and "--page-size" in advice
    assert page_advice(msgspec.structs.replace(small, page_size=16)) is None

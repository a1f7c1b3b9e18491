"""Padded shapes and the keys of graphs; and that a padded batch computes what it would without."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache_pool import POISON_BYTE
from engine.forward_batch import BatchRow, ForwardBatch, SampleStream
from engine.geometry import READ_PADDING_CHUNK, WRITE_PADDING_CHUNK, AttentionType, CacheGeometry, LayerGroup
from engine.model_runner import ModelRunner
from engine.padding import Padding, is_decode, power_of_two, round_up
from tests.engine.runners import GREEDY, Bench, RunSequence, batch
from tests.engine.tiny_models import greedy, prompt_of
from tests.tiny_model import save_weights

WINDOW = 8
HYBRID = CacheGeometry(
    page_size=4,
    kv_heads=1,
    head_dim=8,
    dtype="float32",
    groups=(LayerGroup(AttentionType.FULL, (3,)), LayerGroup(AttentionType.SLIDING, (0, 1, 2), WINDOW)),
)


def padding(q_interval: int = 64, max_tokens: int = 512, max_requests: int = 24) -> Padding:
    return Padding(HYBRID, max_tokens, max_requests, cache_tokens=100_000, q_interval=q_interval)


def row(start: int, count: int, wanted: bool = True) -> BatchRow:
    return BatchRow("r", start, [5] * count, [[], []], SampleStream(GREEDY, 0) if wanted else None)


@pytest.mark.parametrize(
    ("count", "interval", "cap", "expected"),
    [
        (1, 64, 512, 64),
        (64, 64, 512, 64),
        (65, 64, 512, 128),
        (500, 64, 500, 500),
        (449, 64, 500, 500),
        (0, 64, 512, 64),
        (0, 16384, 1000, 1000),
        (1200, 16384, 1000, 1200),
    ],
)
def test_sizes_round_up_to_one_interval_at_least_and_to_the_cap_at_most(
    count: int, interval: int, cap: int, expected: int
) -> None:
    assert round_up(count, interval, cap) == expected


def test_decode_batches_pad_to_a_power_of_two_or_the_request_cap() -> None:
    assert {count: padding().requests(count) for count in (1, 2, 3, 5, 16, 17, 24)} == {
        1: 1,
        2: 2,
        3: 4,
        5: 8,
        16: 16,
        17: 24,
        24: 24,
    }


def test_a_decode_key_is_its_padded_rows_and_nothing_else() -> None:
    short, long = (padding().pad(batch(*[row(past, 1)] * 3)) for past in (7, 9000))
    assert short.key == long.key
    assert (short.key.query_tokens, short.key.samples, short.key.kv_tokens) == (4, 4, 0)
    assert len(short.batch.rows) == 4


def test_b05_equal_totals_with_another_longest_sequence_are_another_graph() -> None:
    """900 and 5000 keys in the longest row; padded totals alone could not tell the two batches apart."""
    level = padding().pad(batch(*[row(880, 20)] * 6)).key
    uneven = padding().pad(batch(row(4980, 20), *[row(60, 20)] * 5)).key
    assert (level.query_tokens, level.kv_tokens) == (uneven.query_tokens, uneven.kv_tokens) == (128, 16384)
    assert level.longest_keys == (1024, 1024)
    assert uneven.longest_keys == (8192, 1024)
    assert level != uneven


def test_keys_of_prompts_tell_how_many_rows_of_logits_there_are() -> None:
    none, one, three = (
        padding().pad(batch(*[row(0, 9, wanted) for wanted in wanting])).key.samples
        for wanting in ([False, False], [False, True], [True, True, True])
    )
    assert (none, one, three) == (0, 1, 4)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 60)), min_size=1, max_size=8), st.integers(1, 70))
def test_padding_adds_rows_of_the_sink_behind_the_real_ones(rows: list[tuple[int, int]], interval: int) -> None:
    real = ForwardBatch([row(start, count) for start, count in rows])
    padded = padding(interval).pad(real)
    assert list(padded.batch.rows[: len(rows)]) == list(real.rows)
    assert padded.batch.num_tokens == padded.key.query_tokens
    assert is_decode(padded.batch) == padded.key.decode
    assert len(padded.batch.rows) <= padding().max_rows
    for extra in padded.batch.rows[len(rows) :]:
        assert (extra.start, extra.sample) == (0, None)
        assert {len(table) for table in extra.tables} == {-(-len(extra.tokens) // HYBRID.page_size)}
        assert [set(table) for table in extra.tables] == [{3}, {1}], "the sink chunk's first block, by group"


@given(st.integers(1, 1 << 20))
def test_powers_of_two(count: int) -> None:
    power = power_of_two(count)
    assert power & (power - 1) == 0
    assert power // 2 < count <= power


def run_padded(bench: Bench, padding: Padding, poison: bool) -> list[RunSequence]:
    """A prompt beside a slice of another, the rest of that beside a newcomer, then decodes. The sink is NaN before each
    forward where `poison` says so."""
    runner = ModelRunner(bench.model, bench.backend, padding=padding)
    a, b, c = (bench.sequence(f"r{n}", prompt_of(n)) for n in (5, 17, 1))
    for step in range(8):
        rows = [a.row(), b.row(9)] if step == 0 else [a.row(), b.row(), c.row()]
        if poison:
            bench.pool.pages(0)[sink_blocks(bench)] = torch.nan
        tokens = runner.launch(batch(*rows)).result().tokens
        for sequence, token in zip([a] if step == 0 else [a, b, c], tokens, strict=True):
            sequence.take(token)
    return [a, b, c]


def sink_blocks(bench: Bench) -> slice:
    per_chunk = bench.geometry.blocks_per_chunk[0]
    return slice(WRITE_PADDING_CHUNK * per_chunk, (WRITE_PADDING_CHUNK + 1) * per_chunk)


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_p16_padded_rows_change_no_result_and_write_to_the_sink_alone(
    tmp_path: Path, family: str, poison: bool
) -> None:
    directory = save_weights(tmp_path / family, family)
    bench = Bench(directory)
    shapes = Padding(bench.geometry, max_tokens=64, max_requests=6, cache_tokens=1000, q_interval=16)
    for sequence in run_padded(bench, shapes, poison):
        prompt = sequence.tokens[: sequence.prompt_length]
        assert sequence.generated == greedy(directory, prompt, len(sequence.generated)), sequence.id
    assert not bench.pool.pages(0)[sink_blocks(bench)].isnan().all(), "the padded rows' KV went there"
    chunks = bench.pool.raw_blocks(0).reshape(-1, bench.geometry.chunk_bytes)
    assert not chunks[READ_PADDING_CHUNK].any(), "always zero"
    assert bench.pool.free_chunks
    assert (chunks[bench.pool.free_list()] == POISON_BYTE).all(), "what belongs to nobody is as it was"

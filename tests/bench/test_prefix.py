"""Replaying a trace finds what its blocks say can be found."""

import json

import pytest

from bench.__main__ import main
from bench.prefix import POLICIES, POOLS, limit, prompt_blocks, replay
from bench.traces import BLOCK, MOONCAKE, TraceRequest, mooncake

PLENTY = 4_000


def request(*blocks: int, cut: int = 0) -> TraceRequest:
    """`cut`: tokens that the last block lacks."""
    return TraceRequest(0, len(blocks) * BLOCK - cut, 1, blocks)


def hits(trace: list[TraceRequest], pool: int = PLENTY, policy: str = "most_recent", live: int = 1) -> int:
    prefix = replay(trace, policy, pool, live).prefix  # type: ignore[arg-type]
    assert prefix is not None
    return prefix.counters.hits


def test_shared_beginnings_are_hit_and_one_block_is_always_left_to_compute() -> None:
    trace = [request(1, 2, 3, cut=9), request(1, 2, 4, cut=9), request(1, 2), request(5, 2)]
    assert prompt_blocks(trace) == 2 + 2 + 2 + 2
    assert hits(trace) == limit(trace) == 0 + 2 + 1 + 0


@pytest.mark.parametrize("name", MOONCAKE)
def test_one_request_at_a_time_in_a_large_pool_reaches_the_limit(name: str) -> None:
    trace = mooncake(name, 60)
    assert hits(trace) == limit(trace) > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_finds_more_than_the_limit_in_a_small_pool(policy: str) -> None:
    trace = mooncake("conversation", 120)
    assert hits(trace, 400, policy, live=4) <= limit(trace)


def test_policies_differ_where_room_is_short() -> None:
    trace = [request(1, 2), request(3, 4), request(5, 6), request(1, 7), request(5, 8)]
    found = {policy: hits(trace, 5, policy) for policy in POLICIES}
    assert len(set(found.values())) > 1, found


def test_the_traces_are_whole() -> None:
    for name in MOONCAKE:
        trace = mooncake(name)
        assert len(trace) == 2_000
        assert all(len(one.hash_ids) == -(-one.input_length // BLOCK) for one in trace)


def test_a_run_reports_every_policy_at_every_size_beside_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prefix", "--requests", "30"]) == 0
    report, _, table = capsys.readouterr().out.partition("\n\n")
    rows = json.loads(report)["rows"]
    assert len(rows) == len(MOONCAKE) * len(POOLS) * len(POLICIES)
    assert all(0.0 <= row["hit_rate"] <= row["limit"] for row in rows)
    assert len(table.splitlines()) == 1 + len(MOONCAKE) * len(POOLS)

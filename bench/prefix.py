"""`python -m bench prefix`: how many prompt blocks the prefix cache finds, by eviction policy and pool size.

Replays public traces through the engine's scheduler, allocators and prefix cache, without a model: as many requests as
LIVE are in the engine at a time, taken in order of arrival. Everything is scaled down alike: a block of 512 tokens of
the trace is a page of 4 here, so blocks, chains and sharing stay as they are. The limit: a cache that forgets nothing.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import get_args

from bench.null_device import STOP, VOCAB, build_null
from bench.traces import BLOCK, MOONCAKE, TraceRequest, mooncake
from engine.config import ContinuousBatchingConfig
from engine.engine import Engine
from engine.prefix_cache import EvictionPolicy
from engine.request import Request
from protocol.sampling import SamplingParams

PAGE = 4
"""Tokens that stand for a block of the trace."""
POOLS = (1_000, 4_000, 16_000)
"""In blocks of 512 tokens."""
LIVE = 8
POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)
DIGITS = VOCAB - STOP - 1


@dataclass(frozen=True, slots=True)
class Row:
    """`blocks`: whole blocks of all prompts; `hit_rate`: the share of them that was in the cache. `limit`: the share
    that a cache of any size could have had."""

    trace: str
    policy: EvictionPolicy
    pool_blocks: int
    blocks: int
    hit_rate: float
    limit: float
    evictions: int


def replay(trace: Sequence[TraceRequest], policy: EvictionPolicy, pool_blocks: int, live_at_once: int = LIVE) -> Engine:
    """The engine after the last request has ended."""
    longest = PAGE * max(len(one.hash_ids) for one in trace)
    engine = build_null(
        ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=pool_blocks,
            max_batch_tokens=max(longest, live_at_once),
            max_requests_per_batch=live_at_once,
            eviction_policy=policy,
        )
    )
    coming = iter(enumerate(trace))
    live = 0
    while True:
        for index, one in coming:
            engine.add(_request(f"r{index}", one))
            live += 1
            if live == live_at_once:
                break
        if not live:
            return engine
        live -= len(engine.step().ended)


def prompt_blocks(trace: Sequence[TraceRequest]) -> int:
    return sum(one.input_length // BLOCK for one in trace)


def limit(trace: Sequence[TraceRequest]) -> int:
    """Blocks that a cache which forgets nothing finds, requests running one after the other. One token of each prompt
    is always left to compute."""
    seen: set[int] = set()
    hits = 0
    for one in trace:
        ids = one.hash_ids[: (one.input_length - 1) // BLOCK]
        hits += next((at for at, block in enumerate(ids) if block not in seen), len(ids))
        seen.update(one.hash_ids[: one.input_length // BLOCK])
    return hits


def measure(name: str, requests: int | None, pools: Sequence[int] = POOLS) -> list[Row]:
    trace = mooncake(name, requests)
    blocks, best = prompt_blocks(trace), limit(trace)
    rows = []
    for pool in pools:
        for policy in POLICIES:
            prefix = replay(trace, policy, pool).prefix
            assert prefix is not None
            rate = prefix.counters.hits / blocks
            rows.append(Row(name, policy, pool, blocks, rate, best / blocks, prefix.counters.evictions))
    return rows


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench prefix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, help="of each trace (default: all 2,000)")
    parser.add_argument("--json", action="store_true", help="no table")
    arguments = parser.parse_args(argv)
    rows = [row for name in MOONCAKE for row in measure(name, arguments.requests)]
    sys.stdout.write(json.dumps({"rows": [asdict(row) for row in rows]}) + "\n")
    if not arguments.json:
        sys.stdout.write("\n" + table(rows))
    return 0


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'trace':<14}{'pool blocks':>12}" + "".join(f"{policy:>13}" for policy in POLICIES) + f"{'limit':>9}"]
    for trace, pool in dict.fromkeys((row.trace, row.pool_blocks) for row in rows):
        found = {row.policy: row for row in rows if (row.trace, row.pool_blocks) == (trace, pool)}
        rates = "".join(f"{found[policy].hit_rate:>13.1%}" for policy in POLICIES)
        lines.append(f"{trace:<14}{pool:>12,}{rates}{found[POLICIES[0]].limit:>9.1%}")
    return "\n".join(lines) + "\n"


def _request(name: str, one: TraceRequest) -> Request:
    tokens = [token for block in one.hash_ids for token in _tokens(block)]
    new = max(1, one.output_length * PAGE // BLOCK)
    return Request(name, tokens[: max(1, one.input_length * PAGE // BLOCK)], SamplingParams(max_new_tokens=new))


def _tokens(block: int) -> tuple[int, ...]:
    """PAGE tokens that no other block has."""
    first, second = divmod(block, DIGITS)
    return STOP + 1 + first, STOP + 1 + second, STOP + 1, STOP + 1

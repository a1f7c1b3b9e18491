"""`python -m bench engine`: whole engines on SmolLM2-135M, each in its own process, on the same tokens.

Every repeat runs every engine once, in an order that rotates; while one runs, the others wait and compute nothing. The
clock runs in the engine's process, once the model is loaded and the cache is filled by real prompts. Ratios are paired
by repeat: where their spread reaches over 1 it is a tie. Read ratios: figures swing with the machine.
"""

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench import engine_rows, overhead
from bench.engine_cells import FULL, QUICK, Plan
from bench.engine_comparison import Comparison
from bench.peers.environments import FOLDER, GGUF, LLAMA_CPP, MODEL, VLLM_CPU, Environment, PeerMissing, python_of
from bench.peers.lines import Settings
from bench.peers.orders import ChildFailed
from bench.peers.process import PeerProcess

OVERHEAD_STEPS = 100


@dataclass(frozen=True)
class Implementation:
    """`environment` None: the one that the benchmark runs in, whose transformers is pinned as well."""

    name: str
    module: str
    environment: Environment | None = None


IMPLEMENTATIONS = (
    Implementation(engine_rows.OURS, "bench.peers.kvferry"),
    Implementation("generate", "bench.peers.hf_generate"),
    Implementation("generate_batch", "bench.peers.hf_generate_batch"),
    Implementation("vllm_cpu", "bench.peers.vllm_cpu", VLLM_CPU),
    Implementation("llama_cpp_q4_1", "bench.peers.llama_cpp", LLAMA_CPP),
)
PEERS = tuple(one.name for one in IMPLEMENTATIONS[1:])


def compare(plan: Plan, implementations: Sequence[Implementation], threads: int, seed: int) -> Comparison:
    """Starts the engines, one after the other, and ends them all."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))[:threads]
    settings = Settings(str(MODEL), str(GGUF), threads, plan.max_requests, plan.cache_tokens, plan.max_context)
    comparison = Comparison(plan, seed, {})
    try:
        for one in implementations:
            try:
                comparison.peers[one.name] = _start(one, settings, cores)
            except (PeerMissing, ChildFailed) as error:
                comparison.missing[one.name] = str(error)
        comparison.run()
    finally:
        for peer in comparison.peers.values():
            peer.close()
    return comparison


def _start(one: Implementation, settings: Settings, cores: Sequence[int]) -> PeerProcess:
    """Loaded. Raises PeerMissing or ChildFailed."""
    python, log = python_of(one.environment), FOLDER / f"{one.name}.log"
    variables = one.environment.variables if one.environment else {}
    peer = PeerProcess(one.module, python, log, settings, cores, variables)
    try:
        peer.wait_ready()
    except ChildFailed:
        peer.close()
        raise
    return peer


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench engine", description=__doc__)
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=PEERS,
        metavar="NAME",
        help=f"beside which engines (no name: all): {', '.join(PEERS)}",
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cells: minutes instead of half an hour")
    parser.add_argument("--overhead", action="store_true", help="only what the engine adds to its forward, at batch 8")
    parser.add_argument("--threads", type=int, default=2, help="threads and cores of every engine (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")
    parser.add_argument("--json", action="store_true", help="no table")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if arguments.overhead:
        one = overhead.measure_overhead(MODEL, arguments.threads, arguments.seed, OVERHEAD_STEPS)
        _print({"overhead": asdict(one)}, overhead.table(one), arguments.json)
    else:
        _compare(arguments)
    return 0


def _compare(arguments: argparse.Namespace) -> None:
    peers = PEERS if arguments.peers == [] else arguments.peers or ()
    began = time.monotonic()
    plan = QUICK if arguments.quick else FULL
    implementations = [one for one in IMPLEMENTATIONS if one.name in (engine_rows.OURS, *peers)]
    comparison = compare(plan, implementations, arguments.threads, arguments.seed)
    tables = (
        engine_rows.table(comparison.rows),
        engine_rows.mixed_table(comparison.mixed),
        engine_rows.missing_table(comparison.missing),
    )
    report = _report(comparison, arguments.threads, time.monotonic() - began)
    _print(report, "\n".join(tables), arguments.json)


def _print(report: dict[str, object], table: str, only_json: bool) -> None:
    sys.stdout.write(json.dumps(report) + "\n" + ("" if only_json else "\n" + table))


def _report(comparison: Comparison, threads: int, seconds: float) -> dict[str, object]:
    return {
        "threads": threads,
        "seed": comparison.seed,
        "seconds": round(seconds, 1),
        "rows": [asdict(row) for row in comparison.rows],
        "mixed": [asdict(row) for row in comparison.mixed],
        "missing": comparison.missing,
    }

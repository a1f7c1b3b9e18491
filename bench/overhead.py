"""How much longer a decode step of the engine takes than the forward inside it, and on what."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median, quantiles
from time import monotonic_ns

from bench.engine_cells import TOKENS, prompts
from engine.build import build_engine
from engine.config import ContinuousBatchingConfig
from engine.engine import Engine
from engine.options import EngineOptions
from engine.request import Request
from protocol.sampling import SamplingParams

BATCH = 8
CONTEXT = 512
PAGE_SIZE = 64
MAX_BATCH_TOKENS = 512
WARM_STEPS = 3


@dataclass(frozen=True, slots=True)
class Step:
    """Nanoseconds. `device`: the forward and the choice of tokens; `schedule`, `launch` (assembling the batch and its
    tensors, planning attention) and `update` are the engine's; `total` is what the step took."""

    total: int
    device: int
    schedule: int
    launch: int
    update: int

    @property
    def overhead(self) -> float:
        """Of the forward's time."""
        return (self.total - self.device) / self.device


PARTS = fields(Step)


@dataclass(frozen=True, slots=True)
class Overhead:
    """Medians over the steps, in microseconds; `overhead` with its 90th percentile, as shares of the forward."""

    batch: int
    context: int
    total_us: float
    device_us: float
    schedule_us: float
    launch_us: float
    update_us: float
    overhead: float
    overhead_p90: float


def measure_overhead(model: Path, threads: int, seed: int, steps: int, tokens: range = TOKENS) -> Overhead:
    """On a cache filled by a real prefill. `tokens`: ids that prompts are drawn from."""
    new = WARM_STEPS + steps + BATCH * 2  # those prefilled first decode while the last ones wait
    blocks = BATCH * -(-(CONTEXT + new) // PAGE_SIZE)
    batching = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=blocks,
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_requests_per_batch=BATCH,
        safety_margin=0.0,
    )
    engine = build_engine(EngineOptions(model, batching, threads), head=True)
    for index, prompt in enumerate(prompts([CONTEXT] * BATCH, seed, tokens)):
        engine.add(Request(f"r{index}", prompt, SamplingParams(max_new_tokens=new, ignore_eos=True)))
    while len(engine.step().tokens) < BATCH:
        assert engine.has_work, "the batch has ended before all of it decoded"
    measured = [_step(engine) for _ in range(WARM_STEPS + steps)][WARM_STEPS:]
    engine.close()
    return summary(measured)


def summary(steps: Sequence[Step]) -> Overhead:
    parts = {f"{part.name}_us": round(median(getattr(step, part.name) for step in steps) / 1e3, 1) for part in PARTS}
    shares = [step.overhead for step in steps]
    p90 = quantiles(shares, n=10, method="inclusive")[-1]
    return Overhead(batch=BATCH, context=CONTEXT, overhead=median(shares), overhead_p90=p90, **parts)


def table(one: Overhead) -> str:
    return (
        f"decode at batch {one.batch}, context {one.context}: a step takes {one.total_us:.0f} us, its forward"
        f" {one.device_us:.0f} us: {one.overhead:.1%} more (p90 {one.overhead_p90:.1%})\n"
        f"  schedule {one.schedule_us:.0f} us, assemble and launch {one.launch_us:.0f} us, update"
        f" {one.update_us:.0f} us\n"
    )


def _step(engine: Engine) -> Step:
    counters = engine.counters
    schedule, launch, update = counters.schedule_ns, counters.launch_ns, counters.update_ns
    forward, device = counters.forward_ns, counters.device_ns
    began = monotonic_ns()
    output = engine.step()
    total = monotonic_ns() - began
    assert len(output.tokens) == BATCH, "not all of the batch decoded"
    device = counters.device_ns - device
    # On the synchronous runner the forward runs while it is launched.
    launched = counters.launch_ns - launch + counters.forward_ns - forward - device
    return Step(total, device, counters.schedule_ns - schedule, launched, counters.update_ns - update)

"""One plan, run on several engines that take turns."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench import engine_rows
from bench.engine_cells import Cell, Phase, Plan, arrivals, prompts
from bench.engine_rows import MixedRow, Row
from bench.peers.lines import Peer, Served
from bench.peers.orders import ChildFailed

SETTLE_S = 0.3
"""Between two engines: worker threads of the one spin for a moment after its last step."""
MAX_STEPS = 24
PROBE_STEPS = 2

log = logging.getLogger("kvferry.bench")


@dataclass
class Comparison:
    """Runs a plan on the peers that are alive; one that fails leaves, with its reason in `missing`."""

    plan: Plan
    seed: int
    peers: dict[str, Peer]
    missing: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    mixed: list[MixedRow] = field(default_factory=list)
    settle_s: float = SETTLE_S

    def run(self) -> None:
        filled = prompts(self.plan.fill_lengths(), self.seed)
        for name in list(self.peers):
            log.info("filling %s with %d tokens", name, sum(map(len, filled)))
            with self._surviving(name):
                self.peers[name].fill(filled)
        for cell in self.plan.cells:
            log.info("%s: batch %d, context %d", cell.phase, cell.batch, cell.context)
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
        time.sleep(self.settle_s)
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
        except ChildFailed as error:
            self.missing[name] = str(error)
            self.peers.pop(name).close()

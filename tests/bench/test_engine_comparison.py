"""Engines take turns, each in every place once, and one that fails leaves the others alone."""

from collections.abc import Sequence

from bench.engine_cells import Cell, Load, Phase, Plan
from bench.engine_comparison import MAX_STEPS, PROBE_STEPS, Comparison
from bench.peers.lines import Arrival, Peer, Prompt, Served, Timed
from bench.peers.orders import ChildFailed

PLAN = Plan(
    decode=(Cell(Phase.DECODE, 2, 8), Cell(Phase.DECODE, 1, 16)),
    prefill=(Cell(Phase.PREFILL, 1, 8),),
    load=Load(rate=1.0, requests=2, prompt=(4, 6), new=(2, 3)),
    repeats=3,
    seconds=1.0,
)


class FakePeer:
    """Decodes `rate` tokens a second. `dies_at`: the call of `decode` that fails."""

    def __init__(self, name: str, diary: list[str], rate: float = 20.0, dies_at: int = 0) -> None:
        self.name, self.diary, self.rate, self.dies_at = name, diary, rate, dies_at
        self.filled: list[int] = []
        self.prompts: list[Prompt] = []
        self.steps: list[int] = []
        self.closed = False

    def fill(self, prompts: Sequence[Prompt]) -> None:
        self.filled = [len(prompt) for prompt in prompts]

    def decode(self, prompts: Sequence[Prompt], steps: int) -> Timed:
        self.diary.append(self.name)
        self.steps.append(steps)
        if len(self.steps) == self.dies_at:
            raise ChildFailed("it died")
        return Timed(len(prompts) * steps / self.rate, len(prompts) * steps)

    def prefill(self, prompt: Prompt) -> Timed:
        self.prompts.append(prompt)
        return Timed(0.1, len(prompt))

    def replay(self, arrivals: Sequence[Arrival]) -> list[Served]:
        return [Served(one.at, one.at + 1.0, one.at + 2.0, one.new) for one in arrivals]

    def close(self) -> None:
        self.closed = True


def run(*peers: FakePeer) -> Comparison:
    alive: dict[str, Peer] = {peer.name: peer for peer in peers}
    comparison = Comparison(PLAN, 0, alive, settle_s=0.0)
    comparison.run()
    return comparison


def test_every_cell_has_a_row_of_every_engine_with_one_figure_a_repeat() -> None:
    comparison = run(FakePeer("kvferry", []), FakePeer("other", []))
    cells = [(row.phase, row.batch, row.context, row.implementation) for row in comparison.rows]
    assert cells == [
        (phase, batch, context, name)
        for phase, batch, context in [("decode", 1, 16), ("decode", 2, 8), ("prefill", 1, 8), ("mixed", 2, 6)]
        for name in ("kvferry", "other")
    ]
    assert all(len(row.tokens_per_s) == PLAN.repeats for row in comparison.rows)
    assert [row.implementation for row in comparison.mixed] == ["kvferry", "other"]


def test_the_order_rotates_from_repeat_to_repeat() -> None:
    diary: list[str] = []
    run(FakePeer("a", diary), FakePeer("b", diary), FakePeer("c", diary))
    probes, repeats = diary[:3], diary[3:12]
    assert probes == ["a", "b", "c"]
    assert repeats == [*"abc", *"bca", *"cab"]


def test_all_engines_are_filled_and_no_prefill_repeats_a_prompt() -> None:
    one, other = FakePeer("a", []), FakePeer("b", [])
    run(one, other)
    assert one.filled == [17, 9]
    assert one.prompts == other.prompts
    assert len({tuple(prompt) for prompt in one.prompts}) == PLAN.repeats + 1


def test_a_measurement_takes_about_the_time_that_the_plan_wants() -> None:
    slow, fast = FakePeer("slow", [], rate=6.0), FakePeer("fast", [], rate=1000.0)
    run(slow, fast)
    assert slow.steps[:2] == [PROBE_STEPS, 6]
    assert fast.steps[:2] == [PROBE_STEPS, MAX_STEPS]


def test_one_that_fails_is_closed_and_said_and_the_others_go_on() -> None:
    broken, sound = FakePeer("broken", [], dies_at=3), FakePeer("kvferry", [])
    comparison = run(broken, sound)
    assert broken.closed and not sound.closed
    assert comparison.missing == {"broken": "it died"}
    assert {row.implementation for row in comparison.rows} == {"kvferry"}
    assert len(comparison.rows) == 4

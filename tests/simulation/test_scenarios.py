"""What follows one fault, step by step and in virtual time, where the seeds only look at how it ends."""

import re
from dataclasses import dataclass, field, replace

import pytest

from protocol.messages import FinishReason
from tests.simulation.play import told
from tests.simulation.router import ClientRequest
from tests.simulation.script import Fault, FaultKind, Manners, Profile, Script, Submission, draw
from tests.simulation.world import BEGIN_S, World

AT_ONCE_S = 0.05
"""A few messages and turns of threads, and far less than any time-out."""
NOTICED_S = 6.0

PROMPT = Submission(at=0.0, tokens=13, family=0, new_tokens=2, deadline_s=60.0, abort_at=None, n=1, stops=None)
WRITES = 12
"""Of its 12 tokens without the last: 6 pages in 2 layers."""
PLAIN = Manners(
    thread_lag=0.0001,
    message_delay=0.001,
    write_delay=0.002,
    layer_time=0.01,
    ordered=False,
    early_share=0.0,
    busy_share=0.0,
    duplicate_share=0.0,
    unruly=0.0,
    queue_limit=1000,
    lands_while_paused=False,
    notices_death=True,
)


@dataclass
class Told:
    """A world that was played, and what was said meanwhile."""

    world: World
    lines: list[tuple[float, str]] = field(default_factory=list)

    @property
    def request(self) -> ClientRequest:
        (request,) = self.world.requests.values()
        return request

    def when(self, pattern: str, after: float = 0.0) -> float:
        """Of the first line that it matches."""
        return self.find(pattern, after)[0]

    def find(self, pattern: str, after: float = 0.0) -> tuple[float, re.Match[str]]:
        for at, line in self.lines:
            if at >= after and (match := re.search(pattern, line)):
                return at, match
        raise AssertionError(f"nothing like {pattern!r} was said after {after}: {self.lines}")

    def said(self, pattern: str) -> int:
        """How often."""
        return sum(re.search(pattern, line) is not None for _, line in self.lines)

    @property
    def posted(self) -> int:
        """Writes, by every prefill node that still is."""
        return sum(node.fabric.counters().writes_posted for node in self.world.nodes)


def script(*faults: Fault, prefills: int = 1, rails: tuple[int, int] = (1, 1), **manners: object) -> Script:
    return replace(
        draw(0),
        profile=Profile.CHAOS,
        prefills=prefills,
        decodes=1,
        prefill_blocks=16,
        decode_blocks=16,
        chunk_tokens=4,
        small_prefill=False,
        shared=(False, False),
        debug=False,
        contexts=(False, False),
        rails=rails,
        fence_needs_dead_peer=False,
        manners=replace(PLAIN, **manners),  # type: ignore[arg-type]
        submissions=(PROMPT,),
        faults=faults,
    )


def play(of: Script) -> Told:
    played = Told(World(of))
    clock = played.world.schedule.clock
    played.world.say = lambda line: played.lines.append((clock(), line))
    with told(played.world.say):
        played.world.run()
    return played


def fault(kind: FaultKind, at: float, lasting: float = 0.5, node: int = 0) -> Fault:
    return Fault(at, kind, node, lasting)


@pytest.mark.parametrize("at", [0.005, 0.015, 0.025])
def test_a_failed_write_is_heard_of_at_once_with_how_many_were_posted(at: float) -> None:
    played = play(script(fault(FaultKind.FAIL_WRITE, at)))
    lost = played.when("decode node lost")
    _, stopped = played.find(r"transfer stopped: request=r0, posted=(\d+), completed=(\d+)")
    posted, completed = int(stopped[1]), int(stopped[2])
    assert completed < posted <= WRITES
    failed = played.when("transfer failed: request=r0, attempt=1")
    assert failed - lost < AT_ONCE_S
    assert played.when("kv arrived: request=r0, attempt=2") - failed < 4 * AT_ONCE_S
    assert played.posted == posted + WRITES
    assert played.request.outcome is FinishReason.LENGTH


def test_writes_that_cannot_be_posted_any_more_are_heard_of_at_once_too() -> None:
    """The connection breaks between two layers, with nothing on its way."""
    played = play(
        script(
            fault(FaultKind.HOLD_GATE, -0.1, lasting=1.0),
            fault(FaultKind.BREAK_WRITES, 0.2),
        )
    )
    broken = played.when("break writes")
    _, stopped = played.find(r"transfer stopped: request=r0, posted=(\d+), completed=(\d+)", broken)
    assert int(stopped[1]) == int(stopped[2]) < WRITES
    assert played.when("transfer failed: request=r0, attempt=1") - broken < AT_ONCE_S
    assert played.request.outcome is FinishReason.LENGTH


@pytest.mark.parametrize("at", [-0.1, 0.005, 0.015, 0.025])
@pytest.mark.parametrize("node", [0, 1], ids=["the prefill node's", "the decode node's"])
def test_writes_of_a_rail_that_breaks_move_to_the_others_within_the_attempt(at: float, node: int) -> None:
    """Asked once, fenced once, and no write comes by that rail again."""
    played = play(script(fault(FaultKind.BREAK_RAIL, at, lasting=5.0, node=node), rails=(2, 2)))
    lost, fenced, settled = (played.when(f"rail {what}: ") for what in ("lost", "fenced", "settled"))
    assert lost <= fenced <= settled < lost + AT_ONCE_S
    assert played.when("kv arrived: request=r0, attempt=1") < settled + 2 * AT_ONCE_S
    assert played.said("rail lost: ") == 1 and not played.said("transfer failed|decode node lost|fencing: ")
    assert played.posted > WRITES and played.request.outcome is FinishReason.LENGTH


def test_a_rail_that_breaks_where_the_peer_cannot_tell_costs_the_attempt() -> None:
    """Two rails of the prefill node's write to the decode node's only one."""
    played = play(script(fault(FaultKind.BREAK_RAIL, 0.005, node=0), rails=(2, 1)))
    failed = played.when("transfer failed: request=r0, attempt=1")
    assert played.when("rail failed: ") <= played.when("decode node lost: ") <= failed
    assert played.when("kv arrived: request=r0, attempt=2") < failed + 4 * AT_ONCE_S
    assert not played.said("rail lost: ") and played.request.outcome is FinishReason.LENGTH


@pytest.mark.parametrize("at", [0.005, 0.015, 0.025])
@pytest.mark.parametrize(("notices", "within"), [(True, 0.3), (False, NOTICED_S)])
def test_when_a_prefill_node_dies_another_one_takes_over(at: float, notices: bool, within: float) -> None:
    """Fence, new generation, another node: its pages are compared before the request goes on. Whichever is asked first
    is killed."""
    first = _asked_first()
    played = play(script(fault(FaultKind.KILL, at, 30.0, first), prefills=2, notices_death=notices))
    killed = played.when(f"prefill-{first}.0 is dead")
    failed = played.when("transfer failed: request=r0, attempt=1", killed)
    arrived, _ = played.find("kv arrived: request=r0, attempt=2", failed)
    assert arrived - killed < within
    assert played.request.outcome is FinishReason.LENGTH and len(played.request.tried) == 1


def test_a_prefill_node_that_was_only_slow_finds_itself_fenced_and_is_used_again() -> None:
    first = _asked_first()
    pause = fault(FaultKind.PAUSE, 0.015, 10.0, first)
    played = play(script(pause, prefills=2))
    lost = played.when("prefill node lost: .*no heartbeat")
    assert lost - played.when("pause: ") < NOTICED_S
    assert played.when("kv arrived: request=r0, attempt=2") - lost < 4 * AT_ONCE_S
    played.when("decode node lost|transfer stopped", played.when(f"prefill-{first}.0 goes on"))
    assert played.request.outcome is FinishReason.LENGTH


def _asked_first() -> int:
    """Of the two prefill nodes, for the seed and the submission of these scripts."""
    nodes = play(script(prefills=2)).world.nodes
    return next(index for index in range(2) if nodes[index].fabric.counters().writes_posted)


def test_the_scripts_begin_when_every_node_is_registered() -> None:
    played = play(script(prefills=2))
    assert played.when("r0 is submitted") == pytest.approx(1000.0 + BEGIN_S)
    assert sum("registered with router" in line for _, line in played.lines) == 3
    assert played.when("kv arrived: request=r0, attempt=1")

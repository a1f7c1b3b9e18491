"""What one seed draws before anything happens: the nodes, the requests, the faults, and the network's manners."""

from dataclasses import dataclass, replace
from enum import Enum
from random import Random

PAGE = 2
"""Tokens in a page."""
LAYERS = 2
RAILS_SHARE = 0.25
"""Of the seeds, those with nodes of several rails."""
RECOVERY_S = 6.0
"""Longest time until a pause or a break is over or a killed process is started again."""


class Profile(Enum):
    CALM = "calm"
    """Nothing breaks. Whatever is not cancelled succeeds, and nobody is given up."""
    FAILOVER = "failover"
    """One of two prefill nodes, its writes or a rail of its fails: all the same, whatever is not cancelled succeeds."""
    CHAOS = "chaos"
    """Anything: every request has an outcome, and no page and no token is wrong."""


class FaultKind(Enum):
    KILL = "kill"
    PAUSE = "pause"
    STOP = "stop"
    """As by SIGTERM: drain, then close."""
    CUT_LINK = "cut link"
    """The control connections of a node break; what was on its way is lost."""
    BREAK_WRITES = "break writes"
    """The data connections of a prefill node break."""
    BREAK_RAIL = "break rail"
    """One rail of a node: of what is on its way there, or is posted there while it lasts, some lands late and some
    never, and its senders notice later."""
    FAIL_WRITE = "fail write"
    """The next write that a prefill node posts."""
    LOSE_IMMEDIATE = "lose immediate"
    """The next write of a prefill node lands, and is not counted."""
    FAIL_FORWARD = "fail forward"
    HOLD_GATE = "hold gate"
    NEW_ROUTER = "new router"
    PAUSE_ROUTER = "pause router"


@dataclass(frozen=True, slots=True)
class Fault:
    """`node`: an index into the prefill nodes, or beyond them into the decode nodes. `lasting`: seconds until it is
    over, or until the process is started again."""

    at: float
    kind: FaultKind
    node: int
    lasting: float


@dataclass(frozen=True, slots=True)
class Submission:
    """A client's request. `abort_at`: when it leaves, after `at`; None: it stays. `n`: choices; after its first token
    the router stops choice `stops`, as a stop string would have it."""

    at: float
    tokens: int
    family: int
    """Prompts of one family begin alike, as far as both go."""
    new_tokens: int
    deadline_s: float
    abort_at: float | None
    n: int
    stops: int | None


@dataclass(frozen=True, slots=True)
class Manners:
    """How the network behaves. Times are the longest, in seconds. `unruly`: control messages may be dropped, doubled
    and reordered, which no real connection does."""

    thread_lag: float
    message_delay: float
    write_delay: float
    layer_time: float
    ordered: bool
    early_share: float
    """Of writes that complete for their sender before they land."""
    busy_share: float
    duplicate_share: float
    """Of immediates that come once more when their generation has ended."""
    unruly: float
    queue_limit: int
    lands_while_paused: bool
    """A NIC writes to the memory of a process that stands still; TCP does not."""
    notices_death: bool
    """A landing reports the end of its peer."""


@dataclass(frozen=True, slots=True)
class Script:
    seed: int
    profile: Profile
    prefills: int
    decodes: int
    prefill_blocks: int
    decode_blocks: int
    chunk_tokens: int
    small_prefill: bool
    """The first prefill node is too small for long prompts, and says so."""
    shared: tuple[bool, bool]
    """Whether prefill and decode nodes keep prefixes for later hits."""
    debug: bool
    """Checksums are compared before a request goes on."""
    contexts: tuple[bool, bool]
    """Whether prefill nodes make contexts of prompts, and decode nodes want them."""
    context_slots: int
    """Of each node that has contexts. As pages, they may be in quarantine for as long as a failed peer lives."""
    rails: tuple[int, int]
    """NICs of each prefill and of each decode node."""
    fence_needs_dead_peer: bool
    manners: Manners
    submissions: tuple[Submission, ...]
    faults: tuple[Fault, ...]

    @property
    def must_succeed(self) -> bool:
        return self.profile is not Profile.CHAOS

    @property
    def must_move(self) -> bool:
        """A rail breaks and nothing else happens: its writes move to the others, and no attempt is lost."""
        source, target = self.rails
        others = 1 < source <= target and not self.fence_needs_dead_peer and not self.manners.early_share
        nobody_leaves = all(submission.abort_at is None for submission in self.submissions)
        faults = [fault.kind for fault in self.faults]
        return self.must_succeed and others and nobody_leaves and faults == [FaultKind.BREAK_RAIL]


def draw(seed: int) -> Script:
    rng = Random(f"script {seed}")
    profile = rng.choice([Profile.CALM, Profile.FAILOVER, Profile.CHAOS, Profile.CHAOS])
    prefills = 2 if profile is Profile.FAILOVER else rng.choice([1, 2])
    decodes = rng.choice([1, 1, 2])
    choices = Random(f"choices {seed}")
    submissions = tuple(_submission(rng, profile, choices) for _ in range(rng.randint(2, 5)))
    script = Script(
        seed=seed,
        profile=profile,
        prefills=prefills,
        decodes=decodes,
        prefill_blocks=rng.choice([8, 16, 24]),
        decode_blocks=64 if profile is Profile.FAILOVER else rng.choice([8, 16, 24]),
        chunk_tokens=rng.choice([2, 4, 16]),
        small_prefill=prefills == 2 and profile is Profile.CALM and rng.random() < 0.3,
        shared=(rng.random() < 0.4, rng.random() < 0.3),
        debug=rng.random() < 0.15,
        contexts=Random(f"contexts {seed}").choice([(False, False), (True, False), (True, True)]),
        context_slots=16 if profile is Profile.FAILOVER else 2,
        rails=(1, 1),
        fence_needs_dead_peer=rng.random() < 0.4,
        manners=_manners(rng, profile),
        submissions=submissions,
        faults=_faults(rng, profile, prefills, decodes, submissions),
    )
    rails = Random(f"rails {seed}")
    return _with_rails(rails, script) if rails.random() < RAILS_SHARE else script


def _with_rails(rng: Random, script: Script) -> Script:
    """Several for each node, or for one kind of nodes; more often than not with all that it takes to move the writes of
    one that breaks, and with such breaks."""
    script = replace(script, rails=rng.choice([(1, 2), (2, 1), (2, 2), (2, 2), (2, 3), (3, 2), (3, 3)]))
    if rng.random() < 0.75:
        script = replace(script, fence_needs_dead_peer=False, manners=replace(script.manners, early_share=0.0))
    if script.profile is Profile.CALM:
        return script
    nodes, breaks = script.prefills, 1
    if script.profile is Profile.CHAOS:
        nodes, breaks = script.prefills + script.decodes, rng.randint(1, 2)
    broken = [_fault(rng, FaultKind.BREAK_RAIL, nodes, RECOVERY_S, script.submissions) for _ in range(breaks)]
    others = script.faults if script.profile is Profile.CHAOS else ()
    return replace(script, faults=tuple(sorted([*others, *broken], key=lambda fault: fault.at)))


def _submission(rng: Random, profile: Profile, choices: Random) -> Submission:
    n = choices.choice([1, 1, 2, 3])
    at = rng.random() * rng.choice([0.01, 0.1, 0.5, 2.0 if profile is Profile.CHAOS else 0.5])
    leaves = rng.random() < 0.25
    return Submission(
        at=at,
        tokens=rng.choice([1, rng.randint(2, 8), rng.randint(4, 14)]),
        family=rng.randrange(2),
        new_tokens=rng.randint(1, 3),
        deadline_s=rng.choice([0.5, 3.0, 20.0]) if profile is Profile.CHAOS else 60.0,
        abort_at=at + rng.random() * rng.choice([0.02, 0.2, 5.0]) if leaves else None,
        n=n,
        stops=choices.randrange(n) if n > 1 and choices.random() < 0.5 else None,
    )


def _manners(rng: Random, profile: Profile) -> Manners:
    chaos = profile is Profile.CHAOS
    return Manners(
        thread_lag=rng.choice([0.0001, 0.002]),
        message_delay=rng.choice([0.0005, 0.005, 0.05]),
        write_delay=rng.choice([0.0005, 0.01, 0.1]),
        layer_time=rng.choice([0.0005, 0.01]),
        ordered=rng.random() < 0.3,
        early_share=rng.choice([0.0, 0.3]),
        busy_share=rng.choice([0.0, 0.0, 0.2]),
        duplicate_share=rng.choice([0.0, 0.2]),
        unruly=rng.choice([0.0, 0.0, 0.0, 0.05]) if chaos else 0.0,
        queue_limit=rng.choice([3, 8, 1000]) if chaos else 1000,
        lands_while_paused=rng.random() < 0.5,
        notices_death=rng.random() < 0.5,
    )


FAILOVER_FAULTS = [
    FaultKind.KILL,
    FaultKind.PAUSE,
    FaultKind.STOP,
    FaultKind.BREAK_WRITES,
    FaultKind.FAIL_WRITE,
    FaultKind.LOSE_IMMEDIATE,
]


def _faults(
    rng: Random, profile: Profile, prefills: int, decodes: int, submissions: tuple[Submission, ...]
) -> tuple[Fault, ...]:
    if profile is Profile.CALM:
        holds = rng.random() < 0.3
        return (_fault(rng, FaultKind.HOLD_GATE, prefills + decodes, 0.5, submissions),) if holds else ()
    if profile is Profile.FAILOVER:
        return (_fault(rng, rng.choice(FAILOVER_FAULTS), prefills, RECOVERY_S, submissions),)
    kinds = rng.choices(list(FaultKind), k=rng.randint(1, 4))
    faults = [_fault(rng, kind, prefills + decodes, RECOVERY_S, submissions) for kind in kinds]
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _fault(rng: Random, kind: FaultKind, nodes: int, longest: float, submissions: tuple[Submission, ...]) -> Fault:
    """In the middle of a request, more often than not."""
    return Fault(
        at=rng.choice(submissions).at + rng.random() * rng.choice([0.02, 0.1, 0.1, 1.0]),
        kind=kind,
        node=rng.randrange(nodes),
        lasting=rng.random() * rng.choice([longest / 10, longest / 10, longest]),
    )

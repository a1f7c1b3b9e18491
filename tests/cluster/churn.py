"""Many clients at once, some of which leave: by the clock of what they have read, or while their request stands at a
gate of the product."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock

from tests.cluster.exchange import DONE, Exchange, text_of
from tests.cluster.harness import ProcessCluster
from tests.cluster.node_process import Role
from tests.cluster.oracle import Oracle

AT_ONCE = 8
MAX_TOKENS = 32
PROMPTS = [f"{i} prompt of its own length" + " and more of it" * (i * 3) for i in range(8)]
GATES: dict[str, Role | None] = {
    "prefill:from=0": "prefill",
    "xfer:layer=0": "prefill",
    "xfer:layer=2": "prefill",
    "decode:join": "decode",
    "stream:tok=3": None,
}
"""Where a request may stand, and in which nodes; None: in the router."""


@dataclass(frozen=True)
class Plan:
    """What one client does. `leaves_at`: a gate, `leaves_after`: so many events of its stream (0: at once)."""

    prompt: str
    max_tokens: int
    stream: bool
    leaves_at: str | None = None
    leaves_after: int | None = None


def plans(rng: random.Random, requests: int, leavers: int) -> list[Plan]:
    """In random order; half of the leavers go at a gate."""
    kinds = ["gate"] * (leavers // 2) + ["events"] * (leavers - leavers // 2) + ["stays"] * (requests - leavers)
    rng.shuffle(kinds)
    return [_plan(rng, kind) for kind in kinds]


def _plan(rng: random.Random, kind: str) -> Plan:
    prompt, tokens = rng.choice(PROMPTS), rng.randint(4, MAX_TOKENS)
    if kind == "gate":
        return Plan(prompt, tokens, True, leaves_at=rng.choice(sorted(GATES)))
    stream = rng.random() < 0.5
    return Plan(prompt, tokens, stream, leaves_after=rng.randrange(10) * stream if kind == "events" else None)


class Churn:
    """`carry_out` calls `done` whenever a client is."""

    def __init__(self, cluster: ProcessCluster, oracle: Oracle, done: Callable[[], object] = lambda: None) -> None:
        self._cluster = cluster
        self._oracle = oracle
        self._done = done
        self._locks = {gate: Lock() for gate in GATES}

    def carry_out(self, planned: Sequence[Plan], meanwhile: Callable[[], object] = lambda: None) -> None:
        """All of them, AT_ONCE at a time. Raises what the first client that failed has raised."""
        for prompt in PROMPTS:
            self._oracle.completion(prompt, MAX_TOKENS)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            clients = [pool.submit(self._one, plan) for plan in planned]
            meanwhile()
            for client in clients:
                client.result()
        self._cluster.wait_at_rest()

    def _one(self, plan: Plan) -> None:
        if plan.leaves_at is not None:
            self._leave_at(plan, plan.leaves_at)
        else:
            self._ask(plan)
        self._done()

    def _ask(self, plan: Plan) -> None:
        with self._cluster.ask(plan.prompt, plan.max_tokens, plan.stream) as asked:
            if plan.leaves_after is None:
                said = _streamed(asked) if plan.stream else asked.text()
                expected = self._oracle.completion(plan.prompt, plan.max_tokens).text
                assert said == expected, f"{said!r} instead of {expected!r}"
            elif plan.leaves_after > 0:
                for _ in zip(range(plan.leaves_after), asked.events(), strict=False):
                    continue

    def _leave_at(self, plan: Plan, gate: str) -> None:
        """One client a gate: releasing it releases everybody. A node that is killed meanwhile has no gate any more."""
        role, nodes = GATES[gate], self._cluster.nodes
        names = sorted(name for name, node in nodes.items() if node.role == role) if role else ["router"]
        with (
            self._locks[gate],
            suppress(ConnectionError, FileNotFoundError),
            self._cluster.held(gate, *names) as held,
            self._cluster.ask(plan.prompt, plan.max_tokens, stream=True),
        ):
            held.reached_first()


def _streamed(asked: Exchange) -> str:
    """Of a whole stream, which must have succeeded."""
    events = list(asked.events())
    assert events[-1] == DONE, events
    return text_of(events)

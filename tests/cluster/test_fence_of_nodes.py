"""A prefill node that stands still (SIGSTOP) while it writes, over each way that this machine has: no page that it may
still write to is handed out, and time alone frees none."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest

from tests.cluster.exchange import Exchange
from tests.cluster.harness import ProcessCluster
from tests.cluster.invariants import expect_poison_whole, invariants
from tests.cluster.oracle import Oracle
from tests.cluster.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WAYS = {
    "net": ("--provider", "net", "--no-same-host"),
    "tcp;ofi_rxm": ("--provider", "tcp;ofi_rxm", "--no-same-host"),
    "same-host": (),
}
PREFILLS = ("prefill-0", "prefill-1")
DECODE = "decode-0"
GATE = "xfer:layer=1"
HALF_A_POOL = "x" * 1200
MANY_CHUNKS = "w" * 900
TOKENS = 8
PAGES = 57
"""Of that prompt."""
WRITES = PAGES * 3
COUNTED = "fabric_immediates_counted_total"
HALF_WAY = "prefill:from=448"
TRIES = 20
SETTLED_S = 0.6
"""Longer than what it sent takes to be counted, and the count to be shown; shorter than silence."""
RESOLVE_S = 30.0


class Way:
    """A cluster of two prefill nodes and one decode node. `fences_the_living`: the provider can close a landing while
    its peer may be writing to it."""

    def __init__(self, name: str, cluster: ProcessCluster) -> None:
        self.cluster = cluster
        self.fences_the_living = name != "tcp;ofi_rxm"

    @property
    def quarantined(self) -> int:
        return self.cluster.page_states(DECODE).count("quarantined")

    @property
    def lingering(self) -> float:
        return self.cluster.metrics(DECODE)["lingering_landings"]

    def metric(self, name: str) -> float:
        return self.cluster.metrics(DECODE)[name]


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest, endless_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Way]:
    cluster = ProcessCluster(endless_model, tmp_path_factory.mktemp("run"))
    try:
        cluster.start(2, 1, *WAYS[request.param])
        yield Way(request.param, cluster)
    finally:
        cluster.close()


@pytest.fixture(autouse=True)
def healed(way: Way) -> None:
    way.cluster.heal()


def states(cluster: ProcessCluster) -> dict[str, set[int]]:
    """The decode node's pages that are not free, at one moment."""
    found: dict[str, set[int]] = defaultdict(set)
    for number, page in enumerate(cluster.get(DECODE, "/debug/pages").json()):
        if page["state"] != "free":
            found[page["state"]].add(number)
    return found


def pages_of(cluster: ProcessCluster, state: str) -> set[int]:
    return states(cluster)[state]


def test_pages_of_one_who_left_are_nobodys_before_the_sleeping_writer_has_answered(way: Way, oracle: Oracle) -> None:
    """P01: A's client leaves between two layers; B, who needs A's pages, waits for the writer's word."""
    cluster = way.cluster
    with invariants(cluster), cluster.held(GATE, *PREFILLS) as gate:
        left = cluster.ask(HALF_A_POOL, TOKENS)
        sleeping = gate.reached_first()
        of_a = pages_of(cluster, "held")
        assert len(of_a) == 75
        asked = cluster.ask(f"B{HALF_A_POOL}", TOKENS)
        eventually(lambda: way.metric("requests_waiting") == 1, "B waits for pages")
        with cluster.paused(sleeping):
            left.leave()
            eventually(lambda: states(cluster) == {"quarantined": of_a}, "A's pages are in quarantine, and B has none")
        eventually(lambda: way.metric("requests_waiting") == 0, "B has pages")
        assert pages_of(cluster, "held") & of_a
        for name in PREFILLS:
            gate.release(name)
        with asked:
            assert asked.text() == oracle.completion(f"B{HALF_A_POOL}", TOKENS).text
    expect_poison_whole(cluster, oracle, decodes=1)


@contextmanager
def stopped_in_full_flight(way: Way) -> Iterator[tuple[Exchange, str]]:
    """A request, and the prefill node that stands still while it writes for it: it is let go half way through the
    prompt, and stopped. The first that is caught."""
    cluster = way.cluster
    for _ in range(TRIES):
        before = way.metric(COUNTED)
        with cluster.held(HALF_WAY, *PREFILLS) as gate:
            asked = cluster.ask(MANY_CHUNKS, TOKENS)
            name = gate.reached_first()
            gate.release(name)
            with cluster.paused(name):
                gate.release(*{*PREFILLS} - {name})
                Event().wait(SETTLED_S)
                if way.metric(COUNTED) - before < WRITES and way.metric("transfers"):
                    yield asked, name
                    return
        with asked:
            assert asked.status == 200
        cluster.wait_at_rest()
    raise AssertionError(f"no transfer was caught in {TRIES} tries")


@pytest.mark.parametrize("wakes", [True, False], ids=["wakes", "is killed"])
def test_a_writer_in_full_flight_that_stands_still_is_fenced_or_waited_for(
    way: Way, oracle: Oracle, wakes: bool
) -> None:
    """P02, P06, MX17, the paused-peer rule: where the fence holds against the living, its pages are free while it
    still sleeps. Where it does not, they are nobody's until it has answered, or is dead. Its request goes to the twin,
    with other pages."""
    cluster = way.cluster
    expected = oracle.completion(MANY_CHUNKS, TOKENS).text
    with invariants(cluster, *([] if wakes else PREFILLS)):
        with stopped_in_full_flight(way) as (asked, sleeping):
            with asked:
                body = asked.json()
            assert body["choices"][0]["text"] == expected
            assert (body["kvferry"]["attempts"], body["kvferry"]["prefill_node"] == sleeping) == (2, False)
            cluster.wait_forgotten(sleeping)
            if way.fences_the_living:
                assert (way.quarantined, way.lingering) == (0, 0)
            else:
                assert (way.quarantined, way.lingering) == (PAGES, 1)
            if not wakes:
                cluster.nodes[sleeping].process.kill()
        eventually(lambda: (way.quarantined, way.lingering) == (0, 0), "nothing is kept for it", RESOLVE_S)
        cluster.wait_at_rest()
    expect_poison_whole(cluster, oracle, decodes=1)
    if wakes:
        cluster.wait_ready(sleeping)
        with cluster.held("stream:tok=1", "router"):
            asked_again = [cluster.ask(f"{i} again", TOKENS) for i in range(2)]
        for i, exchange in enumerate(asked_again):
            with exchange:
                assert exchange.text() == oracle.completion(f"{i} again", TOKENS).text

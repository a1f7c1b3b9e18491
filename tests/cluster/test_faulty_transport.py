"""A prefill node whose transport fails: real processes, libfabric's own endpoints, and what a script makes of them."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event

import pytest

from tests.cluster.faulty_transport import Script
from tests.cluster.harness import PAGE, ProcessCluster
from tests.cluster.invariants import invariants
from tests.cluster.oracle import Oracle
from tests.cluster.test_books import cpu_ticks
from tests.cluster.waiting import eventually

pytestmark = pytest.mark.slow

LAYERS = 3
TOKENS = 8
PROMPT = "the prompt of a request whose writes do not all arrive; " * 2
BLOCKED_S = 2.0
LOST = 4
"""The exit code of a node one of whose threads died."""
NEVER_STARTED = 1
POSTED = "fabric_writes_posted_total"
RETRIED = "fabric_post_retries_total"

Play = Callable[[Script], None]


@pytest.fixture(scope="module")
def script_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("script") / "script.json"


@pytest.fixture(scope="module")
def faulty(standing: ProcessCluster, script_path: Path) -> Iterator[ProcessCluster]:
    """prefill-0 has a transport that listens to the script, and no way around the network."""
    standing.heal()
    Script().write(script_path)
    standing.replace_prefill("--no-same-host", script=script_path)
    yield standing
    if standing.nodes["prefill-0"].runs:
        standing.replace_prefill()


@pytest.fixture
def play(faulty: ProcessCluster, script_path: Path) -> Iterator[Play]:
    """Replaces the script, on a node that runs and knows both decode nodes."""
    Script().write(script_path)
    if not faulty.nodes["prefill-0"].runs:
        faulty.add("prefill", "prefill-0", "--no-same-host", script=script_path)
        faulty.wait_ready("prefill-0")
    if "prefill-1" in faulty.nodes:
        faulty.nodes.pop("prefill-1").process.kill()
    eventually(lambda: {m["instance"] for m in faulty.members()} == instances(faulty), "the dead are forgotten")
    yield lambda script: script.write(script_path)
    Script().write(script_path)


def instances(cluster: ProcessCluster) -> set[str | None]:
    return {node.instance for node in cluster.nodes.values()}


def writes_of(oracle: Oracle, prompt: str) -> int:
    return -(-(oracle.completion(prompt, 1).prompt_tokens - 1) // PAGE) * LAYERS


def stopped_after(cluster: ProcessCluster) -> int:
    """The number of posted writes that prefill-0 named last."""
    said = [line["posted"] for line in cluster.events("prefill-0") if line["event"] == "transfer stopped"]
    return int(said[-1])


def two_prefills(cluster: ProcessCluster) -> None:
    cluster.add("prefill", "prefill-1", "--no-same-host")
    cluster.wait_ready("prefill-1")


def test_a_batch_that_is_not_taken_is_said_by_message_and_the_node_stays(
    faulty: ProcessCluster, play: Play, oracle: Oracle
) -> None:
    """P05, P30 (post): layer 1 of the first chunk. The same node serves the second attempt."""
    play(Script(raise_in="write", raise_at=2))
    with invariants(faulty), faulty.ask(PROMPT, TOKENS) as asked:
        body = asked.json()
    assert body["choices"][0]["text"] == oracle.completion(PROMPT, TOKENS).text
    assert (body["kvferry"]["attempts"], body["kvferry"]["prefill_node"]) == (2, "prefill-0")
    assert faulty.metrics("prefill-0")["transfers_peers_lost_total"] == 0


@pytest.mark.parametrize("failing", ["first", "middle", "last"])
def test_a_write_that_is_not_posted_is_said_with_the_number_of_those_before_it(
    faulty: ProcessCluster, play: Play, oracle: Oracle, failing: str
) -> None:
    """P26, MX24."""
    writes = writes_of(oracle, PROMPT)
    post = {"first": 1, "middle": writes // 2, "last": writes}[failing]
    play(Script(fail_post=post))
    with invariants(faulty), faulty.ask(PROMPT, TOKENS) as asked:
        body = asked.json()
    assert body["choices"][0]["text"] == oracle.completion(PROMPT, TOKENS).text
    assert (body["kvferry"]["attempts"], body["kvferry"]["writes"]) == (2, writes)
    assert stopped_after(faulty) == post - 1


@pytest.mark.parametrize(("pages", "lost"), [(1, 1), (2, 6), (3, 5), (10, 30), (11, 1)])
def test_an_immediate_that_is_lost_is_never_made_up_for(
    faulty: ProcessCluster, play: Play, oracle: Oracle, pages: int, lost: int
) -> None:
    """P27, MX25: its bytes have landed. One short of the count, the pages are fenced and asked for again."""
    prompt = "z" * (pages * PAGE)
    assert writes_of(oracle, prompt) == pages * LAYERS
    play(Script(lose_immediate=lost))
    with invariants(faulty), faulty.ask(prompt, TOKENS) as asked:
        body = asked.json()
    assert body["choices"][0]["text"] == oracle.completion(prompt, TOKENS).text
    assert (body["kvferry"]["attempts"], body["kvferry"]["writes"]) == (2, pages * LAYERS)


def test_posts_that_find_the_provider_busy_are_repeated(faulty: ProcessCluster, play: Play, oracle: Oracle) -> None:
    """P28, MX23: every other one; each page is counted once."""
    before = faulty.metrics("prefill-0")
    play(Script(busy_share=0.5))
    with invariants(faulty), faulty.ask(PROMPT, TOKENS) as asked:
        body = asked.json()
    assert body["choices"][0]["text"] == oracle.completion(PROMPT, TOKENS).text
    assert (body["kvferry"]["attempts"], body["kvferry"]["writes"]) == (1, writes_of(oracle, PROMPT))

    def since(name: str) -> float:
        return faulty.metrics("prefill-0")[name] - before[name]

    eventually(lambda: since(POSTED) == writes_of(oracle, PROMPT), "the node's metrics, which lag, show its writes")
    assert since(RETRIED) > 0


def test_a_provider_that_takes_nothing_costs_time_and_hardly_any_processor(
    faulty: ProcessCluster, play: Play, oracle: Oracle
) -> None:
    """P28: for two seconds, in the middle of a transfer."""
    pid = faulty.pids()["prefill-0"]
    before = faulty.metrics("prefill-0")[RETRIED]
    play(Script(busy_from=5))
    with invariants(faulty), faulty.ask(PROMPT, TOKENS) as asked:
        eventually(lambda: faulty.metrics("prefill-0")[RETRIED] > before, "it is blocked")
        ticks = cpu_ticks(pid)
        Event().wait(BLOCKED_S)
        used = cpu_ticks(pid) - ticks
        play(Script())
        body = asked.json()
    assert body["choices"][0]["text"] == oracle.completion(PROMPT, TOKENS).text
    assert used < 0.5 * BLOCKED_S * os.sysconf("SC_CLK_TCK"), used


@pytest.mark.parametrize("method", ["progress", "close_endpoint"])
def test_a_messenger_that_cannot_go_on_ends_its_node_and_the_request_goes_elsewhere(
    faulty: ProcessCluster, play: Play, oracle: Oracle, method: str
) -> None:
    """P30 (poll, close): neither is one request's failure. A thread's death is the process's, in good order."""
    two_prefills(faulty)
    node = faulty.nodes["prefill-0"]
    with invariants(faulty, "prefill-0"):
        with faulty.held("xfer:layer=1", "prefill-0", "prefill-1") as gate:
            asked = [faulty.ask(PROMPT, TOKENS) for _ in range(2)]
            gate.reached("prefill-0")
            gate.reached("prefill-1")
            play(Script(raise_in=method, fail_post=1 if method == "close_endpoint" else 0))
            if method == "close_endpoint":
                gate.release("prefill-0")
            assert node.process.wait() == LOST
            assert "KV messenger thread ended; restart this node" in node.process.log.read_text()
        for exchange in asked:
            with exchange:
                assert exchange.text() == oracle.completion(PROMPT, TOKENS).text


@pytest.mark.parametrize(
    ("script", "moment"),
    [(Script(busy_from=9), "in the middle of a layer"), (Script(lose_immediate=21), "one immediate short of the end")],
    ids=["mid-layer", "last immediate"],
)
def test_a_node_that_is_killed_at_a_certain_write_costs_another_attempt(
    faulty: ProcessCluster, play: Play, oracle: Oracle, script: Script, moment: str
) -> None:
    """MX03, MX04: all that it posted before has landed, or lies in the kernel; a short count is never decoded."""
    two_prefills(faulty)
    assert writes_of(oracle, PROMPT) == 21
    play(script)

    def stands() -> bool:
        metrics, said = faulty.metrics("prefill-0"), [line["event"] for line in faulty.events("prefill-0")]
        return metrics[RETRIED] > 0 if script.busy_from else "transfer finished" in said[said_before:]

    said_before = len(faulty.events("prefill-0"))
    with invariants(faulty, "prefill-0"):
        asked = [faulty.ask(PROMPT, TOKENS) for _ in range(2)]
        eventually(stands, moment)
        faulty.nodes["prefill-0"].process.kill()
        bodies = []
        for exchange in asked:
            with exchange:
                bodies.append(exchange.json())
    assert [b["choices"][0]["text"] for b in bodies] == [oracle.completion(PROMPT, TOKENS).text] * 2
    assert sorted(b["kvferry"]["attempts"] for b in bodies) == [1, 2]
    assert {b["kvferry"]["prefill_node"] for b in bodies} == {"prefill-1"}


def test_memory_that_cannot_be_registered_ends_the_start_with_one_line(faulty: ProcessCluster, tmp_path: Path) -> None:
    """P29: the second region, refused by the NIC. It says what was asked and what to do, and is never ready."""
    script = tmp_path / "script.json"
    Script(fail_registration=2).write(script)
    node = faulty.add("decode", "decode-refused", "--no-same-host", "--context", "hidden", script=script)
    assert node.process.wait() == NEVER_STARTED
    (line,) = [line for line in node.process.log.read_text().splitlines() if line.startswith("kvferry decode: ")]
    assert "fi_mr_reg" in line and "bytes" in line and "ulimit -l" in line, line
    assert "decode-refused" not in {member["name"] for member in faulty.members()}
    del faulty.nodes["decode-refused"]

"""Clients that never rest, while a node of each kind is killed beside its twin."""

import json
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Semaphore

import pytest

from tests.cluster.exchange import DONE, text_of
from tests.cluster.harness import ProcessCluster
from tests.cluster.oracle import Oracle
from tests.cluster.waiting import DEADLINE_S

CLIENTS = 8
ROUNDS = 5
TOKENS = 16


def prompt_of(client: int) -> str:
    return f"client {client} " + "says the same again, and " * client


@dataclass(frozen=True)
class Outcome:
    """Of one request: its text, and the code of the error that ended it, or None."""

    client: int
    text: str
    error: str | None


def one_request(cluster: ProcessCluster, client: int) -> Outcome:
    """Every other client streams."""
    with cluster.ask(prompt_of(client), TOKENS, client % 2 == 1) as asked:
        if asked.status != 200 or client % 2 == 0:
            body = asked.json()
            error = body.get("error", {}).get("code")
            return Outcome(client, "" if error else body["choices"][0]["text"], error)
        *shown, last = asked.events()
        return Outcome(client, text_of(shown), None if last == DONE else json.loads(last)["error"]["code"])


def run_clients(cluster: ProcessCluster, victim: str) -> list[Outcome]:
    """The victim is killed once each client has had about one answer."""
    answered = Semaphore(0)

    def client(number: int) -> list[Outcome]:
        outcomes = []
        for _ in range(ROUNDS):
            outcomes.append(one_request(cluster, number))
            answered.release()
        return outcomes

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients: list[Future[list[Outcome]]] = [pool.submit(client, number) for number in range(CLIENTS)]
        for _ in range(CLIENTS):
            assert answered.acquire(timeout=DEADLINE_S)
        cluster.nodes[victim].process.kill()
        return [outcome for done in clients for outcome in done.result()]


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_only_streams_of_a_killed_decode_node_may_fail(cluster: ProcessCluster, oracle: Oracle, victim: str) -> None:
    """P22, I1, I5: no wrong token, every request one outcome, and a prefill node's death costs none."""
    cluster.add("prefill", "prefill-1")
    cluster.wait_ready("prefill-1")
    expected = [oracle.completion(prompt_of(number), TOKENS).text for number in range(CLIENTS)]
    outcomes = run_clients(cluster, victim)
    assert len(outcomes) == CLIENTS * ROUNDS
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    assert all(o.text == expected[o.client] for o in outcomes if o.error is None)
    if victim == "prefill-0":
        assert failed == []
    assert all(o.error == "node_lost" and o.client % 2 == 1 for o in failed)
    assert all(o.text and expected[o.client].startswith(o.text) for o in failed)
    assert len({o.client for o in failed}) == len(failed)

"""The status pages over real HTTP: what they answer, and to what they do not."""

import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from protocol.node_pages import NodeView, node_pages
from protocol.status_http import StatusServer

DEADLINE_S = 10.0


@dataclass
class Counts:
    accepted: int = 3
    bytes: int = 1 << 40


@dataclass
class Shown:
    """A node's state, to be changed by the test."""

    unhealthy: str | None = None
    unready: str | None = None
    gauges: dict[str, float] = field(default_factory=lambda: {"pages_free": 7.0})
    counts: Counts = field(default_factory=Counts)
    pages: list[dict[str, object]] = field(default_factory=lambda: [{"block": 0, "state": "free"}])

    def view(self) -> NodeView:
        return NodeView(
            lambda: self.unhealthy,
            lambda: self.unready,
            lambda: self.gauges,
            lambda: {"transfers": self.counts},
            lambda: self.pages,
        )


@pytest.fixture
def shown() -> Shown:
    return Shown()


@pytest.fixture
def server(shown: Shown) -> Iterator[StatusServer]:
    made = StatusServer("127.0.0.1", 0, node_pages(shown.view()))
    made.start()
    yield made
    made.close()


def ask(server: StatusServer, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(server.address).netloc, timeout=DEADLINE_S)
    connection.request(method, path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/debug/pages", "/health?verbose=1"])
def test_each_page_answers(server: StatusServer, path: str) -> None:
    assert ask(server, path)[0] == 200


def test_an_unknown_page_is_a_404_that_names_those_there_are(server: StatusServer) -> None:
    status, body = ask(server, "/nothing")
    assert status == 404 and json.loads(body)["pages"] == ["/debug/pages", "/health", "/metrics", "/ready"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "NONSENSE"])
def test_nothing_but_get_is_answered_and_the_server_lives_on(server: StatusServer, method: str) -> None:
    assert ask(server, "/health", method)[0] in (405, 501)
    assert ask(server, "/health")[0] == 200


def test_an_unhealthy_node_is_not_ready_either(server: StatusServer, shown: Shown) -> None:
    shown.unhealthy = "engine thread ended"
    for path in ("/health", "/ready"):
        status, body = ask(server, path)
        assert status == 503 and json.loads(body)["reason"] == "engine thread ended"
    shown.unhealthy = None
    assert ask(server, "/health")[0] == 200


def test_a_node_that_is_not_registered_is_healthy_but_not_ready(server: StatusServer, shown: Shown) -> None:
    shown.unready = "not registered with a router"
    assert ask(server, "/health")[0] == 200
    assert ask(server, "/ready")[0] == 503


def test_metrics_are_what_prometheus_reads_and_the_nodes_own_numbers(server: StatusServer, shown: Shown) -> None:
    for accepted in (3, 4):
        shown.counts.accepted = accepted
        families = {f.name: f for f in text_string_to_metric_families(ask(server, "/metrics")[1].decode())}
        values = {sample.name: sample.value for family in families.values() for sample in family.samples}
        assert values == {
            "kvferry_pages_free": 7.0,
            "kvferry_transfers_accepted_total": accepted,
            "kvferry_transfers_bytes_total": float(1 << 40),
        }
        assert families["kvferry_pages_free"].type == "gauge"
        assert "cached prefixes included" in families["kvferry_pages_free"].documentation
        assert families["kvferry_transfers_accepted"].type == "counter"


def test_the_page_ledger_is_json(server: StatusServer, shown: Shown) -> None:
    assert json.loads(ask(server, "/debug/pages")[1]) == shown.pages


def test_a_client_that_says_nothing_keeps_nobody_waiting(server: StatusServer) -> None:
    where = urlsplit(server.address)
    with socket.create_connection((where.hostname or "", where.port or 0), DEADLINE_S):
        assert ask(server, "/health")[0] == 200


def test_a_port_that_is_taken_is_said_at_the_start(server: StatusServer) -> None:
    second = StatusServer("127.0.0.1", urlsplit(server.address).port or 0, {})
    with pytest.raises(OSError, match="in use"):
        second.start()
    second.close()


def test_close_ends_it_and_may_be_called_again(shown: Shown) -> None:
    server = StatusServer("127.0.0.1", 0, node_pages(shown.view()))
    server.start()
    where = urlsplit(server.address)
    server.close()
    server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((where.hostname or "", where.port or 0), DEADLINE_S)

"""Who has no cluster key is not heard, and nothing that arrives on any port ends a process."""

import random
import socket
from collections.abc import Iterator

import psutil
import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from protocol.codec import encode
from protocol.curve import new_cluster_key, read_cluster_key
from protocol.messages import Ping
from tests.cluster.harness import ProcessCluster
from tests.cluster.oracle import Oracle

PROMPT = "a prompt after whatever that was"
DEADLINE_MS = 30_000
GARBAGE = [1, 64, 4096, 1 << 16]


@pytest.fixture
def stranger() -> Iterator["zmq.Socket[bytes]"]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    opened = context.socket(zmq.DEALER)
    opened.linger = 0
    yield opened
    opened.disable_monitor()
    opened.close()
    context.term()


@pytest.mark.parametrize("listener", ["router", "prefill-0"])
def test_a_foreign_key_is_turned_away_at_the_handshake(
    cluster: ProcessCluster, stranger: "zmq.Socket[bytes]", listener: str
) -> None:
    """P47: the server's key is no secret; the stranger's own is not on the list."""
    address = cluster.nodes_address if listener == "router" else cluster.control_address(listener)
    members = {member["instance"] for member in cluster.members()}
    before = frames_read(cluster, listener)
    foreign = new_cluster_key()
    stranger.curve_serverkey = read_cluster_key(cluster.key).public
    stranger.curve_publickey, stranger.curve_secretkey = foreign.public, foreign.secret
    monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    stranger.connect(address)
    stranger.send(encode(Ping(instance="stranger")), zmq.NOBLOCK)
    assert monitor.poll(DEADLINE_MS)
    assert parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    monitor.close()
    assert {member["instance"] for member in cluster.members()} == members
    assert frames_read(cluster, listener) == before


def test_random_bytes_on_every_port_harm_nobody(cluster: ProcessCluster, oracle: Oracle, seed: int) -> None:
    """P47: control, data and status ports alike."""
    rng, pids = random.Random(seed), cluster.pids()
    for name, pid in pids.items():
        ports = {found.laddr.port for found in psutil.Process(pid).net_connections("tcp") if found.status == "LISTEN"}
        assert ports, name
        for port in sorted(ports):
            for length in GARBAGE:
                throw(port, rng.randbytes(length))
    with cluster.ask(PROMPT, 8) as asked:
        assert asked.text() == oracle.completion(PROMPT, 8).text
    assert cluster.pids() == pids
    cluster.wait_at_rest()


def throw(port: int, data: bytes) -> None:
    """Send, and go; the other side may hang up first."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        try:
            connection.sendall(data)
        except ConnectionError:
            return


def frames_read(cluster: ProcessCluster, name: str) -> float:
    """Frames of peers that are not members or of an unknown kind."""
    metrics = cluster.metrics(name)
    found = [value for metric, value in metrics.items() if "frames_dropped_total" in metric or "bad_frames" in metric]
    return sum(found)

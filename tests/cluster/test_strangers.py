"""Who has no cluster key is not heard, and nothing that arrives on any port ends a process."""

import random
import socket
from collections.abc import Iterator
from itertools import product

import psutil
import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from protocol.codec import encode
from protocol.curve import new_cluster_key, read_cluster_key
from protocol.messages import Ping
from tests.cluster.harness import ProcessCluster
from tests.cluster.oracle import Oracle
from tests.cluster.waiting import eventually

PROMPT = "a prompt after whatever that was"
DEADLINE_MS = 30_000
FRAMES = 2000
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
    members = {member["instance"] for member in cluster.members()}
    before = frames_read(cluster, listener)
    foreign = new_cluster_key()
    stranger.curve_serverkey = read_cluster_key(cluster.key).public
    stranger.curve_publickey, stranger.curve_secretkey = foreign.public, foreign.secret
    monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
    stranger.connect(control_address(cluster, listener))
    stranger.send(encode(Ping(instance="stranger")), zmq.NOBLOCK)
    assert monitor.poll(DEADLINE_MS)
    assert parse_monitor_message(monitor.recv_multipart())["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    monitor.close()
    assert {member["instance"] for member in cluster.members()} == members
    assert frames_read(cluster, listener) == before


@pytest.mark.parametrize("listener", ["router", "prefill-0"])
def test_frames_that_are_no_messages_are_counted_and_dropped(
    cluster: ProcessCluster, oracle: Oracle, stranger: "zmq.Socket[bytes]", listener: str, seed: int
) -> None:
    """P47: from one who has the key. Random bytes, and messages cut short."""
    rng, pids, before = random.Random(seed), cluster.pids(), frames_read(cluster, listener)
    read_cluster_key(cluster.key).secure_client(stranger)
    stranger.sndtimeo = DEADLINE_MS
    stranger.connect(control_address(cluster, listener))
    whole = encode(Ping(instance="stranger"))
    for _ in range(FRAMES):
        stranger.send(rng.randbytes(rng.randrange(200)) if rng.random() < 0.5 else whole[: rng.randrange(len(whole))])
    eventually(lambda: frames_read(cluster, listener) == before + FRAMES, "every frame is counted")
    with cluster.ask(PROMPT, 8) as asked:
        assert asked.text() == oracle.completion(PROMPT, 8).text
    assert cluster.pids() == pids


def test_random_bytes_on_every_port_harm_nobody(cluster: ProcessCluster, oracle: Oracle, seed: int) -> None:
    """P47: control, data and status ports alike, while a transfer stands between two layers."""
    rng, pids = random.Random(seed), cluster.pids()
    with cluster.held("xfer:layer=1", "prefill-0") as gate:
        asked = cluster.ask(PROMPT, 8)
        gate.reached("prefill-0")
        for name, pid in pids.items():
            ports = listening_ports(pid)
            assert ports, name
            for port, length in product(sorted(ports), GARBAGE):
                throw(port, rng.randbytes(length))
    with asked:
        assert asked.text() == oracle.completion(PROMPT, 8).text
    assert cluster.pids() == pids
    cluster.wait_at_rest()


def listening_ports(pid: int) -> set[int]:
    """All of them on the loopback interface."""
    found = [one for one in psutil.Process(pid).net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert {one.laddr.ip for one in found} == {"127.0.0.1"}
    return {one.laddr.port for one in found}


def control_address(cluster: ProcessCluster, name: str) -> str:
    return cluster.nodes_address if name == "router" else cluster.control_address(name)


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

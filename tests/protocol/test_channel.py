"""Real sockets: who may talk, what a stalled or babbling peer can do, and that nothing blocks."""

import os
import queue
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from protocol import channel
from protocol.channel import ControlThread, Link
from protocol.codec import decode, encode
from protocol.curve import ClusterKey, ClusterKeyError, new_cluster_key, read_cluster_key, write_cluster_key
from protocol.messages import FromDecode, Nack, Ping, Pong, ToDecode

DEADLINE_S = 10.0


class Node:
    """A control thread whose received messages are a queue."""

    def __init__(self, key: ClusterKey, identity: str, high_water_mark: int = 1000) -> None:
        self.received: queue.Queue[tuple[bytes, Any]] = queue.Queue()
        self.ticks = threading.Semaphore(0)
        self.control = ControlThread(key, identity, self.ticks.release, high_water_mark)

    def on_message(self, link: Link, sender: bytes, message: Any) -> None:
        self.received.put((sender, message))

    def next(self) -> tuple[bytes, Any]:
        return self.received.get(timeout=DEADLINE_S)


@pytest.fixture
def key() -> ClusterKey:
    return new_cluster_key()


@pytest.fixture
def server(key: ClusterKey) -> Iterator[tuple[Node, Link, str]]:
    node = Node(key, "server")
    link, address = node.control.bind("tcp://127.0.0.1:*", FromDecode, node.on_message)
    node.control.start()
    yield node, link, address
    node.control.close()


@pytest.fixture
def client(key: ClusterKey) -> Iterator[Node]:
    node = Node(key, "client")
    node.control.start()
    yield node
    node.control.close()


def dial(node: Node, address: str) -> Link:
    links: queue.Queue[Link] = queue.Queue()
    node.control.post(lambda: links.put(node.control.dial(address, ToDecode, node.on_message)))
    return links.get(timeout=DEADLINE_S)


def test_peers_with_the_cluster_key_talk_both_ways(server: tuple[Node, Link, str], client: Node) -> None:
    node, link, address = server
    up = dial(client, address)
    client.control.send(up, Ping(instance="client"))
    assert node.next() == (b"client", Ping(instance="client"))
    node.control.send(link, Pong(instance="server"), b"client")
    assert client.next() == (b"", Pong(instance="server"))


def test_a_foreign_key_gets_nothing_through(server: tuple[Node, Link, str], client: Node, key: ClusterKey) -> None:
    node, _, address = server
    stranger = Node(new_cluster_key(), "stranger")
    mixed_secret = new_cluster_key()
    half = Node(ClusterKey(key.public, mixed_secret.secret), "half")
    for outsider in (stranger, half):
        outsider.control.start()
        outsider.control.send(dial(outsider, address), Ping(instance="outsider"))
    client.control.send(dial(client, address), Ping(instance="client"))
    assert node.next() == (b"client", Ping(instance="client"))
    for outsider in (stranger, half):
        outsider.control.close()
    assert node.received.empty()


def test_a_valid_pair_that_is_not_on_the_allow_list_is_refused(server: tuple[Node, Link, str], key: ClusterKey) -> None:
    """It knows the server's public key and holds a genuine key pair of its own: only the allow-list stops it."""
    node, _, address = server
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket, socket.get_monitor_socket() as monitor:
        public, secret = zmq.curve_keypair()
        socket.curve_serverkey = key.public
        socket.curve_publickey, socket.curve_secretkey = public, secret
        socket.linger = 0
        socket.connect(address)
        socket.send(encode(Ping(instance="outsider")))
        refused = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        while True:
            assert monitor.poll(int(DEADLINE_S * 1000))
            event = parse_monitor_message(monitor.recv_multipart())["event"]
            assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event & refused:
                break
        socket.disable_monitor()
    assert node.received.empty() and node.control.counters.received == 0


def test_bad_frames_are_counted_answered_and_survived(server: tuple[Node, Link, str], key: ClusterKey) -> None:
    node, _, address = server
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        key.secure_client(socket)
        socket.linger = 0
        socket.connect(address)
        for _ in range(500):
            socket.send(os.urandom(40))
        socket.send(encode(Pong(instance="not for this channel")))
        assert socket.poll(int(DEADLINE_S * 1000))
        assert isinstance(decode(socket.recv(), ToDecode), Nack)
        socket.send(encode(Ping(instance="still there")))
        assert node.next()[1] == Ping(instance="still there")
    assert node.control.counters.bad_frames == 501 and node.control.alive


def test_a_peer_that_never_reads_blocks_nobody(key: ClusterKey) -> None:
    """Its queue fills, sends to it are counted as lost, others are served."""
    node = Node(key, "server", high_water_mark=10)
    link, address = node.control.bind("tcp://127.0.0.1:*", FromDecode, node.on_message)
    node.control.start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stalled:
        key.secure_client(stalled)
        stalled.routing_id, stalled.linger, stalled.rcvhwm = b"stalled", 0, 1
        stalled.connect(address)
        stalled.send(encode(Ping(instance="stalled")))
        node.next()
        big = Pong(instance="x" * 200)
        while node.control.counters.unsent == 0:
            done = threading.Event()
            for _ in range(1000):
                node.control.send(link, big, b"stalled")
            node.control.post(done.set)
            assert done.wait(DEADLINE_S)
        with context.socket(zmq.DEALER) as other:
            key.secure_client(other)
            other.linger = 0
            other.connect(address)
            other.send(encode(Ping(instance="other")))
            assert node.next()[1] == Ping(instance="other")
    node.control.close()


def test_a_send_to_an_unknown_peer_is_counted_not_raised(server: tuple[Node, Link, str]) -> None:
    node, link, _ = server
    node.control.send(link, Pong(instance="x"), b"nobody")
    assert node.ticks.acquire(timeout=DEADLINE_S)
    assert node.control.counters.unsent == 1 and node.control.alive


def test_the_key_file_is_private_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    write_cluster_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_cluster_key(path).public
    with pytest.raises(FileExistsError):
        write_cluster_key(path)
    path.chmod(0o644)
    with pytest.raises(ClusterKeyError, match="chmod 600"):
        read_cluster_key(path)
    with pytest.raises(ClusterKeyError, match="cannot read"):
        read_cluster_key(tmp_path / "missing")


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"public": 1, "secret": 2}', '{"public": "a", "secret": "b"}'])
def test_a_malformed_key_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.key"
    path.touch(0o600)
    path.write_text(text)
    with pytest.raises(ClusterKeyError):
        read_cluster_key(path)


def test_a_key_pair_that_does_not_match_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    path.touch(0o600)
    one, other = new_cluster_key(), new_cluster_key()
    path.write_text(f'{{"public": "{one.public.decode()}", "secret": "{other.secret.decode()}"}}')
    with pytest.raises(ClusterKeyError, match="belong together"):
        read_cluster_key(path)


def test_ticks_missed_in_a_pause_are_not_made_up_for(key: ClusterKey, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a node that stood still counts as many heartbeats without an answer at once, and gives up its router."""
    tick_s = 0.05
    monkeypatch.setattr(channel, "TICK_S", tick_s)
    ticks: queue.Queue[float] = queue.Queue()
    control = ControlThread(key, "paused", lambda: ticks.put(time.monotonic()))
    control.post(lambda: pause(5 * tick_s))
    control.start()
    times = [ticks.get(timeout=DEADLINE_S) for _ in range(5)]
    control.close()
    assert all(later - earlier > 0.9 * tick_s for earlier, later in pairwise(times))


def pause(seconds: float) -> None:
    """Nobody sets the event: the thread stands still."""
    threading.Event().wait(seconds)

"""Pause points: held, reached and released over the unix socket; open and free without the switch."""

import asyncio
import socket
import threading
from pathlib import Path

import pytest

from protocol.gates import GateClient, Gates

DEADLINE_S = 10.0


def test_a_thread_waits_at_a_held_gate_until_it_is_released(tmp_path: Path) -> None:
    gates = Gates(str(tmp_path / "gates"))
    gates.start()
    client = GateClient(str(tmp_path / "gates"))
    client.hold("decode:join")
    passed = threading.Event()

    def pass_through() -> None:
        gates.wait("decode:join")
        passed.set()

    thread = threading.Thread(target=pass_through)
    thread.start()
    assert client.reached("decode:join", DEADLINE_S) and not passed.is_set()
    client.release("decode:join")
    assert passed.wait(DEADLINE_S)
    thread.join()
    client.close()
    gates.close()
    assert not (tmp_path / "gates").exists()


def test_one_that_stands_there_is_found_by_whoever_holds_the_gate_next(tmp_path: Path) -> None:
    """Also where it did not get to go on in between."""
    gates = Gates(str(tmp_path / "gates"))
    gates.start()
    client = GateClient(str(tmp_path / "gates"))
    client.hold("decode:join")
    stopped = threading.Event()

    def pass_again_and_again() -> None:
        while not stopped.is_set():
            gates.wait("decode:join")

    thread = threading.Thread(target=pass_again_and_again, daemon=True)
    thread.start()
    for _ in range(100):
        client.release("decode:join")
        client.hold("decode:join")
        assert client.reached("decode:join", DEADLINE_S)
    stopped.set()
    client.release("decode:join")
    thread.join()
    client.close()
    gates.close()


def test_held_never_blocks_and_release_tells_listeners(tmp_path: Path) -> None:
    gates = Gates(str(tmp_path / "gates"))
    released = threading.Event()
    gates.on_release(released.set)
    gates.start()
    client = GateClient(str(tmp_path / "gates"))
    assert not gates.held("xfer:layer=1")
    client.hold("xfer:layer=1")
    assert gates.held("xfer:layer=1") and not gates.held("xfer:layer=2")
    client.release("xfer:layer=1")
    assert released.wait(DEADLINE_S) and not gates.held("xfer:layer=1")
    client.close()
    gates.close()


def test_a_coroutine_waits_without_blocking_its_loop(tmp_path: Path) -> None:
    gates = Gates(str(tmp_path / "gates"))
    gates.start()
    client = GateClient(str(tmp_path / "gates"))
    client.hold("stream:tok=5")

    async def scenario() -> None:
        waiting = asyncio.create_task(gates.wait_async("stream:tok=5"))
        assert await asyncio.to_thread(client.reached, "stream:tok=5", DEADLINE_S)
        assert not waiting.done()
        await asyncio.to_thread(client.release, "stream:tok=5")
        await asyncio.wait_for(waiting, DEADLINE_S)

    asyncio.run(scenario())
    client.close()
    gates.close()


def test_nobody_at_the_gate_is_reported_as_such(tmp_path: Path) -> None:
    gates = Gates(str(tmp_path / "gates"))
    gates.start()
    client = GateClient(str(tmp_path / "gates"))
    client.hold("queued")
    assert not client.reached("queued", 0.05)
    client.close()
    gates.close()


def test_without_the_switch_every_gate_is_open() -> None:
    gates = Gates()
    gates.start()
    assert not gates.held("anything")
    gates.wait("anything")
    gates.close()


def test_a_client_closes_although_the_process_has_gone(tmp_path: Path) -> None:
    path = str(tmp_path / "gates")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        client = GateClient(path)
        listener.accept()[0].close()
    with pytest.raises(ConnectionError):
        client.release("queued")
    client.close()

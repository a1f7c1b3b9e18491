"""A peer that is killed: every batch to it ends with the reason, and its successor is reached over a new landing."""

import numpy as np

from fabric.api import EndpointFailed, PageWrites, Sending, WritesEnded, WritesFailed
from fabric.immediates import pack
from fabric.libfabric import open_engine
from fabric.limits import Limits
from fabric.simulated import SimulatedEngine, SimulatedNetwork
from tests.fabric.child import TargetProcess
from tests.fabric.party import NOWHERE, Party, drive, pages

PAGE = 64 << 10
ALL = list(range((4 << 20) // PAGE))


def keep_writing(party: Party, sending: Sending, batch: PageWrites) -> None:
    """Until the batch that fails."""

    def failed() -> bool:
        if party.engine.gauges().outstanding == 0 and not party.of(WritesFailed):
            party.engine.write(sending, batch)
        return bool(party.of(EndpointFailed))

    drive(party, until=failed)


def test_a_killed_target_fails_its_writes_and_its_successor_is_reached(way: str) -> None:
    engine = open_engine(way)
    sender = Party(engine)
    _, region = sender.memory(4 << 20)
    with TargetProcess(way) as target:
        sending = engine.connect("target", target.address)
        for _ in range(2):
            engine.write(sending, pages(region, target.remote, ALL, PAGE, pack(1, 1)))
        drive(sender, until=lambda: bool(sender.of(WritesEnded)))
        target.kill()  # while the second batch is on its way
        keep_writing(sender, sending, pages(region, target.remote, ALL, PAGE, pack(1, 1)))
        drive(sender, until=lambda: engine.gauges().outstanding == 0)
    failed = {event.handle for event in sender.of(WritesFailed)}
    assert failed and all(event.error for event in sender.of(WritesEnded) if event.handle in failed)
    (broken,) = sender.of(EndpointFailed)
    assert broken.endpoint == sending.id and broken.peer == "target" and broken.error.code
    engine.close_endpoint(sending)
    sender.events.clear()
    with TargetProcess(way) as successor:
        again = engine.connect("target", successor.address)
        handle = engine.write(again, pages(region, successor.remote, ALL, PAGE, pack(1, 2)))
        drive(sender, until=lambda: any(event.handle == handle for event in sender.of(WritesEnded)))
    (written,) = (event for event in sender.of(WritesEnded) if event.handle == handle)  # late ones are of the first
    assert written.error is None
    engine.close()


def test_armed_batches_to_a_killed_target_fail_too(way: str) -> None:
    engine = open_engine(way)
    sender, word = Party(engine), np.zeros(1, np.uint64)
    _, region = sender.memory(4 << 20)
    with TargetProcess(way) as target:
        sending = engine.connect("target", target.address)
        armed = engine.write_when(sending, word.ctypes.data, 1, pages(region, target.remote, ALL, PAGE, 1))
        engine.write(sending, pages(region, target.remote, ALL, PAGE, 1))
        drive(sender, until=lambda: bool(sender.of(WritesEnded)))
        target.kill()
        keep_writing(sender, sending, pages(region, target.remote, ALL, PAGE, 1))
    drive(sender, until=lambda: any(event.handle == armed for event in sender.of(WritesEnded)))
    assert next(event for event in sender.of(WritesFailed) if event.handle == armed).posted == 0
    engine.close()


def test_a_peer_that_was_never_there_is_given_up(way: str) -> None:
    gone = open_engine(way)
    address = gone.open_landing("nobody").address
    gone.close()
    engine = open_engine(way, limits=Limits(connect_seconds=0.3))
    sender = Party(engine)
    _, region = sender.memory(PAGE)
    engine.write(engine.connect("gone", address), pages(region, NOWHERE, [0], PAGE, 1))
    drive(sender, until=lambda: bool(sender.of(EndpointFailed)) and bool(sender.of(WritesEnded)))
    assert len(sender.of(WritesFailed)) == 1 and sender.of(WritesEnded)[0].error
    engine.close()


def test_a_killed_simulated_engine_behaves_like_a_killed_process() -> None:
    network = SimulatedNetwork(seed=3)
    engines = [SimulatedEngine(network, name) for name in ("sender", "target")]
    sender, target = map(Party, engines)
    _, region = sender.memory(4 << 20)
    memory, remote = target.memory(4 << 20, fill=0)
    sending = engines[0].connect("target", engines[1].open_landing("sender").address)
    network.kill(engines[1])
    engines[0].write(sending, pages(region, remote.remote, ALL, PAGE, 1))
    drive(sender, target, until=lambda: bool(sender.of(EndpointFailed)) and bool(sender.of(WritesEnded)))
    assert sender.of(WritesEnded)[0].completed == 0 and not memory.any()

"""What only the simulated network can be told to do: each fault has its one visible consequence."""

import threading

import numpy as np
import pytest

from fabric.api import Arrived, EndpointFailed, Event, PageWrites, RailInDoubt, WritesEnded, WritesFailed
from fabric.errors import EndpointClosed, FenceFailed
from fabric.immediates import pack
from fabric.simulated import Faults, SimulatedEngine, SimulatedNetwork
from tests.fabric.conftest import SEED, Link, SimulatedFabric
from tests.fabric.party import drive, pages, settle

PAGE = 256
COUNT = 64
IMMEDIATE = pack(3, 1)


def link_with(faults: Faults) -> Link:
    return Link(SimulatedFabric(faults), size=COUNT * PAGE)


def everything(link: Link, immediate: int = IMMEDIATE) -> PageWrites:
    return pages(link.source_region, link.target_region.remote, list(range(COUNT)), PAGE, immediate)


def arrived_pages(link: Link) -> list[int]:
    return [i for i in range(COUNT) if link.target[i * PAGE : (i + 1) * PAGE].any()]


def landing_order(seed: int) -> list[int]:
    """The order in which the pages of one batch land."""
    network = SimulatedNetwork(seed, Faults(reorder=True, max_delay=20))
    fabric = SimulatedFabric(Faults())
    fabric.network = network
    link = Link(fabric, size=COUNT * PAGE)
    link.sender.engine.write(link.sending, everything(link))
    order: list[int] = []
    while len(order) < COUNT:
        for party in link.both:
            party.engine.progress(0)
        order += [page for page in arrived_pages(link) if page not in order]
    return order


def test_the_same_seed_lands_in_the_same_order_and_another_in_another() -> None:
    assert landing_order(1) == landing_order(1)
    assert landing_order(1) != landing_order(2)


def test_reordering_is_real() -> None:
    """Some later page has landed while an earlier one has not."""
    link = link_with(Faults(reorder=True, max_delay=50))
    link.sender.engine.write(link.sending, everything(link))
    for _ in range(1000):
        link.sender.engine.progress(0)
        landed = arrived_pages(link)
        if landed and landed != list(range(len(landed))):
            return
    pytest.fail(f"in order, seed {SEED}")


def test_a_source_that_is_reused_too_early_is_corrupted_as_by_a_nic() -> None:
    link = link_with(Faults())
    assert isinstance(link.receiver.engine, SimulatedEngine)
    link.fabric.stall(link.receiver)
    link.sender.engine.write(link.sending, everything(link))
    settle(link.sender)
    link.source[:] = 7
    link.fabric.resume(link.receiver)
    drive(*link.both, until=lambda: bool(link.sender.events))
    assert (link.target == 7).all()


def test_a_delayed_write_lands_late_where_nobody_fenced() -> None:
    """The proof that a missing fence would be seen: the sender is killed, its write arrives all the same."""
    link = link_with(Faults())
    assert isinstance(link.sender.engine, SimulatedEngine) and link.fabric.network
    link.fabric.stall(link.receiver)
    link.sender.engine.write(link.sending, everything(link))
    settle(link.sender)
    link.fabric.network.kill(link.sender.engine)
    link.source[:] = 0  # the dead process's memory is gone, the bytes are on the wire
    link.fabric.resume(link.receiver)
    settle(link.receiver)
    assert len(arrived_pages(link)) == COUNT
    assert link.receiver.engine.counters().stale_immediates == COUNT


def test_a_fence_that_failed_holds_nothing_back_and_says_so() -> None:
    link = link_with(Faults(fail_fence=1))
    engine = link.receiver.engine
    engine.expect(link.landing, IMMEDIATE, COUNT)
    link.fabric.stall(link.receiver)
    link.sender.engine.write(link.sending, everything(link))
    settle(link.sender)
    with pytest.raises(FenceFailed, match="to sender is not closed"):
        engine.close_endpoint(link.landing)
    with pytest.raises(EndpointClosed):
        engine.close_endpoint(link.landing)
    assert (engine.gauges().endpoints, engine.gauges().expectations) == (1, 0)
    link.fabric.resume(link.receiver)
    settle(link.receiver)
    assert len(arrived_pages(link)) == COUNT and engine.counters().stale_immediates == COUNT


def test_an_engine_whose_fence_failed_is_closed_all_the_same() -> None:
    link = link_with(Faults(fail_fence=2))
    link.receiver.engine.open_landing("other")
    with pytest.raises(FenceFailed):
        link.receiver.engine.close()
    link.receiver.engine.close()
    link.sender.engine.write(link.sending, everything(link))
    drive(link.sender, until=lambda: bool(link.sender.of(WritesEnded)))
    assert link.sender.of(WritesEnded)[0].completed == 0 and arrived_pages(link) == []


def test_the_fence_holds_against_the_same_late_write() -> None:
    link = link_with(Faults())
    assert isinstance(link.sender.engine, SimulatedEngine) and link.fabric.network
    link.fabric.stall(link.receiver)
    link.sender.engine.write(link.sending, everything(link))
    settle(link.sender)
    link.fabric.network.kill(link.sender.engine)
    link.receiver.engine.close_endpoint(link.landing)
    link.fabric.resume(link.receiver)
    settle(link.receiver)
    assert arrived_pages(link) == [] and link.fabric.network.in_flight == 0


def test_busy_posts_are_retried_until_all_are_posted() -> None:
    link = link_with(Faults(busy_share=0.5, busy_burst=4))
    link.sender.engine.write(link.sending, everything(link))
    drive(*link.both, until=lambda: bool(link.sender.events))
    assert link.sender.of(WritesEnded)[0].completed == COUNT
    assert link.sender.engine.counters().post_retries >= COUNT // 4
    assert np.array_equal(link.target, link.source)


def test_a_failed_post_fails_the_batch_at_that_write() -> None:
    link = link_with(Faults(fail_post=11))
    handle = link.sender.engine.write(link.sending, everything(link))
    drive(*link.both, until=lambda: bool(link.sender.of(WritesEnded)))
    (failed,), (ended,) = link.sender.of(WritesFailed), link.sender.of(WritesEnded)
    assert (failed.handle, failed.posted) == (handle, 10)
    assert (ended.posted, ended.completed, ended.error) == (10, 10, failed.error)
    assert len(link.sender.of(EndpointFailed)) == 1
    assert arrived_pages(link) == list(range(10))


@pytest.mark.parametrize("seed", range(4))
def test_a_failed_completion_fails_the_batch_whether_it_landed_or_not(seed: int) -> None:
    fabric = SimulatedFabric(Faults())
    fabric.network = SimulatedNetwork(seed, Faults(fail_completion=5))
    link = Link(fabric, size=COUNT * PAGE)
    link.sender.engine.write(link.sending, everything(link))
    drive(*link.both, until=lambda: bool(link.sender.of(WritesEnded)))
    (ended,) = link.sender.of(WritesEnded)
    assert ended.error and ended.completed == ended.posted - 1
    assert len(arrived_pages(link)) in (ended.completed, ended.posted)


def test_a_lost_immediate_leaves_the_count_short_with_all_bytes_there() -> None:
    link = link_with(Faults(drop_immediate=20))
    expectation = link.receiver.engine.expect(link.landing, IMMEDIATE, COUNT)
    link.sender.engine.write(link.sending, everything(link))
    drive(*link.both, until=lambda: bool(link.sender.events))
    settle(*link.both)
    assert link.receiver.events == [] and link.receiver.engine.counted(expectation) == COUNT - 1
    assert np.array_equal(link.target, link.source)


def test_only_an_ended_generation_is_repeated_and_only_its_immediate() -> None:
    link = link_with(Faults(stale_duplicates=1))
    engine = link.receiver.engine
    expectation = engine.expect(link.landing, IMMEDIATE, COUNT)
    link.sender.engine.write(link.sending, everything(link))
    drive(*link.both, until=lambda: bool(link.receiver.of(Arrived)) and bool(link.sender.events))
    settle(*link.both)
    assert engine.counters().stale_immediates == 0
    engine.forget(expectation)
    link.target[:] = 0
    successor = engine.expect(link.landing, IMMEDIATE + 1, 1)
    settle(*link.both)
    assert engine.counters().stale_immediates == 1
    assert engine.counted(successor) == 0 and not link.target.any()


def test_engines_run_in_threads_of_their_own() -> None:
    """Two pumps that block in `progress`, and a third thread that feeds one of them through `wake`."""
    link = link_with(Faults(reorder=True, max_delay=30, busy_share=0.2, busy_burst=2))
    rounds, stop = 20, threading.Event()
    feed: list[PageWrites] = [everything(link, pack(slot, 1)) for slot in range(rounds)]
    for slot in range(rounds):
        link.receiver.engine.expect(link.landing, pack(slot, 1), COUNT)
    seen: dict[str, list[Event]] = {"sender": [], "receiver": []}

    def send() -> None:
        while not stop.is_set():
            if feed:
                link.sender.engine.write(link.sending, feed.pop())
            seen["sender"] += link.sender.engine.progress(10.0)

    def receive() -> None:
        while len(seen["receiver"]) < rounds:
            seen["receiver"] += link.receiver.engine.progress(10.0)

    threads = [threading.Thread(target=send), threading.Thread(target=receive)]
    for thread in threads:
        thread.start()
    while threads[1].is_alive():
        link.sender.engine.wake()
        threads[1].join(0.01)
    stop.set()
    link.sender.engine.wake()
    threads[0].join(10)
    assert all(isinstance(event, Arrived) and event.count == COUNT for event in seen["receiver"])
    assert not any(isinstance(event, WritesFailed) for event in seen["sender"])


@pytest.mark.parametrize("fails", [4, 5, 6], ids=lambda post: f"post {post}")
def test_a_rail_that_fails_with_nothing_on_its_way_leaves_the_peers_rails_to_the_others(fails: int) -> None:
    """Two of three write to the same one of the peer's: nothing of the lost one can land there any more."""
    fabric = SimulatedFabric(Faults(fail_post=fails))
    sender, receiver = fabric.party(rails=3), fabric.party(rails=2)
    (_, source), (_, target) = sender.memory(COUNT * PAGE), receiver.memory(COUNT * PAGE)
    landing = receiver.engine.open_landing("sender")
    sending = sender.engine.connect("receiver", landing.address, asks_peer=True)
    for page in range(fails):
        before = sender.engine.writes_by_rail()
        sender.engine.write(sending, pages(source, target.remote, [page], PAGE, IMMEDIATE))
        drive(sender, receiver, until=lambda: len(sender.of(WritesEnded)) > page)  # noqa: B023 - called before the next
    (lost,) = sender.of(RailInDoubt)
    assert not lost.completed, "nobody needs to be asked"
    assert sender.engine.counters().rails_lost == 1 and len(sender.events) == fails + 1
    sender.engine.write(sending, pages(source, target.remote, list(range(COUNT)), PAGE, IMMEDIATE))
    drive(sender, receiver, until=lambda: len(sender.of(WritesEnded)) > fails)
    used = [after - then for after, then in zip(sender.engine.writes_by_rail(), before, strict=True)]
    assert sorted(used)[0] == 0 and sorted(used)[1] >= COUNT // 2

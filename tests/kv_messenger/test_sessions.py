"""A session knows which rails have failed towards its decode node, and the next one with it does without them."""

import numpy as np
import pytest

from fabric.api import PageWrites, RailInDoubt, WritesEnded
from fabric.simulated import Faults, SimulatedEngine, SimulatedNetwork
from kv_messenger.sessions import AVOID_S, Session, Sessions
from protocol.messages import Hello
from tests.kv_messenger.builders import layout

PAGE, PAGES = 64, 12


class World:
    """A prefill node's sessions over three rails to a decode node."""

    def __init__(self, faults: Faults) -> None:
        network = SimulatedNetwork(1, faults)
        self.fabric, self.receiver = (SimulatedEngine(network, rails=3) for _ in range(2))
        self.now = 100.0
        self.sessions = Sessions(self.fabric, lambda: self.now)
        self.memory = np.zeros(2 * PAGES * PAGE, np.uint8)
        base, half = self.memory.ctypes.data, PAGES * PAGE
        self.source, self.target = self.fabric.register(base, half), self.receiver.register(base + half, half)

    def open(self) -> Session:
        address = self.receiver.open_landing("prefill").address
        hello = Hello(
            instance="decode-instance",
            name="decode-0",
            expects="prefill-instance",
            compatibility="digest",
            layout=layout(),
            landing=1,
            landing_address=address,
        )
        return self.sessions.open(hello)

    def send(self, session: Session) -> RailInDoubt | None:
        """A page on each rail in use, and more; which of them failed, if one did."""
        indices = list(range(PAGES))
        pages = PageWrites(self.source, indices, PAGE, 0, self.target.remote, indices, PAGE, 0, PAGE, 1)
        self.fabric.write(session.endpoint, pages)
        seen: list[object] = []
        while not any(isinstance(event, WritesEnded | RailInDoubt) for event in seen):
            seen += self.fabric.progress(1.0)
        return next((event for event in seen if isinstance(event, RailInDoubt)), None)

    def used(self) -> set[int]:
        return {rail for rail, writes in enumerate(self.fabric.writes_by_rail()) if writes}


def test_the_next_session_does_without_the_rail_that_failed() -> None:
    world = World(Faults(fail_completion=2))
    session = world.open()
    failed = world.send(session)
    assert failed is not None
    world.sessions.avoid(session, failed.rail)
    world.sessions.close(session)
    world.fabric.progress(0)
    before = world.fabric.writes_by_rail()
    assert world.send(world.open()) is None
    more = [now - then for now, then in zip(world.fabric.writes_by_rail(), before, strict=True)]
    assert more[failed.rail] == 0 and sum(more) == PAGES


def test_a_rail_is_tried_again_after_a_while_and_nothing_is_remembered_of_who_is_gone() -> None:
    world = World(Faults())
    session = world.open()
    world.sessions.avoid(session, 1)
    world.sessions.close(session)
    world.now += AVOID_S - 1
    world.send(session := world.open())
    assert world.used() == {0, 2}
    world.sessions.close(session)
    world.fabric.progress(0)
    world.now += 1
    world.sessions.expire(world.now)
    assert not world.sessions.avoids
    world.send(world.open())
    assert world.used() == {0, 1, 2}


@pytest.mark.parametrize("forget", [False, True])
def test_all_rails_are_tried_again_once_all_have_failed_or_the_instance_was_given_up(forget: bool) -> None:
    world = World(Faults())
    session = world.open()
    for rail in range(2 if forget else 3):
        world.sessions.avoid(session, rail)
    if forget:
        world.sessions.forgive(session)
    world.sessions.close(session)
    world.send(world.open())
    assert world.used() == {0, 1, 2}


def test_rails_that_failed_towards_one_instance_serve_another() -> None:
    world = World(Faults())
    session = world.open()
    world.sessions.avoid(session, 1)
    world.sessions.close(session)
    other = world.fabric.connect("decode-1", world.receiver.open_landing("prefill").address)
    world.send(Session("other", "decode-1", 1, layout(), other, 0.0))
    assert world.used() == {0, 1, 2}

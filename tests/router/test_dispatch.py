"""The dispatcher's books by themselves: real membership, a sender that remembers, a clock that the test turns."""

import msgspec
import pytest

from protocol.messages import Abort, DecodeRequest, Role
from protocol.sampling import SamplingParams
from router.dispatch import Dispatcher
from router.membership import LOST_AFTER_S, Member, Membership
from router.metrics import Metrics
from router.token_request import TokenRequest
from router.tried import Tried
from tests.router.fake_node import node_status


class Remembering:
    """Takes every message."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, msgspec.Struct]] = []

    def send(self, instance: str, message: msgspec.Struct) -> bool:
        self.sent.append((instance, message))
        return True


class Cluster:
    """A decode node "d" that is fed by a prefill node "p"; a silent one is gone, and may announce itself again."""

    def __init__(self) -> None:
        self.sender = Remembering()
        self.members = Membership("", 0.0)
        self.dispatcher = Dispatcher(
            self.members, self.sender, Metrics(), requests_per_node=8, queue_limit=8, clock=lambda: 0.0
        )
        self._now = 0.0
        self.announce()

    def announce(self) -> None:
        self.members.observe(node_status("d", local_prefill=False), self._now)
        self.members.observe(node_status("p", role=Role.PREFILL, control_address="tcp://p"), self._now)

    def all_fall_silent(self) -> None:
        until = self._now + LOST_AFTER_S + 1
        while self._now < until:
            self._now += 0.25
            for lost in self.members.sweep(self._now):
                self.dispatcher.on_lost(lost.instance)
        assert not list(self.members)

    def in_flight(self) -> list[int]:
        return [self.member(instance).in_flight for instance in ("d", "p")]

    def member(self, instance: str) -> Member:
        member = self.members.get(instance)
        assert member is not None
        return member


def token_request(key: str) -> TokenRequest:
    return TokenRequest(key, "", [5], SamplingParams(max_new_tokens=1), received_at=0.0, deadline=100.0)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_a_request_counts_on_both_of_its_nodes_until_it_ends(cluster: Cluster) -> None:
    attempt = cluster.dispatcher.start(token_request("one"), Tried())
    assert cluster.in_flight() == [1, 1]
    cluster.dispatcher.prompt_done(attempt)
    assert cluster.in_flight() == [1, 0]
    cluster.dispatcher.finish(attempt)
    cluster.dispatcher.finish(attempt)
    assert cluster.in_flight() == [0, 0]
    assert [type(message) for _, message in cluster.sender.sent] == [DecodeRequest, Abort]


def test_a_request_of_before_a_silence_is_not_taken_off_the_node_that_returned(cluster: Cluster) -> None:
    old = cluster.dispatcher.start(token_request("old"), Tried())
    cluster.all_fall_silent()
    cluster.announce()
    new = cluster.dispatcher.start(token_request("new"), Tried())
    cluster.dispatcher.finish(old)
    assert cluster.in_flight() == [1, 1]
    cluster.dispatcher.finish(new)
    assert cluster.in_flight() == [0, 0]

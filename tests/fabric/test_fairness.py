"""Who posts how much when several peers want to: alike, and whatever others that stand still have on their way."""

import ctypes

from fabric.api import WritesEnded
from fabric.limits import Limits
from tests.fabric.conftest import Fabric
from tests.fabric.party import Party, drive, pages, settle

PAGE = 4096
MANY = list(range(64))
ENDPOINT, DOMAIN = 8, 16
"""Writes outstanding, on each rail."""
QUANTUM = 8
"""Writes that one posts before the next has its turn."""


class Star:
    """One sender, connected to several receivers that it has written to once."""

    def __init__(self, fabric: Fabric, receivers: int, limits: Limits) -> None:
        self.fabric = fabric
        self.sender = fabric.party(limits)
        self.word = ctypes.c_uint64(0)
        _, self._source = self.sender.memory(len(MANY) * PAGE)
        self.receivers = [fabric.party() for _ in range(receivers)]
        self._targets = [receiver.memory(len(MANY) * PAGE, fill=0)[1].remote for receiver in self.receivers]
        landings = [receiver.engine.open_landing("sender") for receiver in self.receivers]
        self._sendings = [self.sender.engine.connect("receiver", landing.address) for landing in landings]
        for receiver in range(receivers):
            self.write(receiver, [0] * fabric.rails)
        drive(self.sender, *self.receivers, until=lambda: len(self.ended) == receivers)
        self.sender.events.clear()

    @property
    def ended(self) -> list[WritesEnded]:
        return self.sender.of(WritesEnded)

    def write(self, receiver: int, indices: list[int], at_once: bool = True) -> int:
        """Returns the batch's handle. Not at once: together with all others, when the word moves."""
        batch = pages(self._source, self._targets[receiver], indices, PAGE, 1)
        if at_once:
            return self.sender.engine.write(self._sendings[receiver], batch)
        return self.sender.engine.write_when(self._sendings[receiver], ctypes.addressof(self.word), 1, batch)

    def write_to_stalled(self, receiver: int) -> int:
        """As much as there is; how much of it was posted."""
        before = self.sender.engine.counters().writes_posted
        self.fabric.stall(self.receivers[receiver])
        self.write(receiver, MANY)
        settle(self.sender)
        return self.sender.engine.counters().writes_posted - before

    def drive(self, *receivers: Party, ended: int) -> None:
        drive(self.sender, *receivers, until=lambda: len(self.ended) >= ended)


def test_what_is_outstanding_is_shared_alike_between_peers_that_all_want_more(fabric: Fabric) -> None:
    """Each has half of the domain's cap; where posts were put off, one may have been a turn ahead at the end. To cancel
    makes room, which the relay may use at once: so the last ones go first."""
    star = Star(fabric, 2, Limits(endpoint_writes=64, domain_writes=32))
    for receiver in star.receivers:
        fabric.stall(receiver)
    batches = [[star.write(receiver, MANY[:4], at_once=False) for _ in range(40)] for receiver in (0, 1)]
    star.word.value = 1
    settle(star.sender)
    counts = [
        [star.sender.engine.cancel(handle) for handle in pair] for pair in reversed(list(zip(*batches, strict=True)))
    ]
    outstanding = [sum(posted - completed for posted, completed in of_one) for of_one in zip(*counts, strict=True)]
    assert min(outstanding) > 16 * fabric.rails - QUANTUM, counts
    assert abs(outstanding[0] - outstanding[1]) < QUANTUM, counts


def test_a_living_peer_has_its_fair_share_beside_many_that_stand_still(fabric: Fabric) -> None:
    """Two hold the cap; each that comes later still has the cap's share for as many peers as there are."""
    star, rails = Star(fabric, 5, Limits(ENDPOINT, DOMAIN)), fabric.rails
    posted = [star.write_to_stalled(receiver) for receiver in range(5)]
    assert posted == [ENDPOINT * rails, ENDPOINT * rails, *(DOMAIN * rails // peers for peers in (3, 4, 5))]
    fabric.resume(star.receivers[4])
    star.drive(star.receivers[4], ended=1)
    assert star.ended[0].completed == len(MANY)
    assert star.sender.engine.gauges().outstanding == sum(posted[:4])


def test_every_peer_has_one_write_at_least(fabric: Fabric) -> None:
    star = Star(fabric, 3, Limits(1, 1))
    posted = [star.write_to_stalled(receiver) for receiver in range(3)]
    assert posted == [fabric.rails, *(max(1, fabric.rails // peers) for peers in (2, 3))]

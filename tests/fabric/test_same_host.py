"""Processes of one host: the way is chosen by itself, what a peer writes into the ring is not believed, and neither a
stopped nor a killed writer is read from after the fence."""

import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fabric.api import EndpointFailed, TransferEngine, WritesEnded
from fabric.errors import FabricUsageError
from fabric.immediates import pack
from fabric.libfabric import open_engine
from fabric.limits import Limits
from fabric.same_host import SAME_HOST
from tests.fabric.child import ChildProcess, writer
from tests.fabric.conftest import Fabric, Link
from tests.fabric.party import Party, drive, pages, settle
from tests.fabric.raw_peer import SEALS, RawReceiver, RawSender, sealed

PAGE = 4096
MEMORY = 4 << 20
IMMEDIATE = pack(7, 1)


class Both(Fabric):
    """Engines with libfabric's provider, and the same-host path beside it or not."""

    def __init__(self, *same_host: bool, provider: str = "net") -> None:
        super().__init__(provider)
        self._same_host = list(same_host)

    def engine(self, limits: Limits | None, rails: int) -> TransferEngine:
        return open_engine(self.provider, same_host=self._same_host.pop(0))


def moved_by(link: Link) -> tuple[str, str]:
    """The provider that each side names once a page has crossed, byte-exact."""
    link.sender.engine.write(link.sending, pages(link.source_region, link.target_region.remote, [3], PAGE, 1))
    drive(*link.both, until=lambda: bool(link.sender.of(WritesEnded)))
    assert np.array_equal(link.target[3 * PAGE : 4 * PAGE], link.source[3 * PAGE : 4 * PAGE])
    sides = link.sender.engine.provider_of(link.sending), link.receiver.engine.provider_of(link.landing)
    link.fabric.close()
    return sides


def test_where_both_sides_have_it_it_is_taken_by_itself() -> None:
    assert moved_by(Link(Both(True, True))) == (SAME_HOST, SAME_HOST)


@pytest.mark.parametrize("sides", [(True, False), (False, True), (False, False)])
def test_where_either_side_has_switched_it_off_the_provider_is_taken(sides: tuple[bool, bool]) -> None:
    assert moved_by(Link(Both(*sides))) == ("net", "net")


def test_memory_that_is_not_shared_goes_by_way_of_the_provider() -> None:
    fabric = Both(True, True)
    sender, receiver = fabric.party(), fabric.party()
    source, (target, region) = np.full(PAGE, 9, np.uint8), receiver.memory(PAGE, fill=0)
    source_region = sender.engine.register(source.ctypes.data, PAGE)
    sending = sender.engine.connect("receiver", receiver.engine.open_landing("sender").address)
    assert sender.engine.provider_of(sending) == "net"
    sender.engine.write(sending, pages(source_region, region.remote, [0], PAGE, 1))
    drive(sender, receiver, until=lambda: bool(sender.of(WritesEnded)))
    assert (target == 9).all()
    fabric.close()


def test_alone_it_refuses_to_write_from_memory_that_is_not_shared() -> None:
    link = Link(Fabric(SAME_HOST))
    source = np.zeros(PAGE, np.uint8)
    region = link.sender.engine.register(source.ctypes.data, PAGE)
    with pytest.raises(FabricUsageError, match="register it with its file"):
        link.sender.engine.write(link.sending, pages(region, link.target_region.remote, [0], PAGE, 1))
    link.fabric.close()


def test_a_peer_that_listens_no_more_is_reached_by_way_of_the_provider() -> None:
    """Nobody has that name on this host: so a peer of another one looks."""
    link = Link(Both(True, True, True))
    other = link.fabric.party()
    other.memory(PAGE)
    over = other.engine.connect("receiver", link.landing.address)
    assert other.engine.provider_of(over) == SAME_HOST
    settle(*link.both)  # the landing has its peer now, and listens to nobody else
    third = link.sender.engine.connect("receiver", link.landing.address)
    assert link.sender.engine.provider_of(third) == "net"
    link.fabric.close()


def test_the_fence_of_a_peer_on_this_host_needs_no_proof_of_its_death() -> None:
    link = Link(Both(True, True, provider="tcp;ofi_rxm"))
    assert link.receiver.engine.fence_needs_dead_peer(link.landing), "nobody has come yet"
    settle(*link.both)
    assert not link.receiver.engine.fence_needs_dead_peer(link.landing)
    link.fabric.close()


def test_a_process_of_another_user_is_turned_away_and_the_landing_waits_on() -> None:
    if os.geteuid():
        pytest.skip("only root can become somebody else")
    link = Link(Fabric(SAME_HOST))
    address = link.receiver.engine.open_landing("sender").address
    with ChildProcess("stranger", {"landing": address.hex()}) as stranger:
        drive(*link.both, until=lambda: stranger.says() == "turned away")
    again = link.sender.engine.connect("receiver", address)
    link.sender.engine.write(again, pages(link.source_region, link.target_region.remote, [0], PAGE, 1))
    drive(*link.both, until=lambda: bool(link.sender.of(WritesEnded)))
    assert link.sender.of(WritesEnded)[0].error is None and link.receiver.of(EndpointFailed) == []
    link.fabric.close()


class Written:
    """A receiver whose memory a process writes to at full speed."""

    def __init__(self, page: int = 64 << 10) -> None:
        self.page = page
        self.engine = open_engine(SAME_HOST)
        self.receiver = Party(self.engine)
        self.memory, region = self.receiver.memory(MEMORY, fill=0)
        self.landing = self.engine.open_landing("writer")
        self.count = self.engine.expect(self.landing, IMMEDIATE, 1 << 40)
        self.writer = writer(SAME_HOST, self.landing, region.remote, page, IMMEDIATE)

    def passes(self) -> list[set[int]]:
        """The bytes in each page: the writer fills its whole memory with one byte for each pass."""
        return [set(map(int, np.unique(page))) for page in self.memory.reshape(-1, self.page)]


def test_a_stopped_writer_is_fenced_at_once_and_lands_nothing_when_it_goes_on() -> None:
    written = Written()
    with written.writer as child:
        drive(written.receiver, until=lambda: written.engine.counted(written.count) > 70)
        child.pause()
        written.engine.close_endpoint(written.landing)
        at_the_fence = written.memory.copy()
        child.go_on()
        said: list[str] = []

        def gave_up() -> bool:
            said.extend(filter(None, [child.says()]))
            return any(line.startswith("ended") for line in said)

        drive(written.receiver, until=gave_up)
    assert np.array_equal(written.memory, at_the_fence) and written.memory.any()
    assert written.receiver.events == []
    written.engine.close()


def test_what_a_killed_writer_had_posted_is_copied_whole_and_then_its_end_is_reported() -> None:
    written = Written()
    with written.writer as child:
        drive(written.receiver, until=lambda: written.engine.counted(written.count) > 70)
        child.kill()
        drive(written.receiver, until=lambda: bool(written.receiver.of(EndpointFailed)))
    (failed,) = written.receiver.of(EndpointFailed)
    assert (failed.endpoint, failed.peer) == (written.landing.id, "writer")
    assert all(len(bytes_) == 1 for bytes_ in written.passes()), "no page is half of one pass and half of another"
    counted = written.engine.counted(written.count)
    settle(written.receiver)
    assert written.engine.counted(written.count) == counted
    written.engine.close()


def test_what_is_copied_while_its_sender_takes_its_memory_back_does_not_count() -> None:
    """A write larger than the receiver copies in one turn."""
    size = 8 << 20
    link = Link(Fabric(SAME_HOST), size=size)
    expectation = link.receiver.engine.expect(link.landing, IMMEDIATE, 1)
    link.sender.engine.write(link.sending, pages(link.source_region, link.target_region.remote, [0], size, IMMEDIATE))
    drive(link.sender, until=lambda: link.sender.engine.gauges().outstanding == 1)
    while not link.target.any():
        link.receiver.engine.progress(0)
    assert not np.array_equal(link.target, link.source)
    link.sender.engine.close_endpoint(link.sending)
    settle(*link.both)
    assert link.receiver.engine.counted(expectation) == 0 and link.receiver.events == []
    (ended,) = link.sender.of(WritesEnded)
    assert (ended.cancelled, ended.posted, ended.completed) == (True, 1, 0)
    link.fabric.close()


def test_once_an_offer_could_not_be_mapped_peers_come_by_way_of_the_provider() -> None:
    """A machine may let processes connect, and yet not pass files between them."""
    link = Link(Both(True, True))
    landing = link.receiver.engine.open_landing("peer")
    with RawSender(landing.address) as peer:
        unsealed_ring(peer)
        drive(link.receiver, until=lambda: bool(link.receiver.of(EndpointFailed)))
    link.landing = link.receiver.engine.open_landing("sender")
    link.sending = link.sender.engine.connect("receiver", link.landing.address)
    assert moved_by(link) == ("net", "net")


def test_memory_whose_file_cannot_be_sealed_is_not_shared() -> None:
    engine = open_engine("net", same_host=True)
    with tempfile.TemporaryFile() as file:
        file.truncate(PAGE)
        with mmap.mmap(file.fileno(), PAGE) as memory:
            data = np.frombuffer(memory, np.uint8)
            engine.register(data.ctypes.data, PAGE, file=file.fileno())
            landing = engine.open_landing("peer")
            assert engine.provider_of(engine.connect("itself", landing.address)) == "net"
            engine.close()
            del data


@pytest.fixture
def receiver() -> Iterator[Party]:
    party = Party(open_engine(SAME_HOST))
    yield party
    party.engine.close()


LENGTH = 16 * PAGE
HOSTILE_DESCRIPTORS = {
    "source beyond its end": (1, LENGTH - 8, 0, 0, 9, 1),
    "source that wraps around": (1, (1 << 64) - 8, 0, 0, 16, 1),
    "length that wraps around": (1, 8, 0, 0, (1 << 64) - 4, 1),
    "a region that was not offered": (2, 0, 0, 0, 8, 1),
    "target beyond its end": (1, 0, 0, LENGTH - 8, 9, 1),
    "target below its base": (1, 0, 0, -8, 8, 1),
    "a key that is none": (1, 0, 1, 0, 8, 1),
}


@pytest.mark.parametrize("name", HOSTILE_DESCRIPTORS)
def test_a_descriptor_that_leaves_what_is_allowed_fails_the_landing_and_writes_nothing(
    receiver: Party, name: str
) -> None:
    memory, region = receiver.memory(LENGTH, fill=7)
    landing = receiver.engine.open_landing("hostile")
    remote = region.remote
    number, offset, wrong_key, target, length, immediate = HOSTILE_DESCRIPTORS[name]
    with RawSender(landing.address) as sender:
        sender.offer_ring()
        sender.offer_region(1, LENGTH)
        good = (1, 0, remote.keys[0].key, remote.base, 16, immediate)
        sender.post(0, good)
        sender.post(1, (number, offset, remote.keys[0].key ^ wrong_key, (remote.base + target) % (1 << 64), length, 1))
        sender.post(2, (*good[:3], remote.base + 64, *good[4:]))
        drive(receiver, until=lambda: bool(receiver.of(EndpointFailed)))
        settle(receiver)
        assert sender.refusal()
    (failed,) = receiver.of(EndpointFailed)
    assert (failed.endpoint, failed.peer) == (landing.id, "hostile") and failed.error.provider_text
    assert not memory[:16].any() and (memory[16:] == 7).all(), "the first was good, and is all that landed"
    assert receiver.engine.counters().stale_immediates == 1


def test_a_ring_that_says_it_holds_more_than_it_can_fails_the_landing(receiver: Party) -> None:
    landing = receiver.engine.open_landing("hostile")
    with RawSender(landing.address) as sender:
        sender.offer_ring(slots=4)
        sender.say_posted(5)
        drive(receiver, until=lambda: bool(receiver.of(EndpointFailed)))


def unsealed_ring(sender: RawSender) -> None:
    sender.offer_ring(seals=0)


def short_ring(sender: RawSender) -> None:
    sender.offer_ring(slots=1024, size=PAGE)


def odd_ring(sender: RawSender) -> None:
    sender.offer_ring(slots=3)


def huge_ring(sender: RawSender) -> None:
    sender.offer_ring(slots=1 << 40, size=PAGE)


def second_ring(sender: RawSender) -> None:
    sender.offer_ring()
    sender.offer_ring()


def unsealed_region(sender: RawSender) -> None:
    sender.offer(2, sealed(PAGE, seals=0), 1, 0, PAGE)


def region_beyond_its_file(sender: RawSender) -> None:
    sender.offer(2, sealed(PAGE, SEALS), 1, PAGE, PAGE)


def region_without_file(sender: RawSender) -> None:
    sender.offer(2, None, 1, 0, PAGE)


def unknown_packet(sender: RawSender) -> None:
    sender.offer(9, sealed(PAGE), 1, 0, PAGE)


def short_packet(sender: RawSender) -> None:
    sender.send(b"hello")


def long_packet(sender: RawSender) -> None:
    sender.send(bytes(4096))


@pytest.mark.parametrize(
    "offer",
    [unsealed_ring, short_ring, odd_ring, huge_ring, second_ring, unsealed_region, region_beyond_its_file,
     region_without_file, unknown_packet, short_packet, long_packet],
)  # fmt: skip
def test_an_offer_that_cannot_be_trusted_fails_the_landing(receiver: Party, offer: object) -> None:
    landing = receiver.engine.open_landing("hostile")
    before = os.listdir("/proc/self/fd")
    with RawSender(landing.address) as sender:
        assert callable(offer)
        offer(sender)
        drive(receiver, until=lambda: bool(receiver.of(EndpointFailed)))
    assert len(os.listdir("/proc/self/fd")) <= len(before), "its descriptors are closed"


def test_a_receiver_that_acknowledges_what_was_never_posted_fails_the_sender() -> None:
    sender, peer = Party(open_engine(SAME_HOST)), RawReceiver()
    _, region = sender.memory(PAGE)
    sending = sender.engine.connect("hostile", peer.address)
    peer.acknowledge(3)
    drive(sender, until=lambda: bool(sender.of(EndpointFailed)))
    handle = sender.engine.write(sending, pages(region, region.remote, [0], PAGE, 1))
    drive(sender, until=lambda: bool(sender.of(WritesEnded)))
    (ended,) = sender.of(WritesEnded)
    assert (ended.handle, ended.posted, ended.completed) == (handle, 0, 0) and ended.error
    sender.engine.close()
    peer.close()


def test_a_peer_can_read_what_it_was_given_and_cannot_write_to_it_however_it_tries() -> None:
    sender, peer = Party(open_engine(SAME_HOST)), RawReceiver()
    data, region = sender.memory(PAGE)
    sending = sender.engine.connect("hostile", peer.address)
    sender.engine.write(sending, pages(region, region.remote, [0], PAGE, 1))
    peer.accept()
    os.close(peer.take_offer())
    given = peer.take_offer()
    again = os.open(f"/proc/self/fd/{given}", os.O_RDWR)
    for file in (given, again):
        with mmap.mmap(file, PAGE, prot=mmap.PROT_READ) as seen:
            assert bytes(seen) == data.tobytes()
        with pytest.raises(PermissionError):
            mmap.mmap(file, PAGE)
        with pytest.raises(OSError):
            os.write(file, b"x")
        os.close(file)
    data[0] ^= 1  # its owner goes on writing
    sender.engine.close()
    peer.close()


def mapped() -> int:
    """Mappings of rings and regions in this process."""
    return Path("/proc/self/maps").read_text().count("/memfd:kvferry")


def test_endpoints_that_come_and_go_leave_no_mapping() -> None:
    sender, receiver = Party(open_engine(SAME_HOST)), Party(open_engine(SAME_HOST))
    (_, region), (_, target) = sender.memory(PAGE), receiver.memory(PAGE)
    before = mapped()
    for turn in range(5):
        landing = receiver.engine.open_landing("sender")
        sending = sender.engine.connect("receiver", landing.address)
        sender.engine.write(sending, pages(region, target.remote, [0], PAGE, 1))
        drive(sender, receiver, until=lambda: len(sender.of(WritesEnded)) > turn)  # noqa: B023
        assert mapped() > before
        sender.engine.close_endpoint(sending)
        settle(receiver, turns=3)
        receiver.engine.close_endpoint(landing)
    assert mapped() == before
    assert receiver.of(EndpointFailed) == []
    for party in (sender, receiver):
        party.engine.close()

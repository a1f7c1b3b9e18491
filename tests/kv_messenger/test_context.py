"""The context on its way: refused where it does not fit, written part by part behind the last chunk, counted, freed."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from fabric.api import MemoryRegion, WritesEnded
from kv_messenger.checksums import first_difference
from kv_messenger.context import slot_checksums
from kv_messenger.plan import TransferPlan, expected
from kv_messenger.sender_transfer import (
    Arm,
    Chunk,
    ReleaseSource,
    ReportFinished,
    ReportStopped,
    SenderTransfer,
    StopPosting,
)
from kv_messenger.sharding import refuse_pair
from protocol.context import NO_CONTEXT, ContextLayout, ContextPart
from protocol.layout import KVLayout
from protocol.ticket import RankRegion
from tests.kv_messenger.builders import (
    BOTH,
    HIDDEN,
    IMMEDIATE,
    KEY,
    LOGITS,
    SLOTS,
    TARGET_SLOT,
    context_slot,
    layout,
    plan,
    region,
)

LOGITS_ALONE, TURNED = ContextLayout((LOGITS,)), ContextLayout((LOGITS, HIDDEN))
SOURCE_SLOT = 3


def of(context: ContextLayout) -> KVLayout:
    return msgspec.structs.replace(layout(layers=2), context=context)


def plan_between(source: ContextLayout, target: ContextLayout) -> TransferPlan:
    """Of two pages."""
    one = plan(of(target), 8, [0, 1])
    slots = region(8, SLOTS * source.slot_bytes) if source.parts else None
    return TransferPlan(of(source), one.regions, of(target), one.ticket, 8, slots)


# ---- what fits ----


@pytest.mark.parametrize("wanted", [NO_CONTEXT, LOGITS_ALONE, BOTH, TURNED])
def test_who_computes_all_of_it_fits_who_wants_any(wanted: ContextLayout) -> None:
    assert refuse_pair(of(BOTH), of(wanted)) is None


def test_a_part_that_is_not_computed_is_refused_with_what_to_do() -> None:
    assert "start it with --context hidden" in (refuse_pair(of(NO_CONTEXT), of(ContextLayout((HIDDEN,)))) or "")
    assert "start it with --context hidden,logits" in (refuse_pair(of(LOGITS_ALONE), of(BOTH)) or "")


def test_a_part_of_another_size_is_refused() -> None:
    larger = ContextLayout((HIDDEN, ContextPart("logits", 44)))
    assert "logits: 40 bytes on the prefill side, 44" in (refuse_pair(of(BOTH), of(larger)) or "")


def test_a_layout_with_a_part_twice_is_refused() -> None:
    assert "once" in (refuse_pair(of(BOTH), of(ContextLayout((HIDDEN, HIDDEN)))) or "")


def test_a_ticket_whose_slot_does_not_fit_is_refused_with_the_reason() -> None:
    whole = plan(of(BOTH), 8, [0, 1])
    assert whole.refusal() is None

    def refusal(target: ContextLayout, **slot: object) -> str:
        ticket = whole.ticket
        if slot:
            assert ticket.context is not None
            ticket = msgspec.structs.replace(ticket, context=msgspec.structs.replace(ticket.context, **slot))
        return TransferPlan(whole.source, whole.regions, of(target), ticket, 8, whole.context).refusal() or ""

    assert "slot 4 lies outside" in refusal(BOTH, slot=SLOTS)
    assert "address space" in refusal(BOTH, region=RankRegion(keys=[(0, 2)], base=(1 << 64) - 256, length=256))
    assert "with a context slot, its node wants no context" in refusal(NO_CONTEXT)


def test_a_ticket_without_the_slot_that_its_node_wants_is_refused() -> None:
    ticket = plan(of(NO_CONTEXT), 8, [0, 1]).ticket
    refusal = TransferPlan(of(BOTH), [region(9, 1 << 20)], of(BOTH), ticket, 8).refusal()
    assert refusal == "ticket without a context slot, its node wants hidden and logits"


# ---- what is written ----


@pytest.mark.parametrize("target", [BOTH, TURNED, LOGITS_ALONE])
def test_each_part_goes_to_its_place_in_the_slot_and_nowhere_else(target: ContextLayout) -> None:
    ours = np.arange(1, 1 + SLOTS * BOTH.slot_bytes, dtype=np.uint16)  # an element stands for a byte
    theirs = np.zeros(SLOTS * target.slot_bytes, dtype=np.uint16)
    writes = plan_between(BOTH, target).context_writes(SOURCE_SLOT)
    for write in writes:
        ((i,), (j,)) = write.source_indices, write.target_indices
        source, to = i * write.source_stride + write.source_offset, j * write.target_stride + write.target_offset
        theirs[to : to + write.length] = ours[source : source + write.length]
        assert write.immediate == IMMEDIATE and write.target.length == theirs.size
    slot = ours[SOURCE_SLOT * 64 : SOURCE_SLOT * 64 + 64]
    parts = {"hidden": slot[:24], "logits": slot[24:]}
    begin = TARGET_SLOT * target.slot_bytes
    arrived = theirs[begin : begin + target.slot_bytes]
    assert np.array_equal(arrived, np.concatenate([parts[name] for name in target.names]))
    assert np.count_nonzero(theirs) == target.slot_bytes, "something else was written to"
    pages = expected(of(NO_CONTEXT), of(NO_CONTEXT), 8, 0)
    assert expected(of(BOTH), of(target), 8, 0) == (pages.writes + len(writes), pages.bytes + target.slot_bytes)


def test_a_prompt_without_a_position_before_its_last_has_no_context() -> None:
    assert expected(of(BOTH), of(BOTH), 0, 0) == (0, 0)


def test_nothing_is_written_for_who_wants_nothing() -> None:
    assert plan_between(BOTH, NO_CONTEXT).context_writes(SOURCE_SLOT) == []
    assert context_slot(NO_CONTEXT) is None


# ---- when ----


def started(context: ContextLayout = BOTH) -> SenderTransfer:
    """Two chunks of a page each were armed, as handles 0 to 3; the first has run."""
    transfer = SenderTransfer(KEY, plan(of(context), 8, [0, 1]), 0, 9.0)
    arms = [arm for at in (0, 4) for arm in transfer.on_chunk(Chunk(at, at + 4, [[0, 1]], 1, SOURCE_SLOT))]
    for handle in range(len(arms)):
        transfer.on_armed(handle)
    assert transfer.on_forward_ended(1, 2) == []
    return transfer


def ended(handle: int) -> WritesEnded:
    return WritesEnded(handle, 1, 1, 24, False, None, 1, 1, 1)


def test_it_goes_once_when_the_last_forward_has_ended() -> None:
    transfer = started()
    arms = transfer.on_forward_ended(3, 4)
    assert [(a.layer, a.threshold, a.writes.length) for a in arms if isinstance(a, Arm)] == [
        (2, None, 24),
        (2, None, 40),
    ]
    assert len(arms) == 2


def test_the_source_is_released_once_its_writes_have_ended_too() -> None:
    transfer = started()
    for handle in range(4):
        assert transfer.on_batch_ended(ended(handle)) == []
    transfer.on_forward_ended(3, 4)
    transfer.on_armed(4)
    assert transfer.on_batch_ended(ended(4)) == [], "the other part is still to be armed"
    transfer.on_armed(5)
    report, release = transfer.on_batch_ended(ended(5))
    assert isinstance(report, ReportFinished) and isinstance(release, ReleaseSource)
    assert report.posted == 6 == expected(of(BOTH), of(BOTH), 8, 0).writes
    assert (report.times.early_writes, report.times.last_chunk_writes) == (2, 2), "pages alone"


def test_stopped_in_between_it_counts_what_was_posted_of_it() -> None:
    transfer = started()
    for handle in range(4):
        transfer.on_batch_ended(ended(handle))
    transfer.on_forward_ended(3, 4)
    transfer.on_armed(4)
    transfer.on_armed(5)
    transfer.on_batch_ended(ended(5))
    assert transfer.stop(None) == [StopPosting((4,))]
    assert transfer.on_cancelled(1, 0) == [ReportStopped(6, 5, None)]
    assert transfer.on_batch_ended(ended(4)) == [ReleaseSource()]


def test_of_a_transfer_that_was_stopped_it_is_not_sent() -> None:
    transfer = started()
    transfer.stop(None)
    transfer.on_cancelled(0, 0)
    assert transfer.on_forward_ended(3, 4) == []


# ---- whether it is the same ----


def held(memory: np.ndarray) -> MemoryRegion:
    return replace(region(1, memory.nbytes), address=memory.ctypes.data)


def test_checksums_do_not_depend_on_where_the_parts_lie() -> None:
    rng = np.random.default_rng(1)
    hidden, logits = (rng.integers(0, 256, size, dtype=np.uint8) for size in (24, 40))
    ours, theirs = np.concatenate([hidden, logits]), np.concatenate([np.zeros(64, np.uint8), logits, hidden])
    for moved in (TURNED, LOGITS_ALONE):
        sums = slot_checksums(held(ours), 0, BOTH, moved)
        assert sums == slot_checksums(held(theirs), 1, TURNED, moved) and len(sums) == 4 * len(moved.parts)
    theirs[64] ^= 1
    assert slot_checksums(held(ours), 0, BOTH, LOGITS_ALONE) != slot_checksums(held(theirs), 1, TURNED, LOGITS_ALONE)


def test_a_difference_is_named() -> None:
    assert first_difference(b"page" + b"hidd" + b"logi", b"page" + b"hidd" + b"LOGI", [], ["hidden", "logits"]) == (
        "the context's logits is not its source's"
    )
    assert slot_checksums(None, None, BOTH, BOTH) == b""

"""Requests whose prompt is computed elsewhere: reserve, resume, quarantine."""

import pytest

from engine.errors import CapacityExceeded, InvalidRequest, NoRoom, UnknownRequest
from engine.request import RequestStatus
from tests.engine.traces import Harness


@pytest.mark.parametrize(("prompt", "blocks"), [(2, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_all_pages_of_the_prompt_are_taken_and_none_is_scheduled(prompt: int, blocks: int) -> None:
    h = Harness()
    request = h.make("A", prompt, 2)
    assert len(set(h.engine.reserve(request).tables[0])) == blocks
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KV
    assert not h.engine.has_work
    assert h.step() == ""


def test_resuming_runs_the_last_prompt_token_as_a_decode_step() -> None:
    h = Harness()
    h.reserve("A", 8, 3)
    h.engine.resume("A", computed=7)
    assert h.run() == "A1@7 / A1@8 / A1@9"
    assert h.generated("A") == 3
    h.assert_at_rest()


def test_resuming_with_less_runs_the_rest_as_prompt() -> None:
    h = Harness(tokens=2)
    h.reserve("A", 8, 1)
    h.engine.resume("A", computed=5)
    assert h.run() == "A2@5 / A1@7"
    h.assert_at_rest()


def test_resuming_what_does_not_wait_is_an_error_of_the_caller() -> None:
    h = Harness()
    h.add("A", 4, 2)
    for name in ("A", "unknown"):
        with pytest.raises(UnknownRequest):
            h.engine.resume(name, computed=3)


def test_no_room_is_known_before_and_takes_nothing() -> None:
    h = Harness(num_blocks=4)
    h.reserve("A", 9, 2)
    assert h.can_reserve(4)
    assert not h.can_reserve(5)
    with pytest.raises(NoRoom):
        h.reserve("B", 5, 2)
    assert h.engine.pages_free == 1
    h.reserve("B", 4, 2)


def test_what_can_never_fit_is_refused_for_good() -> None:
    h = Harness(num_blocks=4)
    with pytest.raises(CapacityExceeded):
        h.reserve("A", 17, 2)
    with pytest.raises(InvalidRequest):
        h.reserve("A", 0, 2)


def test_quarantined_pages_come_back_only_by_name_and_attempt() -> None:
    h = Harness(num_blocks=4)
    h.reserve("A", 8, 2)
    h.engine.quarantine("A")
    assert (h.engine.pages_quarantined, h.engine.pages_free) == (2, 2)
    assert h.run() == ""
    assert not h.gathered.ended
    h.engine.free_quarantined("A", 2)
    h.engine.free_quarantined("B", 1)
    assert h.engine.pages_quarantined == 2
    h.engine.free_quarantined("A", 1)
    h.engine.free_quarantined("A", 1)
    h.assert_at_rest()


def test_a_second_attempt_lives_beside_the_quarantine_of_the_first() -> None:
    h = Harness(num_blocks=5)
    first = h.reserve("A", 8, 2)
    h.engine.quarantine("A")
    with pytest.raises(InvalidRequest, match="quarantine"):
        h.reserve("A", 8, 2)
    second = h.reserve("A", 8, 2, attempt=2)
    assert not set(first) & set(second)
    h.engine.resume("A", computed=7)
    h.run()
    assert h.generated("A") == 2
    states = {(entry["owner"], entry["generation"], entry["state"]) for entry in h.engine.ledger()}
    assert states == {("A", 1, "quarantined"), ("", 0, "free")}
    h.engine.free_quarantined("A", 1)
    h.assert_at_rest()


def test_held_pages_cannot_be_freed_as_if_they_were_in_quarantine() -> None:
    h = Harness()
    h.reserve("A", 8, 2)
    h.engine.free_quarantined("A", 1)
    assert h.blocks("A") == 2


def test_no_reservation_passes_a_request_that_has_been_overtaken_too_often() -> None:
    h = Harness(num_blocks=8, max_overtakes=2)
    h.add("long", 15, 30)
    h.step()
    h.add("big", 20, 1)
    for name in ("A", "B"):
        assert h.can_reserve(4)
        h.reserve(name, 4, 1)
    assert not h.can_reserve(4)
    h.engine.resume("A", computed=3)
    h.engine.resume("B", computed=3)
    h.run()
    assert h.gathered.ended.keys() == {"long", "big", "A", "B"}


def test_no_reservation_after_a_soft_reset_until_a_request_leaves() -> None:
    h = Harness(num_blocks=5)
    h.add("A", 8, 8)
    h.add("B", 8, 3)
    h.steps(2)
    assert h.engine.counters.resets == 1
    assert h.engine.pages_free == 2
    assert not h.can_reserve(4)
    h.engine.abort("A")
    assert h.can_reserve(4)

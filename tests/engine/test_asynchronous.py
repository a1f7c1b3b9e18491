"""Asynchronous batching without a model: what is under way when the next step is chosen. B14 and section 11."""

from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.forward_batch import PLACEHOLDER, ForwardBatch
from protocol.messages import FailureCode, FinishReason
from tests.engine.traces import Harness


def asynchronous(**settings: Any) -> Harness:
    return Harness(asynchronous=True, emit=lambda _, position: position, **settings)


def test_the_next_forward_is_chosen_before_the_last_ones_token_is_known() -> None:
    h = asynchronous()
    h.add("A", 4, 3)
    assert h.step() == "A4@0"
    assert h.generated("A") == 0
    assert h.step() == "A1@4"
    row = h.runner.batches[-1].rows[0]
    assert (list(row.tokens), row.carry) == ([PLACEHOLDER], 0)
    assert h.generated("A") == 1
    h.run()
    assert h.gathered.tokens["A"] == [4, 5, 6]
    assert len(h.runner.batches) == 3, "the limit is known beforehand: no slot is wasted on it"
    h.assert_at_rest()


def test_carried_tokens_are_named_by_their_place_among_the_samples() -> None:
    h = asynchronous(tokens=8)
    h.add("A", 2, 3)
    h.add("B", 20, 3)
    h.add("C", 2, 3)
    h.steps(5)
    for before, batch in zip(h.runner.batches, h.runner.batches[1:], strict=False):
        sampled = [row.request_id for row in before.rows if row.sample]
        for row in batch.rows:
            if row.carry >= 0:
                assert sampled[row.carry] == row.request_id
    h.run()
    h.assert_at_rest()


def test_an_end_token_wastes_one_slot_whose_token_nobody_sees() -> None:
    h = asynchronous(eos=[5])
    h.add("A", 4, 10)
    h.run()
    assert h.gathered.tokens["A"] == [4, 5]
    assert h.gathered.ended["A"].reason is FinishReason.STOP
    assert len(h.runner.batches) == 3
    h.assert_at_rest()


def test_blocks_come_free_only_when_the_forward_that_writes_to_them_has_ended() -> None:
    h = asynchronous(eos=[5])
    h.add("A", 4, 10)
    h.steps(3)
    assert h.gathered.ended.keys() == {"A"}
    assert h.blocks("A") == 2, "its wasted slot is still being computed"
    h.step()
    assert h.blocks("A") == 0


def test_b14_a_request_cancelled_in_mid_prefill_emits_nothing() -> None:
    h = asynchronous(tokens=8)
    for name, length in (("A", 2), ("B", 2), ("C", 30)):
        h.add(name, length, 4)
    h.steps(2)
    h.engine.abort("C")
    h.run()
    assert h.generated("C") == 0
    assert h.gathered.ended["C"].reason is FinishReason.CANCELLED
    assert all(token >= 0 for tokens in h.gathered.tokens.values() for token in tokens)
    h.assert_at_rest()


def test_b14_no_placeholder_is_ever_hashed() -> None:
    h = asynchronous(sharing=True)
    request = h.add("A", 7, 12)
    h.run()
    h.add("B", request.tokens[:17], 1)
    assert h.step() == "B1@16", "all four pages hash to what their tokens are"
    h.run()
    h.assert_at_rest()


def test_an_id_may_come_back_while_its_last_forward_is_under_way() -> None:
    h = asynchronous(eos=[5])
    h.add("A", 4, 10)
    h.steps(3)
    h.gathered.ended.clear()
    h.gathered.tokens.clear()
    h.add("A", 4, 10)
    h.run()
    assert h.gathered.tokens["A"] == [4, 5]
    h.assert_at_rest()


def test_a_forward_that_fails_fails_its_requests_and_those_alone() -> None:
    h = asynchronous()

    def fail_once(_: ForwardBatch) -> None:
        h.runner.on_run = lambda _: None
        raise RuntimeError("the device is on fire")

    h.add("A", 4, 4)
    h.runner.on_run = fail_once
    h.step()
    h.add("B", 4, 4)
    h.run()
    failure = h.gathered.ended["A"].failure
    assert failure is not None and failure.code is FailureCode.INTERNAL
    assert h.gathered.tokens["B"] == [4, 5, 6, 7]
    assert h.generated("A") == 0
    h.assert_at_rest()


def test_prefill_only_requests_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="synchronous"):
        asynchronous().add_prefill("P", 4)


@pytest.mark.parametrize("host_blocks", [0, 8])
def test_requests_that_make_room_lose_no_token(host_blocks: int) -> None:
    h = asynchronous(num_blocks=8, tokens=32, host_blocks=host_blocks)
    for name in ("R0", "R1", "R2"):
        h.add(name, 8, 12)
    h.run()
    assert h.engine.counters.resets + h.engine.counters.offloads > 0
    for name in h.requests:
        assert h.gathered.tokens[name] == list(range(8, 20))
    h.assert_at_rest()

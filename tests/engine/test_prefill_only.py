"""Prefill-only requests: all pages at admission, never a token, pages held until released."""

import pytest

from engine.forward_batch import ForwardBatch
from protocol.messages import FailureCode
from tests.engine.recording import listening
from tests.engine.traces import T0, Harness


def test_all_blocks_come_at_admission_and_stay_until_release() -> None:
    h = Harness(tokens=8)
    h.add_prefill("P", 20)
    assert h.step() == "P8@0"
    assert h.blocks("P") == 5
    assert h.run() == "P8@8 / P4@16"
    assert h.gathered.prefilled == ["P"]
    assert not h.gathered.tokens
    assert not h.gathered.ended
    assert (h.blocks("P"), h.engine.running) == (5, 0)
    h.engine.release("P")
    h.engine.release("P")
    h.assert_at_rest()


def test_a_prompt_that_does_not_fit_whole_waits_and_takes_nothing() -> None:
    h = Harness(num_blocks=8, tokens=8)
    h.add_prefill("P", 24)
    h.add_prefill("Q", 12)
    assert h.run() == "P8@0 / P8@8 / P8@16"
    assert h.blocks("Q") == 0
    assert not h.engine.has_work, "nothing happens until somebody releases pages"
    h.engine.release("P")
    assert h.run() == "Q8@0 / Q4@8"
    h.engine.release("Q")
    h.assert_at_rest()


def test_aborting_stops_the_prompt_but_keeps_its_pages() -> None:
    h = Harness(tokens=8)
    h.add_prefill("P", 20)
    h.step()
    h.engine.abort("P")
    assert h.run() == ""
    assert not h.gathered.ended
    assert h.blocks("P") == 5
    h.engine.release("P")
    h.assert_at_rest()


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_releasing_at_any_moment_returns_every_page(steps: int) -> None:
    h = Harness(tokens=8)
    h.add_prefill("P", 20)
    for _ in range(steps):
        h.step()
    h.engine.release("P")
    assert h.run() == ""
    h.assert_at_rest()


def test_each_chunk_is_announced_with_the_words_value_to_come() -> None:
    h = Harness(tokens=8)
    listener = listening(h)
    h.add("D", 3, 3)
    h.add_prefill("P", 10)
    assert h.run() == "D3@0 P5@0 / D1@3 P5@5 / D1@4"
    assert listener.calls == ["before", "ended", "before", "ended"], "none for a forward without prefill-only chunks"
    chunks = [chunk for (chunk,) in listener.announced]
    assert [(c.request_id, c.start, c.end) for c in chunks] == [("P", 0, 5), ("P", 5, 10)]
    assert chunks[0].tables == chunks[1].tables
    assert len(chunks[0].tables[0]) == 3
    assert [c.first_threshold for c in chunks] == [1, T0.layers + 1]
    assert listener.words == [0, T0.layers, T0.layers, 2 * T0.layers]


def test_a_failed_forward_is_told_before_the_word_moves_on_and_the_next_thresholds_are_right() -> None:
    h = Harness(tokens=8)
    listener = listening(h)

    def fail_after_one_layer(_: ForwardBatch) -> None:
        h.runner.on_run = lambda _: None
        h.engine.progress.advance()
        raise RuntimeError("boom")

    h.runner.on_run = fail_after_one_layer
    h.add_prefill("P", 8)
    h.add_prefill("Q", 8)
    h.run()
    assert listener.calls == ["before", "failed RuntimeError: boom", "before", "ended"]
    assert listener.words == [0, 1, 1, 1 + T0.layers]
    assert listener.announced[1][0].first_threshold == 2
    failure = h.gathered.ended["P"].failure
    assert failure is not None
    assert failure.code is FailureCode.INTERNAL
    assert h.blocks("P") == 2, "its writes may be under way"
    h.engine.release("P")
    h.engine.release("Q")
    h.assert_at_rest()


def test_prefill_only_requests_never_stall() -> None:
    """D outgrows what is left and has to wait for P's pages; P's slices go on."""
    h = Harness(num_blocks=7, tokens=4)
    h.add("D", 4, 8)
    h.step()
    h.add_prefill("P", 20)
    h.run()
    assert h.gathered.prefilled == ["P"]
    assert h.blocks("P") == 5
    h.engine.release("P")
    h.run()
    assert h.generated("D") == 8
    h.assert_at_rest()

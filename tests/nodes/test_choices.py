"""Several choices of one request on a decode node: one transfer, an end for each choice, one end for the request."""

import pytest

from engine.forward_batch import ForwardBatch
from protocol.messages import ChoiceEnded, FailureCode, FinishReason, RequestEnded, TokenDelta
from tests.nodes.desk import FIRST, SECOND, Desk

END = 9


def ends_early(request_id: str, position: int) -> int:
    """The first child after 2 tokens of a prompt of 9, the others go on."""
    return END if request_id == "A__child#1" and position >= 10 else 1


def started(desk: Desk, n: int = 3, new: int = 4) -> Desk:
    desk.ask("A", 9, new=new, n=n)
    desk.arrive("A")
    desk.safe("A")
    return desk


@pytest.mark.parametrize("sharing", [False, True])
def test_one_transfer_gives_all_choices_and_each_says_when_it_ends(sharing: bool) -> None:
    desk = started(Desk(sharing=sharing, emit=ends_early, ends=(END,)))
    desk.run()
    assert desk.asked == ["A#1"]
    assert [desk.tokens("A", choice) for choice in range(3)] == [[1, 1, 1, 1], [1, END], [1, 1, 1, 1]]
    assert desk.choices_ended("A") == {1: FinishReason.STOP, 0: FinishReason.LENGTH}
    assert desk.end("A").reason is FinishReason.LENGTH, "of the last one"
    assert desk.admission.counters.tokens == 10
    assert (desk.admission.counters.finished, desk.admission.counters.received) == (1, 1)
    desk.assert_at_rest()


def test_a_choice_says_nothing_after_its_end_and_the_request_has_the_last_word() -> None:
    desk = started(Desk(emit=ends_early, ends=(END,)))
    desk.run()
    over: set[int] = set()
    for reply in desk.replies[:-1]:
        assert isinstance(reply, TokenDelta | ChoiceEnded) and reply.choice not in over
        over |= {reply.choice} if isinstance(reply, ChoiceEnded) else set()
    assert isinstance(desk.replies[-1], RequestEnded)


@pytest.mark.parametrize(("local", "tokens"), [(True, 9), (False, 1), (True, 1)], ids=["local", "one token", "both"])
def test_without_a_transfer_there_are_as_many_choices(local: bool, tokens: int) -> None:
    desk = Desk(local=local)
    desk.ask("A", tokens, n=3)
    desk.run()
    assert desk.asked == []
    assert [desk.tokens("A", choice) for choice in range(3)] == [[1, 1, 1]] * 3
    assert len(desk.choices_ended("A")) == 2 and desk.end("A").failure is None
    desk.assert_at_rest()


def test_a_prompt_that_is_cached_but_for_its_last_token_asks_nobody() -> None:
    desk = started(Desk(sharing=True))
    desk.run()
    desk.ask("B", 9, n=2)
    desk.run()
    assert desk.asked == ["A#1"]
    assert [desk.tokens("B", choice) for choice in range(2)] == [[1, 1, 1]] * 2
    desk.assert_at_rest()


@pytest.mark.parametrize("blocks", [4, 5, 7])
def test_choices_that_do_not_fit_beside_the_arrived_prompt_compute_it_here(blocks: int) -> None:
    desk = started(Desk(blocks=blocks), new=3)
    desk.run()
    assert desk.asked == ["A#1"] and desk.engine.counters.forks < 2
    assert [desk.tokens("A", choice) for choice in range(3)] == [[1, 1, 1]] * 3
    desk.assert_at_rest()


# ---- one choice is stopped ----


@pytest.mark.parametrize("stopped", [0, 1, 2])
def test_a_choice_that_is_stopped_ends_alone(stopped: int) -> None:
    desk = started(Desk())
    desk.step()
    desk.admission.abort("A", stopped)
    desk.run()
    assert desk.choices_ended("A")[stopped] is FinishReason.CANCELLED
    lengths = [len(desk.tokens("A", choice)) for choice in range(3)]
    assert lengths[stopped] == 1 and sorted(lengths) == [1, 4, 4]
    assert desk.end("A").reason is FinishReason.LENGTH
    desk.assert_at_rest()


def test_the_last_choice_that_is_stopped_ends_the_request() -> None:
    desk = started(Desk())
    desk.step()
    for choice in (2, 0, 1):
        desk.admission.abort("A", choice)
        desk.step()
    assert desk.choices_ended("A") == dict.fromkeys([2, 0], FinishReason.CANCELLED)
    assert desk.end("A").reason is FinishReason.CANCELLED
    desk.assert_at_rest()


def test_stopping_a_choice_that_is_over_or_was_never_wanted_changes_nothing() -> None:
    desk = started(Desk(emit=ends_early, ends=(END,)))
    desk.step()
    desk.step()
    for choice in (1, 3, 127):
        desk.admission.abort("A", choice)
    desk.run()
    assert desk.choices_ended("A") == {1: FinishReason.STOP, 0: FinishReason.LENGTH}
    desk.assert_at_rest()


def test_before_there_are_tokens_no_choice_can_be_stopped_by_itself() -> None:
    """Nobody can mean it; the first choice would take its family with it."""
    desk = Desk()
    desk.ask("A", 9, n=2)
    desk.admission.abort("A", 0)
    desk.arrive("A")
    desk.admission.abort("A", 0)
    desk.run()
    assert [len(desk.tokens("A", choice)) for choice in range(2)] == [3, 3]


# ---- the request ends as a whole ----


@pytest.mark.parametrize("steps", [None, 0, 1, 2])
def test_an_aborted_request_ends_once_with_all_its_choices(steps: int | None) -> None:
    """`steps` None: its KV has not come."""
    desk = Desk(emit=ends_early, ends=(END,))
    desk.ask("A", 9, new=50, n=3)
    if steps is not None:
        desk.arrive("A")
    for _ in range(steps or 0):
        desk.step()
    desk.admission.abort("A")
    count = len(desk.replies)
    desk.safe("A")
    desk.run()
    assert desk.end("A").reason is FinishReason.CANCELLED and len(desk.replies) == count
    desk.assert_at_rest()


def test_one_choice_that_fails_ends_the_request_and_the_others_stop() -> None:
    desk = started(Desk(), new=50)
    desk.step()
    fail_once(desk)
    desk.run()
    assert desk.end("A").reason is FinishReason.ERROR and desk.code("A") is FailureCode.INTERNAL
    assert desk.choices_ended("A") == {} and desk.admission.counters.failed == 1
    desk.assert_at_rest()


def fail_once(desk: Desk) -> None:
    def fail(_: ForwardBatch) -> None:
        desk.harness.runner.on_run = lambda _: None
        raise RuntimeError("planted")

    desk.harness.runner.on_run = fail


def test_the_second_prefill_node_serves_all_choices_of_an_attempt_that_failed() -> None:
    desk = Desk()
    desk.ask("A", 9, n=3, prefills=[FIRST, SECOND])
    desk.fail("A")
    desk.safe("A", attempt=1)
    desk.arrive("A")
    desk.run()
    assert desk.asked == ["A#1", "A#2"]
    assert [desk.tokens("A", choice) for choice in range(3)] == [[1, 1, 1]] * 3
    desk.assert_at_rest()


def test_a_deadline_ends_all_choices() -> None:
    desk = Desk()
    desk.ask("A", 9, n=3, new=50, deadline_s=0.0)
    desk.arrive("A")
    desk.step()
    desk.admission.on_tick()
    desk.run()
    assert desk.code("A") is FailureCode.DEADLINE and desk.choices_ended("A") == {}
    desk.assert_at_rest()

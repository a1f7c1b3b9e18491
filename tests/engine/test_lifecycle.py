"""How requests end: limits, end tokens, cancelling in any state, faults. P38, P40 and the validation of section 1.3."""

import pytest

from engine.errors import CapacityExceeded, InvalidRequest
from engine.forward_batch import ForwardBatch
from engine.request import Request
from protocol.messages import FailureCode, FinishReason
from protocol.sampling import SamplingParams
from tests.engine.driving import greedy_request
from tests.engine.traces import VOCAB, Harness


def test_p38_a_limit_of_no_tokens_ends_at_once_without_a_forward() -> None:
    h = Harness()
    h.add("A", 5, 0)
    assert h.engine.has_work
    assert h.run() == ""
    assert h.gathered.ended["A"].reason is FinishReason.LENGTH
    assert h.gathered.ended["A"].generated == 0
    h.assert_at_rest()


def test_p38_one_token_takes_one_step() -> None:
    h = Harness()
    h.add("A", 5, 1)
    assert h.run() == "A5@0"
    assert h.generated("A") == 1


def test_p38_the_end_token_is_kept_and_ends_the_request() -> None:
    h = Harness(emit=lambda _, position: 9 if position == 7 else 1, eos=[7, 9])
    h.add("A", 5, 10)
    h.run()
    assert h.gathered.tokens["A"] == [1, 1, 9]
    assert h.gathered.ended["A"].reason is FinishReason.STOP
    h.assert_at_rest()


def test_p38_the_end_token_may_be_the_first() -> None:
    h = Harness(emit=lambda *_: 7, eos=[7])
    h.add("A", 5, 10)
    h.run()
    assert h.gathered.tokens["A"] == [7]


def test_p38_an_end_token_at_the_limit_is_a_stop() -> None:
    h = Harness(emit=lambda *_: 7, eos=[7])
    h.add("A", 5, 1)
    h.run()
    assert h.gathered.ended["A"].reason is FinishReason.STOP


def test_p38_end_tokens_can_be_ignored_per_request() -> None:
    h = Harness(emit=lambda *_: 7, eos=[7])
    h.add("A", 5, 4, ignore_eos=True)
    h.run()
    assert h.gathered.tokens["A"] == [7, 7, 7, 7]
    assert h.gathered.ended["A"].reason is FinishReason.LENGTH


def test_the_models_last_position_ends_a_request_as_its_limit_does() -> None:
    h = Harness(max_positions=12)
    h.add("A", 9, 100)
    h.run()
    assert h.generated("A") == 3
    assert h.gathered.ended["A"].reason is FinishReason.LENGTH


def test_p40_tokens_come_one_by_one_also_across_a_soft_reset() -> None:
    """`Gathered` asserts consecutive indices; outputs of earlier steps stay as they were."""
    h = Harness(num_blocks=4)
    h.add("A", 6, 6)
    h.add("B", 6, 6)
    first = h.engine.step()
    h.gathered.take(first)
    kept = list(first.tokens)
    h.run()
    assert h.engine.counters.resets == 1
    assert first.tokens == kept
    assert (h.generated("A"), h.generated("B")) == (6, 6)
    h.assert_at_rest()


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [([], "empty"), ([1, -1], "-1"), ([VOCAB], str(VOCAB)), ([1.0], "1.0"), ([True], "True"), (["a"], "'a'")],
)
def test_prompts_that_make_no_sense_are_refused(prompt: list[int], reason: str) -> None:
    h = Harness()
    with pytest.raises(InvalidRequest, match=reason):
        h.engine.add(greedy_request("A", prompt, 1))
    assert not h.engine.has_work


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_new_tokens"):
        Harness().engine.add(Request("A", [1], SamplingParams(max_new_tokens=-1)))


def test_a_duplicate_id_is_refused_while_the_first_lives_and_welcome_after() -> None:
    h = Harness()
    h.add("A", 4, 2)
    with pytest.raises(InvalidRequest, match="already"):
        h.add("A", 4, 2)
    h.run()
    h.engine.add(greedy_request("A", [1], 1))
    assert h.engine.has_work


@pytest.mark.parametrize("room", ["cache", "positions"])
def test_a_prompt_that_can_never_fit_is_refused(room: str) -> None:
    h = Harness(num_blocks=8) if room == "cache" else Harness(max_positions=32)
    assert h.engine.max_context == 32
    h.engine.validate(h.make("fits", 32, 1))
    with pytest.raises(CapacityExceeded, match="32"):
        h.engine.validate(h.make("big", 33, 1))


def test_cancelling_gives_exactly_one_end_in_any_state() -> None:
    h = Harness(tokens=8, num_blocks=16)
    h.reserve("remote", 4, 4)
    h.add("decoding", 4, 10)
    h.add("prefilling", 10, 4)
    h.add("waiting", 10, 4)
    assert h.step() == "decoding4@0 prefilling4@0"
    for name in ("remote", "decoding", "prefilling", "waiting", "unknown"):
        h.engine.abort(name)
        h.engine.abort(name)
    assert h.step() == ""
    assert {name: ended.reason for name, ended in h.gathered.ended.items()} == dict.fromkeys(
        ("remote", "decoding", "prefilling", "waiting"), FinishReason.CANCELLED
    )
    assert h.gathered.ended["decoding"].generated == 1
    assert h.engine.pages_quarantined == 1
    h.engine.free_quarantined("remote", 1)
    h.assert_at_rest()


def test_a_forward_that_fails_ends_the_requests_of_that_batch_only() -> None:
    h = Harness(max_requests_per_batch=1)
    h.add("A", 4, 3)
    h.step()
    h.add("B", 4, 2)

    def fail(_: ForwardBatch) -> None:
        h.runner.on_run = lambda _: None
        raise RuntimeError("device lost a bit")

    h.runner.on_run = fail
    h.run()
    failed = h.gathered.ended["A"]
    assert failed.reason is FinishReason.ERROR
    assert failed.failure is not None
    assert failed.failure.code is FailureCode.INTERNAL
    assert "device lost a bit" in failed.failure.message
    assert failed.generated == 1
    assert h.gathered.ended["B"].reason is FinishReason.LENGTH
    h.assert_at_rest()


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("priority", "x", "priority must be an integer"),
        ("priority", None, "priority must be an integer"),
        ("cache_salt", "\ud800", "cache_salt must be text"),
        ("cache_salt", None, "cache_salt must be text"),
        ("n", 1.5, "1.5 sequences"),
        ("n", 1025, "1025 sequences"),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused_and_harms_nobody(field: str, value: object, reason: str) -> None:
    h = Harness(sharing=True)
    h.add("A", 9, 3)
    wrong = h.make("B", 9, 3)
    setattr(wrong, field, value)
    with pytest.raises(InvalidRequest, match=reason):
        h.engine.add(wrong)
    h.run()
    assert h.generated("A") == 3
    h.assert_at_rest()


def test_a_prompt_is_the_requests_own() -> None:
    h, prompt = Harness(), [2, 3, 4]
    h.add("A", prompt, 3)
    prompt.append(5)
    assert h.step() == "A3@0"
    prompt.append(6)
    h.run()
    assert h.generated("A") == 3

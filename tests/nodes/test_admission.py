"""Which request runs, waits, is tried again or is refused, one event at a time."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from decode_node.retries import MAX_ATTEMPTS
from protocol.gates import GateClient, Gates
from protocol.messages import Failure, FailureCode, FinishReason, PrefillAddress
from tests.nodes.desk import FIRST, PAGE, SECOND, Desk

# ---- the way of a request ----


def test_a_request_fetches_joins_answers_and_gives_its_pages_back() -> None:
    desk = Desk()
    desk.ask("A", 9)
    fetch = desk.fetch("A")
    assert fetch.peer == FIRST and list(fetch.tokens) == list(range(2, 10))
    assert len(fetch.tables[0]) == 2, "the last token is computed here, and its page is not fetched"
    desk.arrive("A")
    desk.safe("A")
    desk.run()
    assert desk.tokens("A") == [1, 1, 1]
    assert desk.end("A").reason is FinishReason.LENGTH and desk.end("A").ledger.attempts == 1
    desk.assert_at_rest()


@pytest.mark.parametrize(("tokens", "fetched"), [(2, 1), (PAGE, 1), (PAGE + 1, 1), (PAGE + 2, 2), (2 * PAGE + 1, 2)])
def test_the_pages_fetched_are_those_of_the_prompt_without_its_last_token(tokens: int, fetched: int) -> None:
    desk = Desk()
    desk.ask("A", tokens)
    assert len(desk.fetch("A").tables[0]) == fetched


@pytest.mark.parametrize("local", [False, True])
def test_a_prompt_of_one_token_asks_nobody(local: bool) -> None:
    desk = Desk(local=local)
    desk.ask("A", 1, prefills=[])
    desk.run()
    assert desk.asked == [] and desk.tokens("A") == [1, 1, 1]
    assert desk.end("A").ledger.prefill_node == "" and desk.end("A").failure is None
    desk.assert_at_rest()


def test_local_prefill_asks_nobody() -> None:
    desk = Desk(local=True)
    desk.ask("A", 30)
    desk.run()
    assert desk.asked == [] and len(desk.tokens("A")) == 3
    assert desk.end("A").ledger.writes == 0
    desk.assert_at_rest()


def test_no_new_tokens_end_without_one() -> None:
    desk = Desk()
    desk.ask("A", new=0)
    desk.arrive("A")
    desk.safe("A")
    desk.run()
    assert desk.tokens("A") == [] and desk.end("A").reason is FinishReason.LENGTH
    desk.assert_at_rest()


# ---- the queue ----


def test_requests_start_first_come_first_served_also_when_a_later_one_would_fit() -> None:
    desk = Desk(blocks=6)
    for name, tokens in (("A", 13), ("B", 12), ("C", 5)):
        desk.ask(name, tokens)
    assert desk.asked == ["A#1"] and desk.admission.waiting == 2
    desk.arrive("A")
    desk.safe("A")
    desk.run()
    assert desk.asked == ["A#1", "B#1", "C#1"]


def test_one_token_prompts_queue_with_the_others() -> None:
    desk = Desk(blocks=6)
    for name, tokens in (("A", 13), ("B", 12), ("C", 1)):
        desk.ask(name, tokens)
    desk.run()
    assert desk.ends("C") == [] and desk.admission.waiting == 2


def test_a_full_queue_refuses_at_once_and_keeps_those_it_has() -> None:
    desk = Desk(blocks=4, max_queue=2)
    for name in "ABCD":
        desk.ask(name, 13)
    assert desk.code("D") is FailureCode.OVERLOADED
    assert desk.admission.waiting == 2 and not any(desk.ends(name) for name in "ABC")


def test_a_failed_attempt_goes_back_to_the_head_of_the_queue() -> None:
    desk = Desk(blocks=4)
    desk.ask("A", 13)
    desk.ask("B", 13)
    desk.fail("A")
    assert desk.asked == ["A#1"], "its pages are in quarantine, and there are no others"
    desk.safe("A")
    assert desk.asked == ["A#1", "A#2"]


# ---- refusals ----


def test_a_key_that_is_running_is_refused_and_the_first_goes_on() -> None:
    desk = Desk()
    desk.ask("A")
    desk.ask("A")
    assert desk.code("A") is FailureCode.INVALID
    desk.arrive("A")
    desk.run()
    assert len(desk.tokens("A")) == 3 and len(desk.ends("A")) == 2


@pytest.mark.parametrize(
    ("tokens", "code"), [(4 * PAGE + 1, FailureCode.TOO_LONG), (1001, FailureCode.INVALID)], ids=["long", "foreign"]
)
def test_an_impossible_prompt_is_refused_before_anything_is_reserved(tokens: int, code: FailureCode) -> None:
    desk = Desk(blocks=4)
    desk.ask("A", tokens)
    assert desk.code("A") is code and desk.asked == []
    desk.assert_at_rest()


def test_a_draining_node_takes_nothing_new_and_finishes_what_it_has() -> None:
    desk = Desk()
    desk.ask("A")
    desk.admission.draining = True
    desk.ask("B")
    assert desk.code("B") is FailureCode.DRAINING
    desk.arrive("A")
    desk.run()
    assert desk.end("A").failure is None


def test_without_a_prefill_node_a_longer_prompt_is_refused() -> None:
    desk = Desk()
    desk.ask("A", prefills=[])
    assert desk.code("A") is FailureCode.NO_PREFILL and desk.end("A").ledger.attempts == 0
    desk.assert_at_rest()


# ---- trying again ----

GIVE_UP = {FailureCode.INVALID, FailureCode.TOO_LONG, FailureCode.DEADLINE}
SAID_AS_IT_IS = {FailureCode.OVERLOADED, FailureCode.INCOMPATIBLE}
SAME_AGAIN = [FailureCode.STALE_PEER, FailureCode.TRANSFER_FAILED]


@pytest.mark.parametrize("code", FailureCode)
def test_who_is_asked_next_depends_on_the_failure(code: FailureCode) -> None:
    desk = Desk()
    desk.ask("A", prefills=[FIRST, SECOND])
    desk.fail("A", code)
    if code in GIVE_UP:
        assert desk.code("A") is code and desk.asked == ["A#1"]
        return
    assert desk.fetch("A").peer == SECOND and desk.asked == ["A#1", "A#2"]
    desk.fail("A", code)
    if code in SAME_AGAIN:
        assert desk.fetch("A").peer == FIRST and desk.asked[-1] == "A#3"
    else:
        assert len(desk.source.fetches) == 2
        assert desk.code("A") is (code if code in SAID_AS_IT_IS else FailureCode.NO_PREFILL)


@pytest.mark.parametrize("last", [FailureCode.INCOMPATIBLE, FailureCode.NODE_LOST])
def test_one_prefill_node_that_goes_with_this_one_is_enough_for_it_not_to_be_to_blame(last: FailureCode) -> None:
    desk = Desk()
    desk.ask("A", prefills=[FIRST, SECOND])
    desk.fail("A", FailureCode.NODE_LOST if last is FailureCode.INCOMPATIBLE else FailureCode.INCOMPATIBLE)
    desk.fail("A", last)
    assert desk.code("A") is FailureCode.NO_PREFILL


@pytest.mark.parametrize("code", SAME_AGAIN, ids=lambda code: code.value)
def test_the_only_peer_is_asked_again_until_there_were_enough_attempts(code: FailureCode) -> None:
    desk = Desk()
    desk.ask("A")
    for attempt in range(1, MAX_ATTEMPTS + 1):
        assert desk.fetch("A").key.attempt == attempt
        desk.fail("A", code)
    assert desk.code("A") is FailureCode.NO_PREFILL and len(desk.source.fetches) == MAX_ATTEMPTS
    assert desk.end("A").ledger.attempts == MAX_ATTEMPTS
    assert desk.admission.counters.retried == MAX_ATTEMPTS - 1


def test_every_prefill_node_is_asked_however_many_are_gone() -> None:
    desk = Desk()
    peers = [PrefillAddress(f"p{number}", f"p{number}", f"tcp://p{number}:1") for number in range(2 * MAX_ATTEMPTS)]
    desk.ask("A", prefills=peers)
    for peer in peers:
        assert desk.fetch("A").peer == peer
        desk.fail("A", FailureCode.NODE_LOST)
    assert desk.code("A") is FailureCode.NO_PREFILL


def test_attempts_are_numbered_on_from_those_of_other_nodes() -> None:
    desk = Desk()
    desk.ask("A", attempts=5)
    desk.fail("A", FailureCode.TRANSFER_FAILED)
    assert desk.asked == ["A#6", "A#7"]


def test_while_draining_nothing_is_tried_again() -> None:
    desk = Desk()
    desk.ask("A", prefills=[FIRST, SECOND])
    desk.admission.draining = True
    desk.fail("A", FailureCode.NODE_LOST)
    assert desk.code("A") is FailureCode.NO_PREFILL and desk.asked == ["A#1"]


# ---- pages ----


def test_each_attempt_has_pages_of_its_own_until_its_own_are_safe() -> None:
    desk = Desk(blocks=9)
    desk.ask("A", prefills=[FIRST, SECOND])
    first = {block for block, _ in desk.owned("A", 1)}
    desk.fail("A")
    assert desk.owned("A", 1) == {(block, "quarantined") for block in first}
    second = {block for block, _ in desk.owned("A", 2)}
    assert len(second) == 3 and not first & second
    desk.arrive("A")
    desk.run()
    assert desk.end("A").failure is None
    assert desk.engine.pages_quarantined == 3 and desk.engine.pages_free == 6
    desk.safe("A", attempt=1)
    desk.assert_at_rest()


def test_pages_that_are_safe_before_the_attempt_failed_never_stay_in_quarantine() -> None:
    desk = Desk()
    desk.ask("A")
    desk.safe("A")
    assert desk.engine.pages_quarantined == 0 and len(desk.owned("A", 1)) == 3
    desk.fail("A", FailureCode.NODE_LOST)
    desk.assert_at_rest()


@pytest.mark.parametrize("safe_first", [True, False])
def test_pages_that_are_safe_stay_the_requests_own_once_kv_arrived(safe_first: bool) -> None:
    desk = Desk()
    desk.ask("A")
    if safe_first:
        desk.safe("A")
    desk.arrive("A")
    if not safe_first:
        desk.safe("A")
    assert {state for _, state in desk.owned("A", 1)} == {"held"}
    desk.run()
    assert desk.end("A").failure is None
    desk.assert_at_rest()


def test_a_key_whose_old_pages_are_in_quarantine_is_refused() -> None:
    desk = Desk()
    desk.ask("A")
    desk.admission.abort("A")
    desk.ask("A")
    first, second = desk.ends("A")
    assert first.reason is FinishReason.CANCELLED
    assert second.failure is not None and second.failure.code is FailureCode.INVALID
    desk.safe("A", attempt=1)
    desk.ask("A")
    desk.arrive("A")
    desk.run()
    assert desk.ends("A")[-1].failure is None


# ---- ends from outside ----


def queued(desk: Desk, deadline_s: float) -> None:
    desk.ask("before", 13)
    desk.ask("A", 13, deadline_s=deadline_s)


def waiting(desk: Desk, deadline_s: float) -> None:
    desk.ask("A", 13, deadline_s=deadline_s)


def waiting_again(desk: Desk, deadline_s: float) -> None:
    desk.ask("A", 5, deadline_s=deadline_s)
    desk.fail("A")


def at_the_join_gate(desk: Desk, deadline_s: float) -> None:
    waiting(desk, deadline_s)
    desk.arrive("A")


def running(desk: Desk, deadline_s: float) -> None:
    desk.ask("A", 13, new=1000, deadline_s=deadline_s)
    desk.arrive("A")
    desk.step()


STATES: dict[str, Callable[[Desk, float], None]] = {
    "queued": queued,
    "waiting": waiting,
    "waiting again": waiting_again,
    "at the join gate": at_the_join_gate,
    "running": running,
}
ENDINGS: dict[str, Callable[[Desk], None]] = {
    "abort": lambda desk: desk.admission.abort("A"),
    "abort all": lambda desk: desk.admission.abort_all(),
    "deadline": lambda desk: desk.admission.on_tick(),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("state", STATES)
def test_a_request_ends_once_in_whatever_state_it_is(state: str, ending: str, tmp_path: Path) -> None:
    gates = Gates(str(tmp_path / "gates"))
    gates.start()
    client = GateClient(str(tmp_path / "gates"))
    if state == "at the join gate":
        client.hold("decode:join")
    desk = Desk(blocks=4, gates=gates)
    STATES[state](desk, 0.0 if ending == "deadline" else 60.0)
    ENDINGS[ending](desk)
    client.release("decode:join")
    desk.admission.on_gate_released()
    desk.run()
    if ending == "deadline":
        assert desk.code("A") is FailureCode.DEADLINE
    else:
        assert desk.end("A").reason is FinishReason.CANCELLED and desk.end("A").failure is None
    asked_to_stop = [key.request for key, _ in desk.source.aborts if key.request == "A"]
    assert asked_to_stop == (["A"] if state in ("waiting", "waiting again", "at the join gate") else [])
    if asked_to_stop:
        assert desk.engine.pages_quarantined > 0
    desk.admission.abort_all()
    for fetch in desk.source.fetches:
        desk.admission.pages_safe(fetch.key)
    desk.assert_at_rest()
    assert len(desk.ends("A")) == 1
    client.close()
    gates.close()


def test_the_source_is_told_why_it_shall_stop() -> None:
    desk = Desk()
    desk.ask("A")
    desk.ask("B", deadline_s=0.0)
    desk.admission.abort("A")
    desk.admission.on_tick()
    (first, cancelled), (second, late) = desk.source.aborts
    assert (first.request, cancelled) == ("A", None)
    assert second.request == "B" and late is not None and late.code is FailureCode.DEADLINE


def test_what_comes_for_a_request_that_is_gone_changes_nothing() -> None:
    desk = Desk()
    desk.ask("A")
    desk.admission.abort("A")
    desk.safe("A")
    count = len(desk.replies)
    desk.arrive("A")
    desk.fail("A")
    desk.safe("A")
    desk.admission.abort("A")
    assert len(desk.replies) == count
    desk.assert_at_rest()


def test_what_comes_late_for_an_earlier_attempt_does_not_touch_the_present_one() -> None:
    desk = Desk()
    desk.ask("A", prefills=[FIRST, SECOND])
    old = desk.fetch("A").key
    desk.fail("A")
    count = len(desk.source.fetches)
    desk.admission.kv_failed(old, Failure(FailureCode.NODE_LOST, "too late"))
    assert len(desk.source.fetches) == count and desk.ends("A") == []
    desk.arrive("A")
    desk.run()
    assert len(desk.tokens("A")) == 3


def test_a_held_join_gate_keeps_a_request_out_of_the_batch_until_it_is_released(tmp_path: Path) -> None:
    gates = Gates(str(tmp_path / "gates"))
    gates.start()
    client = GateClient(str(tmp_path / "gates"))
    client.hold("decode:join")
    desk = Desk(gates=gates)
    desk.ask("A")
    desk.arrive("A")
    desk.run()
    assert desk.tokens("A") == []
    client.release("decode:join")
    desk.admission.on_gate_released()
    desk.run()
    assert len(desk.tokens("A")) == 3
    client.close()
    gates.close()


# ---- anything, in any order ----


@pytest.mark.parametrize("run", range(20))
def test_every_request_ends_exactly_once_whatever_happens(run: int, seed: int) -> None:
    rng = random.Random(f"{seed}/{run}")
    desk = Desk(blocks=12, max_queue=6)
    names = [f"R{i}" for i in range(30)]
    for name in names:
        prefills, n = rng.choice([[], [FIRST], [FIRST, SECOND]]), rng.choice([1, 1, 2, 3])
        desk.ask(name, rng.randint(1, 20), prefills=prefills, new=rng.randint(0, 6), n=n)
        for _ in range(rng.randint(0, 4)):
            random_event(desk, rng, names)
    while desk.admission.jobs or desk.engine.pages_quarantined:
        random_event(desk, rng, names)
    desk.assert_at_rest()
    assert all(len(desk.ends(name)) == 1 for name in names)
    counters = desk.admission.counters
    assert counters.received == len(names)
    assert counters.refused + counters.finished + counters.failed + counters.cancelled == len(names)


def random_event(desk: Desk, rng: random.Random, names: list[str]) -> None:
    """As the messenger, the router or the engine could cause it: outcome and safety once each, in any order."""
    desk.engine.check()
    kind = rng.choice(["outcome", "outcome", "safe", "abort", "step", "step"])
    if kind == "step" and desk.engine.has_work:
        desk.step()
    elif kind == "abort" and rng.random() < 0.1:
        desk.admission.abort(rng.choice(names), rng.choice([None, 0, 1, 2]))
    elif kind in ("outcome", "safe") and desk.source.fetches:
        fetch = rng.choice(desk.source.fetches)
        if kind == "safe":
            desk.admission.pages_safe(fetch.key)
        elif rng.random() < 0.5:
            desk.arrive(fetch.key.request)
        else:
            desk.fail(fetch.key.request, rng.choice(list(FailureCode)))

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.books import answer_problems, page_problems
from deploy.cluster_api import NodeView
from tests.deploy.answers import answer, ledger

durations = st.floats(min_value=0, max_value=100, allow_nan=False)


def node(name: str = "decode-0", free: int = 128, quarantined: int = 0) -> NodeView:
    return NodeView("decode", name, True, "net", pages_total=128, pages_free=free, pages_quarantined=quarantined)


def test_whole_answers_with_sound_ledgers_have_no_problem() -> None:
    assert answer_problems([answer(), answer()]) == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"failure": "HTTP 503: no decode node"}, "HTTP 503"),
        ({"text": "  "}, "empty"),
        ({"ledger": ledger(ttft_s=0.5)}, "sum to 0.300000 s, not to 0.500000 s"),
        ({"ledger": ledger(other_s=-1e-5, ttft_s=0.26 - 1e-5)}, "negative"),
        ({"ledger": ledger(ttft_s=0.30001)}, "sum to"),
        ({"ledger": ledger(writes=0)}, "no KV was counted"),
    ],
)
def test_what_is_wrong_with_an_answer_is_named(changes: dict[str, object], problem: str) -> None:
    (found,) = answer_problems([answer(), answer(**changes)])
    assert found.startswith("capital: ")
    assert problem in found


@given(st.tuples(durations, durations, durations, durations, durations, durations))
def test_parts_that_sum_to_the_ttft_never_fail_whatever_their_sizes(
    parts: tuple[float, float, float, float, float, float],
) -> None:
    names = ("router_queue_s", "queue_s", "prefill_s", "exposed_transfer_s", "first_step_s", "other_s")
    fields = dict(zip(names, parts, strict=True))
    assert answer_problems([answer(ledger=ledger(**fields, ttft_s=sum(parts)))]) == []


def test_a_prompt_computed_on_the_decode_node_moves_no_kv() -> None:
    assert answer_problems([answer(ledger=ledger(prefill_node="", provider="", writes=0, bytes=0))]) == []


def test_free_pages_on_every_node_are_no_problem() -> None:
    assert page_problems([node("decode-0"), node("prefill-0")], ["prefill-0", "decode-0"]) == []


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ([node(free=127)], "127 of 128 pages free"),
        ([node(quarantined=2)], "2 quarantined"),
        ([], "decode-0 is gone"),
    ],
)
def test_pages_that_did_not_come_back_are_named(found: list[NodeView], problem: str) -> None:
    (said,) = page_problems(found, ["decode-0"])
    assert problem in said

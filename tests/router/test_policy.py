"""Which nodes are chosen, from plain members."""

from typing import Any

from protocol.context import ContextLayout, ContextPart
from protocol.messages import Role
from router.membership import Member
from router.policy import MAX_PREFILLS, able_decodes, misfits, rank_decodes, rank_prefills, why_unfed
from tests.router.fake_node import node_status

LIMIT = 10


def decode(name: str, in_flight: int = 0, **status: Any) -> Member:
    return Member(node_status(name, **status), 0.0, None, in_flight)


def prefill(name: str, in_flight: int = 0, **status: Any) -> Member:
    made = {"role": Role.PREFILL, "control_address": f"tcp://{name}", **status}
    return Member(node_status(name, **made), 0.0, None, in_flight)


def ranked(decodes: list[Member], prompt: int = 16, tried: tuple[str, ...] = ()) -> list[str]:
    return [member.instance for member in rank_decodes(able_decodes(decodes, []), prompt, LIMIT, tried)]


def test_the_least_loaded_decode_node_comes_first() -> None:
    assert ranked([decode("a", running=2), decode("b", waiting=1), decode("c", in_flight=3)]) == ["b", "a", "c"]


def test_of_equal_load_the_one_with_most_free_pages_comes_first() -> None:
    assert ranked([decode("a", pages_free=10), decode("b", pages_free=20)]) == ["b", "a"]


def test_a_node_without_room_for_the_prompt_comes_last_but_comes() -> None:
    assert ranked([decode("a", pages_free=1), decode("b", running=5)], prompt=17) == ["b", "a"]


def test_what_the_router_just_sent_counts_before_the_next_heartbeat() -> None:
    assert ranked([decode("a", in_flight=1), decode("b")]) == ["b", "a"]


def test_nodes_that_cannot_take_it_are_left_out() -> None:
    out = [
        decode("tried"),
        decode("full", in_flight=LIMIT),
        decode("loading", ready=False),
        decode("stopping", draining=True),
        decode("alone-cannot", local_prefill=False),
        Member(node_status("refused"), 0.0, "another tokenizer"),
    ]
    assert ranked([*out, decode("good")], tried=("tried",)) == ["good"]


def test_a_decode_node_needs_a_prefill_node_of_its_own_kind() -> None:
    decodes = [decode("a", local_prefill=False), decode("b", local_prefill=False, compatibility="other")]
    assert able_decodes(decodes, []) == []
    assert able_decodes(decodes, [prefill("p", ready=False)]) == []
    assert able_decodes(decodes, [prefill("p"), prefill("q")]) == decodes[:1]


WANTS: dict[str, Any] = {"local_prefill": False, "context": ContextLayout((ContextPart("hidden", 8),))}


def test_a_decode_node_needs_a_prefill_node_that_computes_what_it_wants() -> None:
    picky, plain = decode("picky", **WANTS), decode("plain", local_prefill=False)
    computes = prefill("q", context=picky.status.context)
    assert able_decodes([picky, plain], [prefill("p")]) == [plain]
    assert able_decodes([picky, plain], [prefill("p"), computes]) == [picky, plain]
    assert rank_prefills([prefill("p"), computes], picky) == [computes]


def test_why_no_prefill_node_can_feed_it() -> None:
    picky, other = decode("picky", **WANTS), prefill("other", compatibility="other", dtype="float16")
    reason = why_unfed(picky, [prefill("p"), other])
    assert reason is not None and "not with p, as" in reason and "not with other, as" in reason and "float16" in reason
    assert why_unfed(picky, [prefill("p"), prefill("q", context=picky.status.context)]) is None
    assert why_unfed(picky, []) is None, "one may come"
    assert why_unfed(picky, [prefill("p", ready=False)]) is None, "nor is one that is not in use a reason"
    assert why_unfed(decode("alone", context=picky.status.context), [prefill("p")]) is None, "it needs none"


def test_pairs_that_do_not_go_together_are_found_from_either_side() -> None:
    picky, plain, feeder = decode("picky", **WANTS), decode("plain", local_prefill=False), prefill("p")
    alone, idle = decode("alone", context=picky.status.context), prefill("idle", ready=False)
    members = [picky, plain, feeder, alone, idle]
    for one in (picky, feeder):
        ((source, target, reason),) = misfits(one, members)
        assert (source, target) == (feeder, picky) and "--context hidden" in reason
    assert misfits(plain, members) == [] == misfits(alone, members)


def test_prefill_nodes_are_ranked_by_load_then_free_pages() -> None:
    prefills = [prefill("a", waiting=2), prefill("b", pages_free=5), prefill("c", pages_free=9), prefill("d", 1)]
    assert [one.instance for one in rank_prefills(prefills, decode("x"))] == ["c", "b", "d", "a"]


def test_only_prefill_nodes_of_equal_compatibility_are_ranked() -> None:
    prefills = [prefill("a", compatibility="other"), prefill("b"), prefill("c", ready=False)]
    assert [one.instance for one in rank_prefills(prefills, decode("x"))] == ["b"]


def test_the_ranking_is_bounded() -> None:
    assert len(rank_prefills([prefill(str(i)) for i in range(50)], decode("x"))) == MAX_PREFILLS

"""Sharing blocks of equal prefixes, step by step: P26 to P33, B11 to B13 and their spares. No model: P26 and the others
with one are in test_families."""

from typing import Any

import pytest

from engine.ledger import BlockState, ledger
from tests.engine.traces import T1, Harness

X = list(range(100, 116))
"""A prompt of four pages."""


def answer(_: str, position: int) -> int:
    """Another token at every position, the same for everybody."""
    return 500 + position


def sharing(num_blocks: int = 16, tokens: int = 64, **settings: Any) -> Harness:
    return Harness(num_blocks, tokens, emit=answer, sharing=True, **settings)


def table(h: Harness, name: str) -> list[int]:
    return list(h.engine._cache.tables(h.requests[name].owner)[0])


def distinct_blocks(h: Harness) -> int:
    return len({entry["block"] for entry in h.engine.ledger() if entry["state"] == "held"})


def cached(h: Harness) -> int:
    return h.engine.pages_cached


def run_a(h: Harness) -> list[int]:
    """P26's A: 10 prompt tokens, 3 new. Its whole sequence."""
    request = h.add("A", X[:10], 3)
    h.run()
    return request.tokens


def test_p26_full_blocks_stay_and_an_equal_prompt_begins_with_them() -> None:
    h = sharing()
    run_a(h)
    assert cached(h) == 3, "10 + 2 tokens in KV, the third page mixes prompt and answer"
    h.add("B", X[:10], 3)
    assert h.step() == "B2@8"
    h.run()
    assert h.gathered.tokens["A"] == h.gathered.tokens["B"]
    h.assert_at_rest()


def test_p27_of_a_prompt_that_is_cached_as_a_whole_the_last_page_is_computed() -> None:
    h = sharing()
    run_a(h)
    h.add("C", X[:8], 1)
    assert h.step() == "C4@4"


def test_p28_the_next_turn_of_a_conversation_hits_the_answer_too() -> None:
    h = sharing()
    turn = [*run_a(h), 7, 8]
    assert len(turn) == 15
    h.add("D", turn, 2)
    assert h.step() == "D3@12"


def test_p29_a_page_is_hit_only_behind_the_same_prefix() -> None:
    h = sharing()
    run_a(h)
    h.add("E", [*X[:5], 1, 2, 3, 4], 1)
    assert h.step() == "E5@4"
    h.add("F", [*X[4:8], 9], 1)
    assert h.step() == "F5@0"


def test_p30_equal_prompts_of_one_batch_are_both_computed_then_share() -> None:
    h = sharing()
    h.add("A", X[:9], 2)
    h.add("B", X[:9], 2)
    assert h.step() == "A9@0 B9@0"
    assert table(h, "A")[:2] == table(h, "B")[:2]
    assert distinct_blocks(h) == 4
    h.run()
    h.assert_at_rest()


def test_p31_a_block_is_free_when_its_last_user_has_left() -> None:
    h = sharing()
    h.add("A", X[:9], 6)
    h.step()
    h.add("B", X[:9], 2)
    assert h.step() == "A1@9 B1@8"
    shared = table(h, "A")[:2]
    assert table(h, "B")[:2] == shared and table(h, "B")[2] != table(h, "A")[2]
    assert [h.engine.prefix.users_of(block) for block in shared] == [2, 2]  # type: ignore[union-attr]
    h.step()
    assert h.gathered.ended.keys() == {"B"}
    assert [h.engine.prefix.users_of(block) for block in shared] == [1, 1]  # type: ignore[union-attr]
    h.run()
    assert h.generated("A") == 6


def test_p31_cancelling_one_user_leaves_the_other_alone() -> None:
    h = sharing()
    h.add("A", X[:9], 6)
    h.step()
    h.add("B", X[:9], 6)
    h.step()
    shared = table(h, "B")[:2]
    h.engine.abort("A")
    h.step()
    assert table(h, "B")[:2] == shared
    h.run()
    assert h.gathered.tokens["B"] == [answer("", 9 + i) for i in range(6)]
    h.assert_at_rest()


@pytest.mark.parametrize(("policy", "computed"), [("most_recent", "A25@12"), ("lru", "A217@0"), ("all", "A217@0")])
def test_p32_only_as_much_is_evicted_as_is_needed(policy: Any, computed: str) -> None:
    """4 plain free, 4 initialised, 5 needed: the most recent policy takes the tail of A's chain, lru its head."""
    h = sharing(8, eviction_policy=policy)
    h.add("A", X, 1)
    h.run()
    assert cached(h) == 4
    h.add("B", list(range(300, 320)), 1)
    h.step()
    assert h.engine.prefix is not None
    assert h.engine.prefix.counters.evictions == (4 if policy == "all" else 1)
    h.add("A2", [*X, 1], 1)
    assert h.step() == computed


def test_p33_models_with_sliding_layers_share_nothing() -> None:
    h = Harness(16, geometry=T1, sharing=True)
    assert h.engine.prefix is None
    for name in "AB":
        h.add(name, X, 1)
        assert h.step() == f"{name}16@0"
    h.assert_at_rest()


def test_p33_nor_do_others_if_it_is_off() -> None:
    h = Harness(16)
    for name in "AB":
        h.add(name, X, 1)
        assert h.step() == f"{name}16@0"
    assert h.engine.pages_cached == 0


def test_b11_a_cached_block_found_for_one_request_is_not_given_to_another_in_the_same_step() -> None:
    h = sharing(4)
    h.add("X", X[:8], 1)
    h.run()
    assert (cached(h), h.engine.pages_free) == (2, 4)
    h.add("Y", list(range(300, 312)), 1)
    h.add("X2", [*X[:8], 1], 1)
    assert h.step() == "Y12@0", "3 of 4 blocks: one of X's is gone, and there is no room beside it"
    assert h.step() == "X25@4"
    h.assert_at_rest()


def test_b11_a_hit_keeps_its_blocks_from_being_evicted_for_the_rest_of_the_same_request() -> None:
    h = sharing(4)
    h.add("X", X[:8], 1)
    h.run()
    h.add("X2", [*X[:8], *range(300, 308)], 1)
    assert h.step() == "X28@8"
    h.assert_at_rest()


def test_b12_the_chain_goes_on_behind_a_page_that_was_computed_twice() -> None:
    h = sharing()
    h.add("A", X[:8], 1)
    h.run()
    h.add("B", X[:8], 1)
    assert h.step() == "B4@4"
    assert cached(h) == 2, "the page computed twice is kept once"
    h.add("C", X[:12], 1)
    assert h.step() == "C4@8"


def test_b13_a_prefix_is_looked_up_anew_at_every_attempt() -> None:
    """B's hit is there while A leaves no room, and gone when B starts."""
    h = sharing(5)
    h.add("X", X[:8], 1)
    h.run()
    h.add("A", list(range(300, 310)), 6)
    h.step()
    h.add("B", [*X[:8], *range(400, 409)], 1)
    assert h.step() == "A1@10", "B hits 2 blocks and lacks 3 more, 2 are free"
    h.add("evicts", list(range(600, 607)), 1)
    assert h.step() == "A1@11 evicts7@0"
    assert h.run().endswith("B17@0"), "nothing of X is left"
    h.assert_at_rest()


def test_a_request_that_found_a_prefix_but_was_not_scheduled_holds_nothing() -> None:
    h = sharing(5)
    h.add("X", X[:8], 1)
    h.run()
    h.add("A", list(range(300, 310)), 6)
    h.step()
    request = h.add("B", [*X[:8], *range(400, 409)], 1)
    h.step()
    assert (request.computed, h.blocks("B"), cached(h)) == (0, 0, 2)
    h.engine.abort("B")
    h.run()
    h.assert_at_rest()


def test_another_salt_hits_nothing() -> None:
    h = sharing()
    run_a(h)
    request = h.make("B", X[:10], 1)
    request.cache_salt = "another tenant"
    h.engine.add(request)
    assert h.step() == "B10@0"


def test_a_prompt_that_a_node_holds_already_is_reserved_with_it() -> None:
    h = sharing()
    run_a(h)
    reservation = h.engine.reserve(h.make("B", X, 2))
    assert (len(reservation.tables[0]), reservation.cached) == (4, 2)
    h.engine.quarantine("B")
    assert h.engine.pages_quarantined == 2, "what was shared was never a peer's to write"
    h.engine.free_quarantined("B", 1)
    h.assert_at_rest()


def test_a_prompt_computed_elsewhere_can_be_hit_once_it_has_arrived() -> None:
    h = sharing()
    h.reserve("A", 11, 1)
    h.engine.resume("A", computed=10)
    h.run()
    h.add("B", h.requests["A"].prompt, 1)
    assert h.step() == "B3@8"


def test_a_prefill_only_prompt_that_is_all_cached_needs_no_forward() -> None:
    h = sharing()
    h.add_prefill("P", X[:8])
    assert h.run() == "P8@0"
    h.engine.release("P")
    h.add_prefill("Q", X[:8])
    assert h.run() == ""
    assert h.gathered.prefilled == ["P", "Q"]
    h.engine.release("Q")
    h.assert_at_rest()


def test_blocks_that_the_network_may_be_reading_are_not_replaced_by_equal_ones() -> None:
    h = sharing()
    h.add_prefill("P", X[:8])
    h.add_prefill("Q", X[:8])
    assert h.step() == "P8@0 Q8@0"
    assert distinct_blocks(h) == 4
    h.engine.release("P")
    h.engine.release("Q")
    h.assert_at_rest()
    assert cached(h) == 2


def test_what_is_stored_and_removed_is_told_in_order() -> None:
    h = sharing(4)
    events = []
    for name, prompt in (("A", X[:8]), ("B", list(range(300, 316)))):
        h.add(name, prompt, 1)
        while h.engine.has_work:
            output = h.engine.step()
            events += [event.stored for event in output.cache_events for _ in event.hashes]
    assert events == [True, True, False, False, True, True, True, True]


def test_the_ledger_shows_cached_blocks() -> None:
    h = sharing(4)
    h.add("A", X[:8], 1)
    h.run()
    states = [record.state for record in ledger(h.engine._cache)]
    assert (states.count(BlockState.CACHED), states.count(BlockState.FREE)) == (2, 2)

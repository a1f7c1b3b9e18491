"""Several sequences of one prompt: section 13, B06 and the one-token prompt."""

import pytest

from protocol.messages import FinishReason
from tests.engine.traces import T1, Harness

FAMILY = ["A", "A__child#1", "A__child#2"]


@pytest.mark.parametrize("sharing", [False, True])
def test_children_begin_with_what_the_parent_computed(sharing: bool) -> None:
    h = Harness(sharing=sharing)
    h.add("A", 10, 3, n=3)
    assert h.step() == "A9@0"
    held = {entry["block"] for entry in h.engine.ledger() if entry["state"] == "held"}
    assert len(held) == (2 + 3 if sharing else 3 * 3), "the last page is copied, full ones are shared if they may be"
    assert h.step() == "A1@9 A__child#11@9 A__child#21@9"
    h.run()
    assert {name: len(tokens) for name, tokens in h.gathered.tokens.items()} == {
        "A": 3,
        "A__child#1": 3,
        "A__child#2": 3,
    }
    assert h.engine.counters.forks == 2
    h.assert_at_rest()


@pytest.mark.parametrize(("blocks", "forks"), [(3, 0), (4, 1), (5, 1), (6, 2), (8, 2)])
def test_b06_children_that_do_not_fit_start_from_the_beginning(blocks: int, forks: int) -> None:
    """8 of 9 tokens are 2 blocks; each fork copies 2."""
    h = Harness(num_blocks=blocks)
    h.add("A", 9, 2, n=3)
    h.run()
    assert {name: ended.reason for name, ended in h.gathered.ended.items()} == dict.fromkeys(
        ["A", "A__child#1", "A__child#2"], FinishReason.LENGTH
    )
    assert {len(tokens) for tokens in h.gathered.tokens.values()} == {2}
    assert h.engine.counters.forks == forks
    h.assert_at_rest()


def test_of_a_prompt_of_one_token_there_is_nothing_to_share() -> None:
    h = Harness()
    h.add("A", 1, 2, n=3)
    assert h.step() == "A1@0 A__child#11@0 A__child#21@0"
    h.run()
    assert len(h.gathered.ended) == 3


def test_a_prefix_that_covers_all_but_the_last_token_leaves_one_more_to_compute() -> None:
    h = Harness(sharing=True)
    h.add("A", 9, 1)
    h.run()
    h.add("B", 9, 1, n=2)
    assert h.step() == "B4@4"
    assert h.step() == "B1@8 B__child#11@8"
    h.assert_at_rest()


def test_rings_are_copied() -> None:
    h = Harness(geometry=T1)
    h.add("A", 12, 4, n=2)
    h.run()
    assert {len(tokens) for tokens in h.gathered.tokens.values()} == {4}
    h.assert_at_rest()


def test_a_parent_that_ends_before_the_fork_ends_its_children_with_it() -> None:
    h = Harness(tokens=4)
    h.add("A", 10, 4, n=3)
    h.step()
    h.engine.abort("A")
    h.run()
    assert {name: ended.reason for name, ended in h.gathered.ended.items()} == dict.fromkeys(
        ["A", "A__child#1", "A__child#2"], FinishReason.CANCELLED
    )
    h.assert_at_rest()


def test_one_child_can_be_cancelled_before_and_after_its_birth() -> None:
    h = Harness(tokens=4)
    h.add("A", 10, 4, n=3)
    h.step()
    h.engine.abort("A__child#1")
    h.steps(3)
    h.engine.abort("A__child#2")
    h.run()
    reasons = {name: ended.reason for name, ended in h.gathered.ended.items()}
    cancelled = dict.fromkeys(["A__child#1", "A__child#2"], FinishReason.CANCELLED)
    assert reasons == {"A": FinishReason.LENGTH, **cancelled}
    h.assert_at_rest()


def test_ids_of_children_are_taken_from_the_beginning() -> None:
    h = Harness(tokens=4)
    h.add("A", 10, 4, n=2)
    with pytest.raises(ValueError, match="A__child#1"):
        h.add("A__child#1", 4, 1)


def test_each_sequence_draws_its_own_tokens() -> None:
    h = Harness()
    h.add("A", 10, 3, n=3, temperature=1.0, seed=5)
    h.steps(2)
    seeds = [row.sample.seed for row in h.runner.batches[-1].rows if row.sample]
    assert seeds == [5, 6, 7]
    h.run()


@pytest.mark.parametrize("sharing", [False, True])
def test_children_of_a_prompt_that_came_from_elsewhere_begin_with_what_arrived(sharing: bool) -> None:
    h = Harness(sharing=sharing)
    assert len(h.reserve("A", 10, 3, n=3)) == 3, "one set of blocks is to be written to, whatever n"
    h.engine.resume("A", computed=9)
    held = {entry["block"] for entry in h.engine.ledger() if entry["state"] == "held"}
    assert len(held) == (2 + 3 if sharing else 3 * 3), "the last page is copied, full ones are shared if they may be"
    assert h.step() == "A1@9 A__child#11@9 A__child#21@9"
    h.run()
    assert {name: h.generated(name) for name in h.gathered.ended} == dict.fromkeys(FAMILY, 3)
    assert h.engine.counters.forks == 2
    h.assert_at_rest()


def test_where_less_has_come_the_parent_computes_the_rest_before_it_is_forked() -> None:
    h = Harness(tokens=3)
    h.reserve("A", 10, 1, n=3)
    h.engine.resume("A", computed=4)
    assert h.run() == "A3@4 / A2@7 / A1@9 A__child#11@9 A__child#21@9"
    h.assert_at_rest()


@pytest.mark.parametrize(("blocks", "forks"), [(3, 0), (4, 0), (6, 1), (9, 2)])
def test_children_that_do_not_fit_beside_what_arrived_compute_the_prompt_here(blocks: int, forks: int) -> None:
    h = Harness(num_blocks=blocks)
    h.reserve("A", 10, 2, n=3)
    h.engine.resume("A", computed=9)
    h.run()
    assert {name: h.generated(name) for name in h.gathered.ended} == dict.fromkeys(FAMILY, 2)
    assert h.engine.counters.forks == forks
    h.assert_at_rest()


def test_while_its_kv_is_awaited_a_whole_family_is_cancelled_in_quarantine_or_short_of_one_child() -> None:
    h = Harness()
    h.reserve("A", 10, 2, n=3)
    h.engine.abort("A__child#1")
    h.engine.abort("A")
    h.run()
    assert {name: end.reason for name, end in h.gathered.ended.items()} == dict.fromkeys(FAMILY, FinishReason.CANCELLED)
    assert h.engine.pages_quarantined == 3
    h.engine.free_quarantined("A", 1)
    h.assert_at_rest()


def test_a_family_that_leaves_for_another_attempt_has_no_end_and_its_ids_are_free_again() -> None:
    h = Harness()
    h.reserve("A", 10, 2, n=3)
    h.engine.quarantine("A")
    h.run()
    assert not h.gathered.ended
    h.reserve("A", 10, 2, attempt=2, n=3)
    h.engine.free_quarantined("A", 1)
    h.engine.resume("A", computed=9)
    h.run()
    assert set(h.gathered.ended) == set(FAMILY)
    h.assert_at_rest()


def test_a_prompt_of_one_token_that_was_reserved_is_forked_with_nothing_computed() -> None:
    h = Harness()
    h.reserve("A", 1, 2, n=2)
    h.engine.resume("A", computed=0)
    assert h.step() == "A1@0 A__child#11@0"
    h.run()
    h.assert_at_rest()


def test_a_family_that_wants_no_tokens_ends_on_arrival() -> None:
    h = Harness()
    h.reserve("A", 10, 0, n=3)
    h.engine.resume("A", computed=9)
    h.run()
    assert {name: end.reason for name, end in h.gathered.ended.items()} == dict.fromkeys(FAMILY, FinishReason.LENGTH)
    h.assert_at_rest()

"""The 32 bits of an immediate, and the slots that hand them out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.immediates import MAX_GENERATION, SLOTS, ImmediateSlots, pack, unpack


@given(st.integers(0, SLOTS - 1), st.integers(1, MAX_GENERATION))
def test_packing_is_reversible_and_fits_32_bits(slot: int, generation: int) -> None:
    assert unpack(pack(slot, generation)) == (slot, generation)
    assert 0 < pack(slot, generation) < 1 << 32


@pytest.mark.parametrize("slot, generation", [(-1, 1), (SLOTS, 1), (0, 0), (0, MAX_GENERATION + 1)])
def test_what_does_not_fit_is_refused(slot: int, generation: int) -> None:
    with pytest.raises(AssertionError):
        pack(slot, generation)


def test_every_slot_is_handed_out_once() -> None:
    slots = ImmediateSlots()
    taken = [slots.take() for _ in range(SLOTS)]
    assert slots.take() is None and slots.free == 0
    assert {unpack(immediate)[0] for immediate in taken if immediate} == set(range(SLOTS))


def test_a_slot_that_comes_back_has_another_generation() -> None:
    slots = ImmediateSlots()
    taken = [slots.take() for _ in range(SLOTS)]
    assert taken[7] is not None
    slots.give_back(taken[7])
    assert slots.take() == pack(7, 2)


def test_an_immediate_is_given_back_once() -> None:
    slots = ImmediateSlots()
    immediate = slots.take()
    assert immediate is not None
    slots.give_back(immediate)
    with pytest.raises(AssertionError):
        slots.give_back(immediate)


def test_generations_wrap_to_one() -> None:
    slots = ImmediateSlots()
    (first, *_) = [slots.take() for _ in range(SLOTS)]  # one slot stays in turn, the others stay out
    immediate = first
    for _ in range(MAX_GENERATION):
        assert immediate is not None
        slots.give_back(immediate)
        immediate = slots.take()
    assert immediate == first == pack(0, 1)

"""Choosing tokens: greedy, nucleus, and seeds that neither batching nor restarts can disturb."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.forward_batch import SampleKey
from engine.sampler import nucleus, pick, sample, uniform
from protocol.sampling import SamplingParams


def key(seed: int = 0, position: int = 0, temperature: float = 1.0, top_p: float = 1.0) -> SampleKey:
    return SampleKey(SamplingParams(max_new_tokens=1, temperature=temperature, top_p=top_p), seed, position)


LOGITS = torch.randn(5, 40, generator=torch.Generator().manual_seed(3))


def test_temperature_zero_takes_the_best() -> None:
    assert sample(LOGITS, [key(temperature=0.0)] * 5) == LOGITS.argmax(dim=-1).tolist()


def test_a_token_depends_on_its_own_row_seed_and_position_only() -> None:
    keys = [key(seed=i, position=10 + i) for i in range(5)]
    together = sample(LOGITS, keys)
    alone = [sample(LOGITS[i : i + 1], [keys[i]])[0] for i in range(5)]
    assert together == alone
    assert sample(LOGITS, keys) == together


def test_seeds_and_positions_give_different_numbers() -> None:
    numbers = {uniform(seed, position) for seed in range(20) for position in range(20)}
    assert len(numbers) == 400
    assert all(0.0 <= number < 1.0 for number in numbers)


def test_the_largest_seed_and_a_far_position_work() -> None:
    assert 0.0 <= uniform((1 << 63) - 1, 1 << 20) < 1.0


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    draws = [pick(probabilities, uniform(5, position)) for position in range(3000)]
    shares = [draws.count(token) / len(draws) for token in range(3)]
    assert all(abs(share - p) < 0.03 for share, p in zip(shares, probabilities.tolist(), strict=True)), shares


def test_top_p_keeps_the_smallest_set_that_holds_it_and_at_least_the_best() -> None:
    probabilities = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    kept = {top_p: nucleus(probabilities, top_p).nonzero().flatten().tolist() for top_p in (0.01, 0.6, 0.7, 1.0)}
    assert kept == {0.01: [1], 0.6: [1], 0.7: [1, 2], 1.0: [0, 1, 2]}


@given(
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=30),
    st.floats(0.0, 1.0, exclude_min=True),
    st.floats(0.0, 1.0, exclude_max=True),
)
@settings(deadline=None, max_examples=200, derandomize=True)
def test_a_drawn_token_is_always_in_the_nucleus(weights: list[float], top_p: float, draw: float) -> None:
    probabilities = torch.tensor(weights, dtype=torch.float64)
    probabilities /= probabilities.sum()
    token = pick(nucleus(probabilities, top_p), draw)
    better = float(probabilities[probabilities > probabilities[token]].sum())
    assert better < top_p + 1e-9


def test_tiny_and_huge_temperatures_stay_in_range() -> None:
    assert sample(LOGITS, [key(temperature=1e-300)] * 5) == LOGITS.argmax(dim=-1).tolist()
    assert all(token is not None and 0 <= token < 40 for token in sample(LOGITS, [key(temperature=100.0)] * 5))


def test_a_row_that_is_not_finite_yields_nothing_and_spares_the_others() -> None:
    logits = LOGITS.clone()
    logits[1, 7] = float("nan")
    logits[2, 0] = float("inf")
    logits[3, 0] = -float("inf")
    tokens = sample(logits, [key(temperature=0.0), *[key()] * 4])
    assert [token is None for token in tokens] == [False, True, True, False, False]


def test_a_draw_just_below_one_never_reaches_a_token_without_weight() -> None:
    weights = torch.tensor([0.3, 0.7, 0.0, 0.0], dtype=torch.float64)
    assert pick(weights, 1.0 - 2**-53) == 1
    assert pick(weights, 0.0) == 0
    assert pick(torch.tensor([0.0, 1.0], dtype=torch.float64), 0.0) == 1

"""Temperature, top_k, top_p, min_p and the draw: equal to transformers' warpers, and drawn as the distribution says."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.distribution import HEAD, Shape, argmax, log_share, pick, plain_weights, uniform, weights
from protocol.sampling import SamplingParams
from tests.engine.sampling_oracle import probabilities

VOCAB = 60


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def shape(*params: SamplingParams, vocab: int = VOCAB) -> Shape:
    return Shape(
        column(*(one.temperature for one in params)),
        torch.tensor([[one.top_k or vocab] for one in params]),
        column(*(one.top_p for one in params)),
        column(*(one.min_p for one in params)),
        cuts=any(one.top_k or one.top_p < 1.0 for one in params),
        has_min_p=any(one.min_p for one in params),
    )


def sampled(**params: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=1, **{"temperature": 1.0, **params})


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def kept(logits: list[float], **params: Any) -> list[int]:
    row = torch.full((1, VOCAB), -torch.inf)
    row[0, : len(logits)] = torch.tensor(logits)
    return weights(row, shape(sampled(**params))).nonzero()[:, 1].tolist()


any_params = st.builds(
    sampled,
    temperature=st.floats(0.05, 10),
    top_k=st.sampled_from([0, 1, 2, 7, VOCAB - 1, VOCAB]),
    top_p=st.one_of(st.just(1.0), st.floats(1e-6, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)


@given(any_params, st.integers(0, 10_000))
@settings(deadline=None, max_examples=120, derandomize=True)
def test_probabilities_are_those_of_transformers_warpers(params: SamplingParams, seed: int) -> None:
    logits = random_logits(1, seed)
    ours = weights(logits, shape(params))[0]
    torch.testing.assert_close(ours / ours.sum(), probabilities(logits[0], params), rtol=1e-9, atol=1e-12)


@given(st.lists(any_params, min_size=2, max_size=6))
@settings(deadline=None, max_examples=25, derandomize=True)
def test_many_rows_at_once_are_each_row_alone(params: list[SamplingParams]) -> None:
    logits = random_logits(len(params))
    together = weights(logits, shape(*params))
    alone = [weights(logits[i : i + 1], shape(one)) for i, one in enumerate(params)]
    torch.testing.assert_close(together, torch.cat(alone))
    draws = column(*(uniform(5, row) for row in range(len(params))))
    each = [pick(together[i : i + 1], draws[i : i + 1]) for i in range(len(params))]
    assert torch.equal(pick(together, draws), torch.cat(each))


LOG_SHARES = torch.tensor([0.1, 0.5, 0.3, 0.1]).log().tolist()


@pytest.mark.parametrize(("top_p", "tokens"), [(1e-9, [1]), (0.45, [1]), (0.55, [1, 2]), (0.85, [0, 1, 2, 3])])
def test_top_p_keeps_the_likeliest_that_hold_it_at_least_one_and_equals_together(
    top_p: float, tokens: list[int]
) -> None:
    assert kept(LOG_SHARES, top_p=top_p) == tokens


def test_top_k_keeps_equals_together() -> None:
    assert kept(LOG_SHARES, top_k=2) == [1, 2]
    assert kept(LOG_SHARES, top_k=3) == [0, 1, 2, 3]


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    assert kept(LOG_SHARES, top_p=0.6) == [1, 2]
    assert kept(LOG_SHARES, top_p=0.6, top_k=2) == [1]


WIDE = 3 * HEAD


@pytest.mark.parametrize("top_k", [0, 5, HEAD - 1, HEAD, HEAD + 1])
@pytest.mark.parametrize("top_p", [0.2, 0.999, 1.0])
def test_cuts_beyond_what_is_sorted_first_are_found(top_k: int, top_p: float) -> None:
    logits = torch.rand(1, WIDE, generator=torch.Generator().manual_seed(1))
    params = sampled(top_k=top_k, top_p=top_p)
    ours = weights(logits, shape(params, vocab=WIDE))[0]
    torch.testing.assert_close(ours / ours.sum(), probabilities(logits[0], params), rtol=1e-9, atol=1e-12)


def test_equals_at_the_edge_of_what_is_sorted_first_stay_together() -> None:
    logits = torch.zeros(1, WIDE)
    logits[0, :9] = 1.0
    assert int((weights(logits, shape(sampled(top_k=HEAD), vocab=WIDE)) > 0).sum()) == WIDE
    assert int((weights(logits, shape(sampled(top_k=9), vocab=WIDE)) > 0).sum()) == 9


def test_who_asks_for_no_cut_keeps_even_the_unlikeliest_beside_one_who_does() -> None:
    logits = torch.tensor([[0.0, -80.0, -90.0]]).expand(2, -1)
    rows = weights(logits, shape(sampled(top_p=0.5), sampled(), vocab=3))
    assert (rows > 0).sum(dim=-1).tolist() == [1, 3]


def test_min_p_is_relative_to_the_best() -> None:
    assert kept(LOG_SHARES, min_p=0.5) == [1, 2]
    assert kept(LOG_SHARES, min_p=0.7) == [1]
    assert kept(LOG_SHARES, min_p=1.0) == [1]


def test_the_best_is_the_first_of_equals() -> None:
    logits = random_logits(4)
    logits[2, 9] = logits[2, 5] = 100.0
    assert argmax(logits).tolist() == [*logits[:2].argmax(dim=-1).tolist(), 5, int(logits[3].argmax())]


def test_seeds_and_positions_give_different_numbers() -> None:
    numbers = {uniform(seed, position) for seed in range(20) for position in range(20)}
    assert len(numbers) == 400
    assert all(0.0 <= number < 1.0 for number in numbers)


def test_the_largest_seed_and_a_far_position_work() -> None:
    assert 0.0 <= uniform((1 << 63) - 1, 1 << 20) < 1.0


@pytest.mark.parametrize("seed", [5, 1 << 62])
def test_draws_follow_the_distribution(seed: int) -> None:
    """Chi-square against the exact shares, over all tokens that are expected five times or more."""
    params, draws = sampled(temperature=1.7, top_p=0.98), 10_000
    logits = random_logits(1, seed=3)
    shares = probabilities(logits[0], params)
    row = weights(logits, shape(params)).expand(draws, -1)
    numbers = column(*(uniform(seed, position) for position in range(draws)))
    counts = torch.bincount(pick(row, numbers), minlength=VOCAB).double()
    often = shares * draws >= 5
    statistic = float((((counts - shares * draws) ** 2) / (shares * draws))[often].sum())
    freedom = int(often.sum()) - 1
    assert counts[shares == 0].sum() == 0
    assert abs(statistic - freedom) < 3 * (2 * freedom) ** 0.5, f"chi-square {statistic:.1f} at {freedom}"


@given(st.lists(st.sampled_from([0.0, 1e-9, 0.1, 0.7, 1.0]), min_size=1, max_size=9), st.floats(0.0, 1.0 - 2**-53))
@settings(deadline=None, max_examples=150, derandomize=True)
def test_no_draw_reaches_a_token_without_weight(others: list[float], draw: float) -> None:
    row = column(*others, 1.0, *others).T
    for number in (draw, 0.0, 1.0 - 2**-53):
        assert row[0, pick(row, column(number))] > 0


def test_a_draw_falls_on_the_token_whose_share_holds_it() -> None:
    draws = (0.0, 0.29, 0.31, 1.0 - 2**-53)
    picked = [int(pick(column(0.3, 0.0, 0.7, 0.0).T, column(draw))) for draw in draws]
    assert picked == [0, 0, 2, 2]


def test_log_shares_are_log_softmax() -> None:
    logits, tokens = random_logits(4), torch.tensor([0, 5, 9, 59])
    expected = logits.double().log_softmax(dim=-1)[range(4), tokens]
    torch.testing.assert_close(log_share(plain_weights(logits), tokens), expected)

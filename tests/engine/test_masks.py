"""Which keys a query sees, spelled out."""

import pytest
import torch

from engine.attention.masks import causal_mask


def visible(queries: range, keys: range, window: int | None = None) -> list[set[int]]:
    """Positions of keys that each query sees."""
    mask = causal_mask(queries, keys, torch.float32, window)
    assert set(mask.flatten().tolist()) <= {0.0, float("-inf")}
    return [{key for key, score in zip(keys, row, strict=True) if score == 0} for row in mask.tolist()]


def test_without_a_window_a_query_sees_itself_and_all_before() -> None:
    assert visible(range(3), range(3)) == [{0}, {0, 1}, {0, 1, 2}]
    assert visible(range(2, 4), range(4)) == [{0, 1, 2}, {0, 1, 2, 3}]


def test_a_window_counts_the_query_itself() -> None:
    assert visible(range(4), range(4), window=2) == [{0}, {0, 1}, {1, 2}, {2, 3}]
    assert visible(range(2, 5), range(5), window=3) == [{0, 1, 2}, {1, 2, 3}, {2, 3, 4}]


def test_no_query_of_a_long_sequence_sees_more_than_the_window() -> None:
    for position, seen in enumerate(visible(range(16), range(16), window=4)):
        assert seen == set(range(max(0, position - 3), position + 1))


def test_keys_may_begin_behind_the_start() -> None:
    """After a past of 5, a window of 4 has 2, 3 and 4 in its ring."""
    assert visible(range(5, 8), range(2, 8), window=4) == [{2, 3, 4, 5}, {3, 4, 5, 6}, {4, 5, 6, 7}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_of_the_dtype_of_the_scores(dtype: torch.dtype) -> None:
    assert causal_mask(range(2), range(2), dtype).dtype == dtype

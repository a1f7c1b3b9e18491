"""Settings that cannot work are refused at construction (P10)."""

from typing import Any

import pytest

from engine.config import ContinuousBatchingConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("safety_margin", -0.1),
        ("safety_margin", 1.1),
        ("max_requests_per_batch", 0),
        ("max_batch_tokens", 0),
        ("num_blocks", 0),
        ("max_overtakes", 0),
        ("page_size", 3),
        ("scheduler_type", "shortest_first"),
    ],
)
def test_impossible_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        ContinuousBatchingConfig(**{"num_blocks": 8, name: value})


def test_the_defaults_are_those_of_the_specification() -> None:
    config = ContinuousBatchingConfig(num_blocks=8)
    assert (config.page_size, config.max_batch_tokens, config.safety_margin) == (256, 8192, 0.15)
    assert (config.scheduler_type, config.max_overtakes) == ("fifo", 64)


def test_the_request_cap_never_exceeds_the_token_budget() -> None:
    assert ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16).request_cap == 16


def test_the_cache_budget_is_counted_in_tokens() -> None:
    assert ContinuousBatchingConfig(num_blocks=6, page_size=4).cache_tokens == 24

"""Settings that cannot work are refused at construction (P10)."""

from dataclasses import fields
from typing import Any

import pytest
from transformers.generation.configuration_utils import ContinuousBatchingConfig as Theirs

from engine.config import OMITTED, ContinuousBatchingConfig


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("safety_margin", -0.1),
        ("safety_margin", 1.1),
        ("max_requests_per_batch", 0),
        ("max_batch_tokens", 0),
        ("num_blocks", 0),
        ("max_overtakes", -1),
        ("page_size", 3),
        ("scheduler_type", "shortest_first"),
        ("eviction_policy", "random"),
        ("max_memory_percent", 0.0),
        ("max_memory_percent", 1.5),
        ("cpu_offload_space", -1.0),
        ("cpu_offload_space_safety_threshold", 1.1),
        ("max_queue_size", -1),
        ("q_padding_interval_size", -1),
    ],
)
def test_impossible_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        ContinuousBatchingConfig(**{"num_blocks": 8, name: value})


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("page_size", 4.5, "a whole number from 4 to .*"),
        ("page_size", "64", "a whole number .*"),
        ("page_size", True, "a whole number .*"),
        ("num_blocks", 8.0, "a whole number from 1 to .*, or None"),
        ("seed", "a", "a whole number, or None"),
        ("use_async_batching", "yes", "true or false, or None"),
        ("use_cuda_graph", 1, "true or false, or None"),
        ("allow_block_sharing", None, "true or false"),
        ("safety_margin", "0.5", "a number from 0 to 1, or None"),
        ("safety_margin", float("nan"), "a number from 0 to 1, or None"),
        ("max_memory_percent", True, "a number, above 0 and at most 1, or None"),
        ("scheduler_type", None, '"fifo" or "prefill_first"'),
    ],
)
def test_values_of_another_type_are_refused_with_the_one_wanted(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} .*: must be {wanted}$"):
        ContinuousBatchingConfig(**{name: value})


def test_a_whole_number_will_do_for_any_number() -> None:
    assert ContinuousBatchingConfig(safety_margin=1, cpu_offload_space=2).margin == 1


def test_the_defaults_are_those_of_the_specification() -> None:
    config = ContinuousBatchingConfig()
    assert (config.page_size, config.num_blocks, config.batch_tokens, config.request_cap) == (256, None, 8192, 1024)
    assert (config.scheduler_type, config.margin, config.max_overtakes) == ("fifo", 0.15, 64)
    assert (config.allow_block_sharing, config.eviction_policy, config.cpu_offload_space) == (True, "most_recent", 0.0)
    assert ContinuousBatchingConfig(scheduler_type="prefill_first").margin == 0.0


def test_the_request_cap_never_exceeds_the_token_budget() -> None:
    assert ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=16).request_cap == 16


def test_every_field_of_the_specification_is_there_or_is_listed_as_omitted() -> None:
    """The fields of transformers' own class, which is the oracle."""
    theirs = {field.name for field in fields(Theirs)}
    ours = {field.name for field in fields(ContinuousBatchingConfig)}
    assert theirs == (ours & theirs) | OMITTED.keys()
    assert not ours & OMITTED.keys()

"""Graphs and asynchronous batching on CUDA: what is chosen, what was asked for, and what cannot be."""

import logging

import pytest

from engine.config import ContinuousBatchingConfig
from engine.modes import Modes, choose_modes

MASKS = "masks are needed"


def choose(
    use_cuda_graph: bool | None = None,
    use_async_batching: bool | None = None,
    q_padding: int = 0,
    sliding: bool = False,
    uncapturable: str | None = None,
) -> Modes:
    config = ContinuousBatchingConfig(
        use_cuda_graph=use_cuda_graph, use_async_batching=use_async_batching, q_padding_interval_size=q_padding
    )
    return choose_modes(config, sliding, uncapturable)


def test_where_forwards_can_be_captured_they_are_and_then_overlap() -> None:
    assert choose() == Modes(varlen=True, decode=True, asynchronous=True)


def test_prompts_over_rings_are_not_captured_but_decodes_are() -> None:
    assert choose(sliding=True) == Modes(varlen=False, decode=True, asynchronous=True)


def test_an_explicit_choice_wins() -> None:
    assert choose(use_cuda_graph=False) == Modes(varlen=False, decode=False, asynchronous=False)
    assert choose(use_cuda_graph=False, q_padding=64).decode is False
    assert choose(use_async_batching=False) == Modes(varlen=True, decode=True, asynchronous=False)


@pytest.mark.parametrize(("use_cuda_graph", "q_padding"), [(True, 0), (None, 32)])
def test_asked_for_in_vain_is_a_warning(
    use_cuda_graph: bool | None, q_padding: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert not choose(use_cuda_graph, q_padding=q_padding, uncapturable=MASKS).decode
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert MASKS in caplog.text


def test_unasked_it_is_off_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    assert choose(uncapturable=MASKS) == Modes(varlen=False, decode=False, asynchronous=False)
    assert not caplog.records


def test_asynchronous_batching_without_graphs_is_refused() -> None:
    with pytest.raises(ValueError, match="use_cuda_graph"):
        choose(use_cuda_graph=False, use_async_batching=True)
    with pytest.raises(ValueError, match="use_cuda_graph"):
        choose(uncapturable=MASKS, use_async_batching=True)

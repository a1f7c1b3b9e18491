"""What a CUDA engine captures, and whether it overlaps: from what was asked for and what can be. Pure."""

import logging
from dataclasses import dataclass

from engine.config import ContinuousBatchingConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Modes:
    """`varlen`: batches with prompts are captured, `decode`: batches of single tokens are. `asynchronous`: the next
    forward is launched while one runs."""

    varlen: bool
    decode: bool
    asynchronous: bool


def choose_modes(config: ContinuousBatchingConfig, sliding: bool, uncapturable: str | None) -> Modes:
    """On CUDA. An explicit choice wins; without one, forwards are captured where they can be, and then overlap.

    `sliding`: some layers attend to a window; their prompts cannot be captured. `uncapturable`: why nothing can be;
    None if it can. Raises ValueError for asynchronous batching without graphs.
    """
    asked = _asked_for_graphs(config)
    if asked and uncapturable:
        log.warning("CUDA graphs are off: %s", uncapturable)
    graphs = asked is not False and uncapturable is None
    asynchronous = graphs if config.use_async_batching is None else config.use_async_batching
    if asynchronous and not graphs:
        raise ValueError("use_async_batching needs use_cuda_graph on CUDA: without graphs the host is never ahead")
    return Modes(varlen=graphs and not sliding, decode=graphs, asynchronous=asynchronous)


def _asked_for_graphs(config: ContinuousBatchingConfig) -> bool | None:
    """A padding interval asks for them, for padding serves nothing else."""
    if config.use_cuda_graph is None and (config.q_padding_interval_size or config.kv_padding_interval_size):
        return True
    return config.use_cuda_graph

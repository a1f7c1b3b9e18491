"""CUDA graphs as the graph cache wants them."""

from collections.abc import Callable
from typing import Any

import torch

from engine.graph_cache import Replay


class CudaCapture:
    """All graphs share one pool of memory: they run one after the other on one stream, and leave their results in
    buffers outside of it."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._pool: Any = None

    def __call__(self, forward: Callable[[], None]) -> Replay:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads of a node use CUDA too, and only this one's calls matter to the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            forward()
        return graph.replay

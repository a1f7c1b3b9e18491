"""The inside of a worker: one rank, from loading its shard to its last forward."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

from engine.cache_pool import CachePool, pool_bytes
from engine.collective import GlooCollective
from engine.cpu import cpu_runner
from engine.errors import CollectiveBroken, EngineError
from engine.model_runner import ModelRunner
from engine.models.loading import load_model
from engine.progress import ProgressWord
from engine.tensor_parallel import Shard
from engine.workers.channel import Channel, PeerGone
from engine.workers.memory import SharedMemory
from engine.workers.messages import (
    FAILED,
    OTHERS_GONE,
    WELL,
    Failed,
    Forward,
    Load,
    Loaded,
    Order,
    Ready,
    Serve,
    Stop,
    as_batch,
    as_done,
)

log = logging.getLogger(__name__)

T = TypeVar("T")


def serve(channel: Channel[Order]) -> int:
    """Until told to stop, until the main process is gone, or until it cannot go on; the exit status. The first order
    is Load, the second Serve."""
    try:
        rank = Rank(_expected(channel.receive(), Load))
        channel.send(Loaded())
        order, fds = channel.receive_with_fds()
        rank.open(_expected(order, Serve), *fds)
        channel.send(Ready())
        while not isinstance(order := channel.receive(), Stop):
            rank.run(_expected(order, Forward), channel)
        return WELL
    except PeerGone:
        return WELL
    except CollectiveBroken as error:
        log.error("%s", error)
        return OTHERS_GONE
    except EngineError as error:
        return _failed(channel, str(error))
    except Exception as error:
        log.exception("this rank cannot go on")
        return _failed(channel, f"{type(error).__name__}: {error}")


class Rank:
    """Loads its shard. Raises ModelRefused."""

    def __init__(self, load: Load) -> None:
        torch.set_num_threads(load.threads)
        self._shard = Shard(load.rank, load.world)
        self._collective = GlooCollective(load.port, self._shard, load.silence_s) if load.port else None
        head = load.head and self._shard.is_main
        self._loaded = load_model(Path(load.model), load.dtype, head, self._shard)
        self._context = self._loaded.context(load.context)
        self._runner: ModelRunner | None = None

    def open(self, serve: Serve, fd: int) -> None:
        """Maps its pages, and finds the other ranks. `fd`: of the shared memory, closed on return."""
        geometry = self._loaded.geometry(serve.page_size)
        memory = SharedMemory(fd, self._shard.world, pool_bytes(geometry, serve.num_chunks))
        pool = CachePool(geometry, serve.num_chunks, memory=memory.pool(self._shard.rank))
        word = ProgressWord(memory.word() if self._shard.is_main else None)
        memory.close()
        if self._collective:
            self._collective.join()
        self._runner = cpu_runner(self._loaded, pool, word, self._collective, self._context)

    def run(self, forward: Forward, channel: Channel[Order]) -> None:
        """The main rank reports. Raises whatever the model raises: the ranks are then out of step."""
        assert self._runner, "it was opened"
        result = self._runner.launch(as_batch(forward)).result()
        if self._shard.is_main:
            channel.send(as_done(result))


def _failed(channel: Channel[Order], reason: str) -> int:
    with suppress(PeerGone):
        channel.send(Failed(reason))
    return FAILED


def _expected(order: Order, kind: type[T]) -> T:
    if not isinstance(order, kind):
        raise ValueError(f"{type(order).__name__} came where {kind.__name__} was to come")
    return order

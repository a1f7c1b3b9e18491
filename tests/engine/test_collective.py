"""Sums over ranks through gloo, the ranks being threads: the same bits everywhere, and nobody waits for ever."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing

import psutil
import pytest
import torch

from engine.collective import GlooCollective, rendezvous
from engine.errors import CollectiveBroken
from engine.tensor_parallel import Shard

DEADLINE_S = 20.0
WORLD = 3


class Ranks:
    """Each in a thread of its own."""

    def __init__(self, timeout_s: float) -> None:
        self._meeting = rendezvous()
        self._threads = [ThreadPoolExecutor(1) for _ in range(WORLD)]
        shards = [Shard(rank, WORLD) for rank in range(WORLD)]
        self.collectives = [GlooCollective(self._meeting.port, shard, timeout_s) for shard in shards]
        for joined in [self.do(rank, self.collectives[rank].join) for rank in range(WORLD)]:
            joined.result(DEADLINE_S)

    def do(self, rank: int, call: Callable[[], None]) -> "Future[None]":
        return self._threads[rank].submit(call)

    def sum(self, rank: int, tensor: torch.Tensor) -> "Future[None]":
        return self.do(rank, lambda: self.collectives[rank].sum(tensor))

    def close(self) -> None:
        for collective, thread in zip(self.collectives, self._threads, strict=True):
            collective.close()
            thread.shutdown()


@pytest.fixture
def ranks_with() -> Iterator[Callable[[float], Ranks]]:
    """Of a time that they wait for each other."""
    with ExitStack() as stack:
        yield lambda timeout_s: stack.enter_context(closing(Ranks(timeout_s)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_ranks_get_the_same_bits_of_the_sum(ranks_with: Callable[[float], Ranks], dtype: torch.dtype) -> None:
    ranks = ranks_with(DEADLINE_S)
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(7, 33, generator=generator).to(dtype) for _ in range(WORLD)]
    expected = torch.stack(parts).double().sum(0)
    for done in [ranks.sum(rank, part) for rank, part in enumerate(parts)]:
        done.result(DEADLINE_S)
    assert all(torch.equal(part, parts[0]) for part in parts)
    torch.testing.assert_close(parts[0].double(), expected, rtol=2e-2, atol=2e-2)


def test_a_sum_of_nothing_waits_for_everybody_too(ranks_with: Callable[[float], Ranks]) -> None:
    ranks = ranks_with(DEADLINE_S)
    late, reached = threading.Event(), threading.Event()
    early = [ranks.sum(rank, torch.empty(0, 8)) for rank in range(2)]

    def come_late() -> None:
        reached.set()
        assert late.wait(DEADLINE_S)
        ranks.collectives[2].sum(torch.empty(0, 8))

    last = ranks.do(2, come_late)
    assert reached.wait(DEADLINE_S)
    assert not any(done.done() for done in early)
    late.set()
    for done in [*early, last]:
        done.result(DEADLINE_S)


def test_a_rank_that_does_not_come_is_not_waited_for_any_longer(ranks_with: Callable[[float], Ranks]) -> None:
    ranks = ranks_with(0.3)
    waiting = [ranks.sum(rank, torch.ones(4)) for rank in range(2)]
    with pytest.raises(CollectiveBroken, match="rank 0 waited for the others in vain"):
        waiting[0].result(DEADLINE_S)


def test_a_rank_that_is_gone_is_noticed_at_once(ranks_with: Callable[[float], Ranks]) -> None:
    ranks = ranks_with(10 * DEADLINE_S)
    waiting = [ranks.sum(rank, torch.ones(4)) for rank in range(2)]
    ranks.collectives[2].close()
    errors = [done.exception(DEADLINE_S) for done in waiting]
    assert any(isinstance(error, CollectiveBroken) for error in errors)


def test_ranks_meet_on_loopback_alone(ranks_with: Callable[[float], Ranks]) -> None:
    here = psutil.Process()
    before = {(c.laddr.ip, c.laddr.port) for c in here.net_connections() if c.status == psutil.CONN_LISTEN}
    ranks_with(DEADLINE_S)
    after = {(c.laddr.ip, c.laddr.port) for c in here.net_connections() if c.status == psutil.CONN_LISTEN}
    assert {ip for ip, _ in after - before} == {"127.0.0.1"}


def test_without_a_meeting_place_nobody_is_found() -> None:
    port = rendezvous().port
    with pytest.raises(CollectiveBroken, match="rank 0 did not find the others"):
        GlooCollective(port, Shard(0, 2), 1.0).join(timeout_s=0.2)

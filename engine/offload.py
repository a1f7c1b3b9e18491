"""KV of requests that had to make room, in host memory until they can go on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.cache_manager import BlockMove, CacheManager
from engine.cache_pool import CachePool
from engine.request import Owner, Request


@dataclass
class _Moves:
    """Gathered over many requests, so that each group's bytes cross in one transfer."""

    sources: dict[int, list[int]] = field(default_factory=dict)
    targets: dict[int, list[int]] = field(default_factory=dict)

    def add(self, move: BlockMove) -> None:
        self.sources.setdefault(move.group, []).extend(move.sources)
        self.targets.setdefault(move.group, []).extend(move.targets)

    def run(self, source: CachePool, target: CachePool) -> None:
        for group, blocks in self.sources.items():
            copy_blocks(source, target, BlockMove(group, blocks, self.targets[group]))


SLICE_BYTES = 64 << 20
"""A transfer passes through a buffer of its size: more than that at once is not worth the memory."""


def copy_blocks(source: CachePool, target: CachePool, move: BlockMove) -> None:
    """Block by block, as bytes, on every rank."""
    here, there = source.raw_blocks(move.group), target.raw_blocks(move.group)
    step = max(1, SLICE_BYTES // (here.shape[0] * here.shape[2]))
    for start in range(0, len(move.sources), step):
        sources = torch.tensor(move.sources[start : start + step], device=source.device)
        targets = torch.tensor(move.targets[start : start + step], device=target.device)
        there[:, targets] = here[:, sources].to(target.device)


class OffloadStore:
    """A pool in host memory with a manager of its own; block k there is block k of the request's table here."""

    def __init__(self, device: CacheManager, host: CachePool) -> None:
        self._device = device
        self._host = CacheManager(host)

    @property
    def free(self) -> int:
        """In blocks of the whole model."""
        return self._host.free

    @property
    def total(self) -> int:
        return self._host.total

    def copy_out(self, requests: Sequence[Request]) -> list[Request]:
        """Copies the KV of those that fit, first come first served, and returns them. Their blocks on the device are
        still theirs: the caller releases them."""
        moves, fitting = _Moves(), []
        for request in requests:
            self._host.recycle()
            if not request.computed or not self._host.can_hold(request.owner, request.computed):
                continue
            self._host.hold(request.owner, request.computed)
            for move in self._pairs(request.owner, out=True):
                moves.add(move)
            fitting.append(request)
        moves.run(self._device.pool, self._host.pool)
        return fitting

    def restore(self, requests: Sequence[Request]) -> None:
        """Copies their KV back into the blocks that they hold on the device by now; host memory is free afterwards."""
        moves = _Moves()
        for request in requests:
            for move in self._pairs(request.owner, out=False):
                moves.add(move)
        moves.run(self._host.pool, self._device.pool)
        for request in requests:
            self._host.release(request.owner)

    def drop(self, owner: Owner) -> None:
        """It will not come back. Unknown owners are ignored."""
        self._host.release(owner)

    def _pairs(self, owner: Owner, out: bool) -> list[BlockMove]:
        moves = []
        pairs = zip(self._device.tables(owner), self._host.tables(owner), strict=True)
        for group, (device, host) in enumerate(pairs):
            here = device[: len(host)]
            moves.append(BlockMove(group, here, host) if out else BlockMove(group, host, here))
        return moves

"""Sums over the ranks of one engine."""

import socket
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from engine.errors import CollectiveBroken
from engine.tensor_parallel import Shard

LOOPBACK = "127.0.0.1"
RENDEZVOUS_S = 20.0
"""For the ranks to find each other, once their models are loaded."""


class Collective(Protocol):
    """Every rank makes the same calls in the same order. Raises CollectiveBroken where a rank is gone or late."""

    def sum(self, tensor: torch.Tensor) -> None:
        """In place, over all ranks, with the same bits on each. Returns on no rank before every rank has called it,
        for an empty tensor too."""


def rendezvous() -> TCPStore:
    """Where ranks find each other: a server on a port of its own, `store.port`, as long as it is kept. By itself, torch
    would listen on every interface."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        port = listening.getsockname()[1]
        return TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            timeout=timedelta(seconds=RENDEZVOUS_S),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )


class GlooCollective:
    """gloo over loopback. No rank waits longer than `timeout_s` for another. Without torch's default process group:
    a process may belong to several engines."""

    def __init__(self, port: int, shard: Shard, timeout_s: float) -> None:
        self._port = port
        self._shard = shard
        self._timeout_s = timeout_s
        self._group: Any = None
        self._present = torch.zeros(1)

    def join(self, timeout_s: float = RENDEZVOUS_S) -> None:
        """Waits for all ranks. Raises CollectiveBroken."""
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = timedelta(seconds=self._timeout_s)
        try:
            store = TCPStore(LOOPBACK, self._port, is_master=False, timeout=timedelta(seconds=timeout_s))
            self._group = gloo(store, self._shard.rank, self._shard.world, options)
        except RuntimeError as error:
            raise CollectiveBroken(f"rank {self._shard.rank} did not find the others: {error}") from error

    def sum(self, tensor: torch.Tensor) -> None:
        try:
            self._group.allreduce([tensor if tensor.numel() else self._present]).wait()
        except RuntimeError as error:
            raise CollectiveBroken(f"rank {self._shard.rank} waited for the others in vain: {error}") from error

    def close(self) -> None:
        """The connections end, and with them whatever other ranks wait for. May be called again."""
        self._group = None

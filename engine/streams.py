"""The queues of a device: inputs go in on one, the model runs on another, results come out on a third."""

from contextlib import AbstractContextManager
from typing import Protocol

import torch


class Mark(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """The current stream goes on only when the point is reached. The host does not wait."""

    def synchronize(self) -> None:
        """The host waits until the point is reached."""


class Streams(Protocol):
    """Each of the three makes its stream the current one."""

    def upload(self) -> AbstractContextManager[object]: ...

    def compute(self) -> AbstractContextManager[object]: ...

    def download(self) -> AbstractContextManager[object]: ...

    def mark(self) -> Mark:
        """Where the current stream is now."""


class CudaStreams:
    """`computing`: the stream that forwards are captured on."""

    def __init__(self, device: torch.device) -> None:
        self._uploading, self.computing, self._downloading = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            for _ in range(3)
        )

    def upload(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._uploading)

    def compute(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.computing)

    def download(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._downloading)

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

"""What goes to a device for one forward and comes back from it, in memory that never moves.

Two such pairs take turns: while a forward works on one, the next is written into the other.
"""

from dataclasses import dataclass

import torch

from engine.prepared_forward import PreparedForward

_NOT_CARRIED = -1


class Staged:
    """The same numbers on the host, where they are written, and on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.device = torch.zeros(size, dtype=torch.int64, device=device)

    def upload(self, values: torch.Tensor, fill: int, size: int) -> None:
        """`values` and then `fill`, `size` numbers in all, in the order of the current stream. The host part may be
        written again once the stream is past that."""
        self._host[: len(values)] = values
        self._host[len(values) : size] = fill
        self.device[:size].copy_(self._host[:size], non_blocking=True)


@dataclass(frozen=True)
class Shape:
    """Of one forward: `tokens` and `samples` as they run, padding included; `wanted` of the samples are real."""

    tokens: int
    samples: int
    wanted: int


class IOPair:
    """Buffers of one forward. `max_samples`: rows of logits, padding included."""

    def __init__(self, max_tokens: int, max_samples: int, device: torch.device) -> None:
        self.token_ids, self.positions, self._sources = (Staged(max_tokens, device) for _ in range(3))
        self.ends = Staged(max_samples, device)
        self.sampled = torch.zeros(max_samples, dtype=torch.int64, device=device)
        self._report = torch.zeros(3 * max_samples, dtype=torch.float64, device=device)
        self._report_host = torch.zeros(3 * max_samples, dtype=torch.float64, pin_memory=device.type == "cuda")

    def upload(self, inputs: PreparedForward, shape: Shape) -> None:
        """On the current stream. Nobody may still be reading the pair."""
        self.token_ids.upload(inputs.token_ids, 0, shape.tokens)
        self.positions.upload(inputs.positions, 0, shape.tokens)
        self.ends.upload(inputs.ends, 0, shape.samples)
        if inputs.carries:
            sources = torch.full((shape.tokens,), _NOT_CARRIED)
            for carry in inputs.carries:
                sources[carry.packed] = carry.source
            self._sources.upload(sources, _NOT_CARRIED, shape.tokens)

    def fill_carried(self, previous: "IOPair", tokens: int) -> None:
        """Puts the previous forward's tokens in their places, on the device and in the order of the current stream."""
        sources = self._sources.device[:tokens]
        carried = previous.sampled[sources.clamp(min=0)]
        ids = self.token_ids.device[:tokens]
        ids.copy_(torch.where(sources == _NOT_CARRIED, ids, carried))

    def keep(self, tokens: torch.Tensor, report: torch.Tensor) -> None:
        """A forward's samples, as `SamplePlan.choose` left them."""
        self.sampled[: len(tokens)] = tokens
        self._report[: report.numel()] = report.reshape(-1)

    def download(self, count: int) -> torch.Tensor:
        """The report of `count` samples, on the host once the current stream is past this."""
        self._report_host[: 3 * count].copy_(self._report[: 3 * count], non_blocking=True)
        return self._report_host[: 3 * count].view(3, count)

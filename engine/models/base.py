"""What a model offers once it is bound to pages and a progress word."""

from typing import Any, Protocol

import torch


class ServedModel(Protocol):
    """Every forward writes its KV into pages and advances the progress word once per layer, after that layer's output
    projection. `plan`: the attention backend's, of the same batch."""

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any, rows: torch.Tensor) -> torch.Tensor:
        """Final hidden states `[len(rows), hidden]`, of the packed tokens at `rows`; the head does not run."""

    def logits(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any, rows: torch.Tensor) -> torch.Tensor:
        """`[len(rows), vocab]`, of the packed tokens at `rows`."""

    def close(self) -> None:
        """Gives transformers' modules back as they were. Nothing runs here any more."""

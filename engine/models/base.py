"""What a model offers once it is bound to pages and a progress word."""

from typing import Any, Protocol

import torch

from protocol.context import NO_CONTEXT, ContextLayout


class ServedModel(Protocol):
    """Every forward writes its KV into pages and advances the progress word once per layer, after that layer's output
    projection. `plan`: the attention backend's, of the same batch."""

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any, rows: torch.Tensor) -> torch.Tensor:
        """Final hidden states `[len(rows), hidden]`, normalised as the head wants them, of the packed tokens at `rows`;
        the head does not run."""

    def logits(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any, rows: torch.Tensor) -> torch.Tensor:
        """`[len(rows), vocab]`, of the packed tokens at `rows`."""

    def hidden_and_logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both of the above, from one forward."""

    def close(self) -> None:
        """Gives transformers' modules back as they were. Nothing runs here any more."""


Work = tuple[torch.Tensor, torch.Tensor, Any, torch.Tensor]
"""What each forward takes: token ids, positions, plan, rows."""


def run_for(
    model: ServedModel, work: Work, samples: bool, context: ContextLayout = NO_CONTEXT
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """One forward; final hidden states and logits of its rows, each where somebody wants them. `samples`: tokens are to
    be chosen; `context`: what is kept of some rows."""
    if not samples and "logits" not in context.names:
        return model.hidden(*work), None
    if "hidden" in context.names:
        return model.hidden_and_logits(*work)
    return None, model.logits(*work)

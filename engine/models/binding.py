"""Joins a transformers model, a paged attention backend and a progress word. The model's code stays as it is."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface

from engine.attention.base import AttentionBackend, AttentionScores, LatentAttention
from engine.collective import Collective
from engine.models.families import kv_shape
from engine.models.latent_cache import LatentCache
from engine.models.sharding import partial_sums
from engine.progress import ProgressWord

ATTENTION_NAME = "kvferry_paged"
"""No mask is registered under this name, so transformers builds none."""


@dataclass(frozen=True)
class PagedForward:
    """Travels through the model's keyword arguments to each layer's attention."""

    backend: AttentionBackend[Any]
    plan: Any


def register_attention() -> None:
    """Make our attention known to transformers. May be called again."""
    AttentionInterface.register(ATTENTION_NAME, _paged_attention)


class BoundModel:
    """A model whose every forward writes KV into pages and advances the word once per layer. `collective`: where
    `model` is a shard; the word then advances once all ranks have their KV of that layer in their pages."""

    def __init__(
        self,
        model: torch.nn.Module,
        backend: AttentionBackend[Any],
        progress: ProgressWord,
        collective: Collective | None = None,
    ) -> None:
        self._model = model
        self._base = cast(Any, model).base_model
        self._backend = backend
        self._keeps_latents = kv_shape(self._base.config).parts == 1
        self._hooks: list[RemovableHandle] = []
        if collective:
            hook = partial(_sum_output, collective)
            self._hooks += [module.register_forward_hook(hook) for module in partial_sums(model)]
        for layer in self._base.layers:  # behind the sums: hooks run in the order of their registration
            self._hooks.append(layer.self_attn.o_proj.register_forward_hook(lambda *_: progress.advance()))

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any, rows: torch.Tensor) -> torch.Tensor:
        """Final hidden states `[len(rows), hidden]`, of the packed tokens at `rows`; the head does not run."""
        output = self._base(**self._inputs(token_ids, positions, plan))
        return cast(torch.Tensor, output.last_hidden_state[0, rows])

    def logits(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any, rows: torch.Tensor) -> torch.Tensor:
        """`[len(rows), vocab]`, of the packed tokens at `rows`."""
        output = self._model(**self._inputs(token_ids, positions, plan), logits_to_keep=rows)
        return cast(torch.Tensor, output.logits[0])

    def hidden_and_logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both of the above, from one forward: what the head makes of its input is the family's own affair."""
        passed: list[Any] = []
        hook = self._base.register_forward_hook(lambda _module, _inputs, output: passed.append(output))
        with ExitStack() as undo:
            undo.callback(hook.remove)
            logits = self.logits(token_ids, positions, plan, rows)
        return cast(torch.Tensor, passed[0].last_hidden_state[0, rows]), logits

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _inputs(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any) -> dict[str, Any]:
        inputs = {
            "input_ids": token_ids[None],
            "position_ids": positions[None],
            "use_cache": False,
            "paged": PagedForward(self._backend, plan),
        }
        if self._keeps_latents:
            inputs["cache"] = LatentCache(cast(LatentAttention, self._backend), plan)
        return inputs


def _sum_output(collective: Collective, _module: torch.nn.Module, _inputs: Any, output: torch.Tensor) -> None:
    collective.sum(output)


def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: PagedForward,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    scores = AttentionScores(scaling, softcap, s_aux)
    output = paged.backend.attend(module.layer_idx, query[0], key[0], value[0], paged.plan, scores)
    return output[None], None

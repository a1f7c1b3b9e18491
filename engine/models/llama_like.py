"""Llama and its kin (Mistral, Qwen2, Qwen3) on CPUs: the weights and arithmetic of transformers' modules, run by our
own kernels. BoundModel runs the modules themselves and is the truth."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch.nn.functional import embedding

from engine.attention.base import AttentionBackend, AttentionScores
from engine.collective import Collective
from engine.models.dense import MULTIPLE, DenseKernels, Heads, Linear, RMSNorm
from engine.progress import ProgressWord

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class DecoderLayer:
    attention_norm: RMSNorm
    qkv: Linear
    heads: Heads
    scores: AttentionScores
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


class LlamaLikeModel:
    """See ServedModel. Until `close` the weights are out of the modules. `collective`: where `model` is a shard."""

    def __init__(
        self,
        model: torch.nn.Module,
        backend: AttentionBackend[Any],
        progress: ProgressWord,
        kernels: DenseKernels,
        collective: Collective | None = None,
    ) -> None:
        base = cast(Any, model).base_model
        head = getattr(model, "lm_head", None)
        self._backend = backend
        self._progress = progress
        self._kernels = kernels
        self._collective = collective
        self._rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]] = base.rotary_emb
        self._layers = [_layer(layer) for layer in base.layers]
        self._norm = RMSNorm(base.norm)
        table = base.embed_tokens.weight
        tied = head is not None and head.weight is table
        self._head = None if head is None else Linear(head)
        self._embed: Callable[[torch.Tensor], torch.Tensor] = (
            self._head.rows if self._head and tied else partial(embedding, weight=table.detach())
        )

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any, rows: torch.Tensor) -> torch.Tensor:
        """Final hidden states `[len(rows), hidden]`, of the packed tokens at `rows`; the head does not run."""
        return self._kernels.normalise(self._run_layers(token_ids, positions, plan, rows), self._norm)

    def logits(self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any, rows: torch.Tensor) -> torch.Tensor:
        """`[len(rows), vocab]`, of the packed tokens at `rows`."""
        return self.hidden_and_logits(token_ids, positions, plan, rows)[1]

    def hidden_and_logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both of the above, from one forward."""
        assert self._head, "a model without a head was asked for logits"
        hidden = self.hidden(token_ids, positions, plan, rows)
        return hidden, self._kernels.multiply(hidden, self._head)

    def close(self) -> None:
        linears = [linear for layer in self._layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        for linear in [*linears, self._head] if self._head else linears:
            linear.give_back()

    def _run_layers(
        self, token_ids: torch.Tensor, positions: torch.Tensor, plan: Any, rows: torch.Tensor
    ) -> torch.Tensor:
        """Of the last layer, the other tokens' KV is all that is wanted."""
        states = self._embed(token_ids)
        cosines, sines = self._rotary(states, positions[None])
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, states, (cosines[0], sines[0]), plan)
            if index == len(self._layers) - 1:
                states, attended = states[rows], attended[rows]
            self._add_product(attended, layer.output, to=states)
            self._progress.advance()
            self._feed_forward(layer, states)
        return states

    def _attend(
        self,
        index: int,
        layer: DecoderLayer,
        states: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        plan: Any,
    ) -> torch.Tensor:
        """`[T, heads * head_dim]`."""
        packed = self._kernels.multiply(self._kernels.normalise(states, layer.attention_norm), layer.qkv)
        self._kernels.place(packed, layer.heads, *rotation)
        attended = self._backend.attend(index, *layer.heads.split(packed), plan, layer.scores)
        return attended.flatten(1)

    def _feed_forward(self, layer: DecoderLayer, states: torch.Tensor) -> None:
        gate_up = self._kernels.multiply(self._kernels.normalise(states, layer.mlp_norm), layer.gate_up)
        self._add_product(self._kernels.gate(gate_up), layer.down, to=states)

    def _add_product(self, x: torch.Tensor, linear: Linear, to: torch.Tensor) -> None:
        """Of a shard, the product is a part of the sum that is added."""
        if self._collective is None:
            self._kernels.add_product(x, linear, to=to)
            return
        part = self._kernels.multiply(x, linear)
        self._collective.sum(part)
        to += part


def why_not(model: torch.nn.Module) -> str | None:
    """What this model has that the kernels do not cover; None: nothing."""
    base = cast(Any, model).base_model
    config = base.config
    if config.model_type not in FAMILIES:
        return f"models of type {config.model_type}"
    dim = base.layers[0].self_attn.head_dim
    if base.embed_tokens.weight.dtype != torch.float32 or base.embed_tokens.weight.device.type != "cpu":
        return f"{base.embed_tokens.weight.dtype} on {base.embed_tokens.weight.device}"
    if config.hidden_act != "silu":
        return f"the activation {config.hidden_act}"
    if 2 * len(base.rotary_emb.inv_freq) != dim:
        return "rotary positions of a part of the head"
    features = base.layers[0].mlp.gate_proj.out_features
    if config.hidden_size % MULTIPLE or features % MULTIPLE or dim % (2 * MULTIPLE):
        return f"widths of {config.hidden_size}, {features} and {dim}"
    return None


def _layer(layer: Any) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    queries, keys = (each.out_features // attention.head_dim for each in (attention.q_proj, attention.k_proj))
    norms = [RMSNorm(getattr(attention, name)) for name in ("q_norm", "k_norm") if hasattr(attention, name)]
    return DecoderLayer(
        attention_norm=RMSNorm(layer.input_layernorm),
        qkv=Linear(attention.q_proj, attention.k_proj, attention.v_proj),
        heads=Heads(queries, keys, attention.head_dim, norms),
        scores=AttentionScores(attention.scaling),
        output=Linear(attention.o_proj),
        mlp_norm=RMSNorm(layer.post_attention_layernorm),
        gate_up=Linear(mlp.gate_proj, mlp.up_proj),
        down=Linear(mlp.down_proj),
    )

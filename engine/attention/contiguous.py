"""Attention of one request's queries over keys and values that lie in order: the formula, without pages."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.base import AttentionScores
from engine.attention.masks import causal_mask


def attend_contiguous(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: AttentionScores, mask: torch.Tensor | None
) -> torch.Tensor:
    """`q` `[heads, queries, head_dim]`, `k` and `v` `[kv_heads, keys, head_dim]`, `mask` `[queries, keys]` is added to
    the scores. None: one query sees every key; several are the keys' own, each seeing itself and those before.
    Returns `[heads, queries, head_dim]`."""
    if scores.softcap is not None or scores.sinks is not None:
        return _by_the_formula(q, k, v, scores, mask)
    if mask is None and q.shape[1] == 1:
        return _one_query(q, k, v, scores.scaling)
    return scaled_dot_product_attention(
        q[None],
        k[None],
        v[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scores.scaling,
        enable_gqa=q.shape[0] != k.shape[0],
    )[0]


def _one_query(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """It sees everything, so the query heads that share a KV head can pass as queries of it: no mask, and K and V are
    read once."""
    grouped = q.reshape(1, k.shape[0], q.shape[0] // k.shape[0], q.shape[2])
    return scaled_dot_product_attention(grouped, k[None], v[None], scale=scaling).reshape(q.shape)


def _by_the_formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: AttentionScores, mask: torch.Tensor | None
) -> torch.Tensor:
    """Scores in float32: torch's fused attention knows neither softcap nor sinks."""
    kv_heads, queries = k.shape[0], q.shape[1]
    grouped = q.float().reshape(kv_heads, -1, queries, q.shape[2])
    logits = grouped @ k.float()[:, None].transpose(2, 3) * scores.scaling
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    if mask is None and queries > 1:
        mask = causal_mask(range(queries), range(queries), logits.dtype, device=logits.device)
    if mask is not None:
        logits = logits + mask
    weights = _softmax(logits, scores.sinks)
    return (weights @ v.float()[:, None]).reshape(q.shape).to(q.dtype)


def _softmax(logits: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """`logits` `[kv_heads, heads of each, queries, keys]`. A head's sink takes its share as one more key would."""
    if sinks is None:
        return torch.softmax(logits, dim=-1)
    column = sinks.float().view(*logits.shape[:2], 1, 1).expand(*logits.shape[:3], 1)
    return torch.softmax(torch.cat([logits, column], dim=-1), dim=-1)[..., :-1]

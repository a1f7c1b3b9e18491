"""From processed logits to one token: temperature, then top_k, top_p and min_p, then a seeded draw. Many rows at once.

Weights are proportional to probabilities; the best token's is 1. They are laid out by token id, not by likelihood:
a logit that changes in its last bits (another batch, another device) then hardly ever changes what a draw falls on.
"""

from typing import NamedTuple

import numpy as np
import torch


class Shape(NamedTuple):
    """`[rows, 1]` each, float64; `top_k` int64, within 1..vocab. `cuts`: whether any row has a top_k or top_p."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    cuts: bool


def weights(logits: torch.Tensor, shape: Shape) -> torch.Tensor:
    """float64 `[rows, vocab]`, zero for what is not to be chosen."""
    best = logits.amax(dim=-1, keepdim=True)
    shares = _shares(logits, best, shape.temperature)
    if shape.cuts:
        shares.masked_fill_(logits < _cutoff(logits, best, shape), 0.0)
    return shares.masked_fill_(shares < shape.min_p, 0.0)


def plain_weights(logits: torch.Tensor) -> torch.Tensor:
    """At temperature 1, nothing cut off."""
    return logits.double().sub_(logits.amax(dim=-1, keepdim=True)).exp_()


def _shares(logits: torch.Tensor, best: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return logits.double().sub_(best).div_(temperature).exp_()


def _cutoff(logits: torch.Tensor, best: torch.Tensor, shape: Shape) -> torch.Tensor:
    """The lowest logit that top_k, and then top_p of what it leaves, keep. Equal logits stay or go together."""
    ordered = ascending(logits)
    kth = ordered.gather(-1, ordered.shape[-1] - shape.top_k)
    shares = _shares(ordered, best, shape.temperature).masked_fill_(ordered < kth, 0.0)
    cumulative = shares.cumsum(dim=-1)
    spared = (cumulative <= (1.0 - shape.top_p) * cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.maximum(kth, ordered.gather(-1, spared.clamp_(max=ordered.shape[-1] - 1)))


def ascending(logits: torch.Tensor) -> torch.Tensor:
    """Sorted along the last axis. On CPU numpy, which does not keep the places, is ten times faster than torch."""
    if logits.device.type == "cpu":
        return torch.from_numpy(np.sort(logits.numpy(), axis=-1))
    return logits.sort(dim=-1).values


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """int64 `[rows]`, the first of equals; a NaN counts as the best. On CPU numpy is the faster one."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def uniform(seed: int, position: int) -> float:
    """One number in [0, 1), the same wherever and whenever it is drawn."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def pick(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """int64 `[rows]`: the token where a draw in [0, 1) falls when the tokens share that interval by weight. `draws`:
    float64 `[rows, 1]`."""
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    last = torch.searchsorted(cumulative, total)
    chosen = torch.searchsorted(cumulative, draws * total, right=True)
    return torch.minimum(chosen, last).clamp_(max=weights.shape[-1] - 1).squeeze(-1)


def log_share(weights: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float64 `[rows]`: the natural logarithm of the tokens' probabilities."""
    return (weights.gather(-1, tokens[:, None]) / weights.sum(dim=-1, keepdim=True)).log_().squeeze(-1)

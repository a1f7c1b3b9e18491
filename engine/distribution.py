"""From processed logits to one token: temperature, then top_k, top_p and min_p, then a seeded draw. Many rows at once.

Weights are proportional to probabilities; the best token's is 1. They are laid out by token id, not by likelihood:
a logit that changes in its last bits (another batch, another device) then hardly ever changes what a draw falls on.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

HEAD = 1024
"""Weights that are sorted first on a CPU: nearly always enough to find where top_k and top_p cut."""


class Shape(NamedTuple):
    """`[rows, 1]` each, float64, but `top_k` int64, from 1 on; the size of the vocabulary and more is off. `cuts`,
    `has_min_p`: whether any row has a top_k or top_p, or a min_p."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    cuts: bool
    has_min_p: bool


def weights(logits: torch.Tensor, shape: Shape) -> torch.Tensor:
    """float64 `[rows, vocab]`, zero for what is not to be chosen. Equal logits stay or go together."""
    shares = logits.double().sub_(logits.amax(dim=-1, keepdim=True)).div_(shape.temperature).exp_()
    if shape.cuts:
        shares.masked_fill_(shares < _cutoff(shares, shape), 0.0)
    if shape.has_min_p:
        shares.masked_fill_(shares < shape.min_p, 0.0)
    return shares


def plain_weights(logits: torch.Tensor) -> torch.Tensor:
    """At temperature 1, nothing cut off."""
    return logits.double().sub_(logits.amax(dim=-1, keepdim=True)).exp_()


def _cutoff(shares: torch.Tensor, shape: Shape) -> torch.Tensor:
    """The least weight that top_k, and then top_p of what it leaves, keep: of the likeliest tokens that together hold
    top_p, the best at least."""
    all_k, all_p = shape.top_k >= shares.shape[-1], shape.top_p >= 1.0
    for head in _heads(shares):
        last = head.shape[-1] - 1
        kth = head.gather(-1, (shape.top_k - 1).clamp_(max=last)).masked_fill_(all_k, 0.0)
        left = head.masked_fill(head < kth, 0.0)
        cumulative = left.cumsum(dim=-1)
        wanted = shape.top_p * torch.where(all_k, shares.sum(dim=-1, keepdim=True), cumulative[:, -1:])
        seen = ((kth > head[:, -1:]) | all_k) & ((cumulative[:, -1:] >= wanted) | all_p)
        if head.shape == shares.shape or bool(seen.all()):
            break
    place = (cumulative < wanted).sum(dim=-1, keepdim=True).clamp_(max=last)
    return torch.maximum(kth, left.gather(-1, place).masked_fill_(all_p, 0.0))


def _heads(shares: torch.Tensor) -> Iterator[torch.Tensor]:
    """The largest weights, in descending order: on CPU a few first and then all; elsewhere all at once, as looking
    whether a few were enough would make the host wait."""
    if shares.device.type != "cpu":
        yield shares.sort(dim=-1, descending=True).values
        return
    values = shares.numpy()
    if values.shape[-1] > HEAD:
        yield _descending(np.partition(values, -HEAD, axis=-1)[:, -HEAD:])
    yield _descending(values)


def _descending(values: npt.NDArray[np.float64]) -> torch.Tensor:
    """numpy sorts without keeping the places, and is several times faster than torch for it."""
    return torch.from_numpy(np.sort(values, axis=-1)[:, ::-1].copy())


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
    # A draw below 1 times the total rounds to less than the total, so only a row of NaN falls on no token.
    chosen = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    return chosen.clamp_(max=weights.shape[-1] - 1).squeeze(-1)


def log_share(weights: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float64 `[rows]`: the natural logarithm of the tokens' probabilities."""
    return (weights.gather(-1, tokens[:, None]) / weights.sum(dim=-1, keepdim=True)).log_().squeeze(-1)

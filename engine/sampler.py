"""From logits to token ids. Pure: a token depends on its logits, the parameters, the seed and the position alone."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.forward_batch import SampleKey


def sample(logits: torch.Tensor, keys: Sequence[SampleKey]) -> list[int | None]:
    """`logits` `[len(keys), vocab]`. None where a row is not finite: that request alone is broken."""
    logits = logits.float()
    best, greedy = logits.max(dim=-1)
    finite = torch.isfinite(best).tolist()
    greedy_ids = greedy.tolist()
    return [_choose(logits[i], key, greedy_ids[i]) if finite[i] else None for i, key in enumerate(keys)]


def _choose(logits: torch.Tensor, key: SampleKey, greedy: int) -> int:
    if key.params.temperature == 0.0:
        return greedy
    scaled = (logits - logits.max()).double() / key.params.temperature
    probabilities = torch.softmax(scaled, dim=-1)
    return pick(nucleus(probabilities, key.params.top_p), uniform(key.seed, key.position))


def uniform(seed: int, position: int) -> float:
    """One number in [0, 1), the same wherever and whenever it is drawn."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=position)).random())


def nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest set of likeliest tokens that holds at least `top_p`, at least one token; zero for all others."""
    if top_p >= 1.0:
        return probabilities
    values, ids = probabilities.sort(descending=True, stable=True)
    kept = 1 + int((values.cumsum(0)[:-1] < top_p).sum())
    return torch.zeros_like(probabilities).scatter_(0, ids[:kept], values[:kept])


def pick(weights: torch.Tensor, draw: float) -> int:
    """The token where `draw`, in [0, 1), falls when the tokens share that interval by weight."""
    cumulative = weights.cumsum(0)
    index = int(torch.searchsorted(cumulative, draw * float(cumulative[-1]), right=True))
    last = int(torch.searchsorted(cumulative, cumulative[-1]))
    return min(index, last)

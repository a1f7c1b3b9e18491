"""From logits to tokens. A token depends on its own row of logits, the request's parameters, seed and history, and its
position: on nothing else that is in the batch.

A plan is made of the requests before the forward, so that a device need not wait for it; `choose` then works on the
device alone, and `read_report` turns what it left into records. `sample_tokens` is all three.
"""

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from engine.distribution import Shape, argmax, log_share, pick, plain_weights, uniform, weights
from engine.forward_batch import SampleKey
from engine.logits import LogitEdits, plan_edits, to_device, too_short
from engine.runner import SampledToken

NOT_FINITE = "the model's output was not finite"
NOTHING_LEFT = "no token may follow: the request's own settings rule all of them out"
_ERRORS = {1: NOT_FINITE, 2: NOTHING_LEFT, 3: NOT_FINITE}
"""By verdict: 1 where the model's own logits were not finite, and 2 more where the processed ones were not."""


class Choices(NamedTuple):
    """Of one batch, on its device. `tokens`: int64 `[n]`, valid ids even for rows that failed. `report`: float64
    `[3, n]`, for `read_report`."""

    tokens: torch.Tensor
    report: torch.Tensor


@dataclass(frozen=True)
class _Drawing:
    shape: Shape
    draws: torch.Tensor


@dataclass(frozen=True)
class _Part:
    """Rows that need more than their best token. `rows`: int64 `[m]`. `drawing` None: all greedy. `wanted`: bool
    `[m]`, whose log probability is wanted; None if nobody's."""

    rows: torch.Tensor
    edits: LogitEdits | None
    drawing: _Drawing | None
    wanted: torch.Tensor | None

    def edited(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy of its rows of the whole batch's logits, processed."""
        logits = logits.index_select(0, self.rows)
        if self.edits:
            self.edits.apply(logits)
        return logits

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens, and the log probabilities of those that are wanted (NaN of others). `logits`: its edited ones."""
        if self.drawing:
            shares = weights(logits, self.drawing.shape)
            tokens = pick(shares, self.drawing.draws)
        else:
            tokens = argmax(logits)
        if self.wanted is None:
            return tokens, None
        logprobs = log_share(shares if self.drawing else plain_weights(logits), tokens)
        return tokens, logprobs.masked_fill_(~self.wanted, torch.nan)


@dataclass(frozen=True)
class SamplePlan:
    """How each row of one batch's logits becomes a token."""

    parts: Sequence[_Part]

    def choose(self, logits: torch.Tensor) -> Choices:
        """`logits` `[n, vocab]`, left as they are. The host does not wait for the device."""
        logits = logits.float()
        tokens = argmax(logits)
        verdict = (~torch.isfinite(logits.gather(-1, tokens[:, None]).squeeze(-1))).double()
        logprobs = torch.full_like(verdict, torch.nan)
        for part in self.parts:
            edited = part.edited(logits)
            tokens[part.rows], wanted = part.choose(edited)
            if wanted is not None:
                logprobs[part.rows] = wanted
            verdict[part.rows] += 2.0 * ~torch.isfinite(edited.amax(dim=-1))
        return Choices(tokens, torch.stack((tokens.double(), logprobs, verdict)))


def sample_tokens(
    logits: torch.Tensor, keys: Sequence[SampleKey], end_tokens: Set[int] = frozenset()
) -> list[SampledToken | str]:
    """`logits` `[len(keys), vocab]`, of any float type. `end_tokens`: the model's own. A string where that request
    alone cannot go on, and why."""
    plan = plan_samples(keys, end_tokens, logits.shape[-1], logits.device)
    return read_report(plan.choose(logits).report)


def plan_samples(keys: Sequence[SampleKey], end_tokens: Set[int], vocab_size: int, device: torch.device) -> SamplePlan:
    """Copies what it needs of the histories. Where parameters need one (`needs_history`), it holds no PLACEHOLDER. On
    CPU rows go one by one: what is done to a row stays in the cache, which is several times faster."""
    groups = one_by_one(keys) if device.type == "cpu" else together(keys)
    return plan_groups(groups, keys, end_tokens, vocab_size, device)


def plan_groups(
    groups: Iterable[Sequence[int]],
    keys: Sequence[SampleKey],
    end_tokens: Set[int],
    vocab_size: int,
    device: torch.device,
) -> SamplePlan:
    """`groups`: rows that are worked on at once, either all drawn or all greedy. Rows in none take their best token."""
    return SamplePlan([_part(rows, keys, end_tokens, vocab_size, device) for rows in groups])


def one_by_one(keys: Sequence[SampleKey]) -> list[list[int]]:
    return [[row] for row, key in enumerate(keys) if _needs_more(key)]


def together(keys: Sequence[SampleKey]) -> list[list[int]]:
    """As few groups as there can be."""
    rows = [row for row, key in enumerate(keys) if _needs_more(key)]
    drawn = [row for row in rows if keys[row].params.temperature]
    greedy = [row for row in rows if not keys[row].params.temperature]
    return [group for group in (drawn, greedy) if group]


def read_report(report: torch.Tensor) -> list[SampledToken | str]:
    """Of one batch's Choices, once it is there."""
    tokens, logprobs, verdicts = report.tolist()
    return [_read(*row) for row in zip(tokens, logprobs, verdicts, strict=True)]


def _read(token: float, logprob: float, verdict: float) -> SampledToken | str:
    if verdict:
        return _ERRORS[int(verdict)]
    return SampledToken(int(token), None if math.isnan(logprob) else logprob)


def _needs_more(key: SampleKey) -> bool:
    params = key.params
    return bool(params.temperature or params.logprobs or params.logit_bias or params.needs_history or too_short(key))


def _part(
    rows: Sequence[int], keys: Sequence[SampleKey], end_tokens: Set[int], vocab_size: int, device: torch.device
) -> _Part:
    keys = [keys[row] for row in rows]
    params = [key.params for key in keys]
    return _Part(
        to_device(np.array(rows), device),
        plan_edits(keys, end_tokens, vocab_size, device),
        _drawing(keys, vocab_size, device) if params[0].temperature else None,
        to_device(np.array([one.logprobs for one in params]), device) if any(one.logprobs for one in params) else None,
    )


def _drawing(keys: Sequence[SampleKey], vocab_size: int, device: torch.device) -> _Drawing:
    params = [key.params for key in keys]
    shape = Shape(
        _column([one.temperature for one in params], device),
        _column([one.top_k or vocab_size for one in params], device),
        _column([one.top_p for one in params], device),
        _column([one.min_p for one in params], device),
        cuts=any(one.top_k or one.top_p < 1.0 for one in params),
        has_min_p=any(one.min_p for one in params),
    )
    return _Drawing(shape, _column([uniform(key.seed, key.position) for key in keys], device))


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return to_device(np.array(values)[:, None], device)

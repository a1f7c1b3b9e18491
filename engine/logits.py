"""What is done to logits before a token is chosen: the processors that a request asks for, on many rows at once.

In this order, which is that of transformers:

1. logit_bias           logit + bias
2. repetition_penalty   logit / penalty, or logit * penalty where negative, for each token of the prompt and the output
3. presence_penalty and frequency_penalty   logit - presence - frequency * occurrences, for each token of the output
4. min_tokens           -inf for end and stop tokens while the output is shorter

The plan is made from the requests alone, before there are logits; it copies what it needs of their histories.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.forward_batch import SampleKey

Ids = npt.NDArray[np.int64]


class Entries(NamedTuple):
    """Some places of a matrix of logits, and a number for each. `rows`, `tokens`: int64; `values`: float32."""

    rows: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class LogitEdits:
    """None where no row asks for it."""

    bias: Entries | None
    repetition: Entries | None
    penalties: Entries | None
    blocked: Entries | None

    def apply(self, logits: torch.Tensor) -> None:
        """In place, on float32 `[rows, vocab]`."""
        if self.bias:
            _add(logits, self.bias)
        if self.repetition:
            _repel(logits, self.repetition)
        if self.penalties:
            _add(logits, self.penalties)
        if self.blocked:
            _add(logits, self.blocked)


def plan_edits(
    keys: Sequence[SampleKey], end_tokens: Set[int], vocab_size: int, device: torch.device
) -> LogitEdits | None:
    """Row i of the logits belongs to `keys[i]`. None where no logit changes."""
    bias, repetition, penalties, blocked = (_EntryList(vocab_size) for _ in range(4))
    for row, key in enumerate(keys):
        params = key.params
        if params.logit_bias:
            tokens, values = zip(*params.logit_bias, strict=True)
            bias.add(row, tokens, values)
        if params.repetition_penalty != 1.0:
            repetition.add(row, key.history, params.repetition_penalty)
        if params.penalises_output:
            output, counts = np.unique(_ids(key.history[key.prompt_length :]), return_counts=True)
            penalties.add(row, output, -(params.presence_penalty + params.frequency_penalty * counts))
        if too_short(key):
            blocked.add(row, ends_of(key, end_tokens), -np.inf)
    lists = (bias, repetition, penalties, blocked)
    return LogitEdits(*(entries.on(device) for entries in lists)) if any(entries.rows for entries in lists) else None


def too_short(key: SampleKey) -> bool:
    """Whether the output has fewer than `min_tokens` so far."""
    return key.position - key.prompt_length < key.params.min_tokens


def ends_of(key: SampleKey, end_tokens: Set[int]) -> tuple[int, ...]:
    """The tokens that would end this request."""
    return (*key.params.stop_token_ids, *(() if key.params.ignore_eos else end_tokens))


class _EntryList:
    """Entries as they are collected. Tokens that the head cannot produce are left out."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.rows: list[Ids] = []
        self._tokens: list[Ids] = []
        self._values: list[npt.NDArray[np.float32]] = []

    def add(self, row: int, tokens: Iterable[int], values: Any) -> None:
        """`values`: one number for all, or one each."""
        ids = _ids(tokens)
        assert (ids >= 0).all(), "a placeholder in the history"
        known = ids < self._vocab_size
        if known.any():
            self._tokens.append(ids[known])
            self._values.append(np.broadcast_to(np.asarray(values, np.float32), ids.shape)[known])
            self.rows.append(np.full(len(self._tokens[-1]), row))

    def on(self, device: torch.device) -> Entries | None:
        if not self.rows:
            return None
        return Entries(*(to_device(np.concatenate(parts), device) for parts in (self.rows, self._tokens, self._values)))


def to_device(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Without making the host wait for the device."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _ids(tokens: Iterable[int]) -> Ids:
    return np.asarray(tokens, np.int64)


def _add(logits: torch.Tensor, entries: Entries) -> None:
    logits.index_put_((entries.rows, entries.tokens), entries.values, accumulate=True)


def _repel(logits: torch.Tensor, entries: Entries) -> None:
    """A token that occurs twice is written twice, with the same value."""
    place = (entries.rows, entries.tokens)
    scores = logits[place]
    penalised = torch.where(scores < 0, scores * entries.values, scores / entries.values)
    logits.index_put_(place, penalised)

"""A batch as the numbers that a forward takes, with nothing of the engine's lists in it."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.forward_batch import PLACEHOLDER, ForwardBatch, SampleKey
from engine.runner import SampledToken

Samples = list[SampledToken | str]
"""As in ForwardResult.tokens."""


class Carry(NamedTuple):
    """A token that the forward before this one chooses: goes to place `packed` of the packed tokens, is that forward's
    sample `source`. `sample`: which of this forward's samples follows from it; None if none does."""

    packed: int
    source: int
    sample: int | None


@dataclass(frozen=True)
class PreparedForward:
    """`token_ids` and `positions` `[T]` of the packed rows, 0 in place of a carried token; `ends` `[samples]`: where
    among them the rows that want a token end. `keys`: one per sample, with copies of the histories that are needed.
    `contexts` `[contexts]`: which of the tokens their contexts are wanted of."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor
    keys: list[SampleKey]
    carries: list[Carry]
    contexts: torch.Tensor

    @property
    def outputs(self) -> torch.Tensor:
        """The tokens that the model's last layer must go through with: `ends`, then `contexts`."""
        return torch.cat([self.ends, self.contexts]) if len(self.contexts) else self.ends

    @property
    def carries_history(self) -> bool:
        """Whether a carried token must be known before the next one can be chosen after it."""
        return any(c.sample is not None and self.keys[c.sample].params.needs_history for c in self.carries)

    def fill(self, previous: Samples | None) -> None:
        """Puts the carried tokens in their places. `previous`: the samples of the forward before; None if it failed.
        A row whose token there is none of keeps token 0: it runs and disturbs nobody."""
        for carry in self.carries:
            token = previous[carry.source] if previous is not None else None
            if isinstance(token, SampledToken):
                self._put(carry, token.token)

    def without_void(self, samples: Samples, previous: Samples | None) -> Samples:
        """This forward's samples, with a reason in place of those that followed from a token there was none of."""
        checked = list(samples)
        for carry in self.carries:
            token = previous[carry.source] if previous is not None else "its forward failed"
            if isinstance(token, str) and carry.sample is not None:
                checked[carry.sample] = f"the token before it is missing: {token}"
        return checked

    def _put(self, carry: Carry, token: int) -> None:
        self.token_ids[carry.packed] = token
        if carry.sample is not None and self.keys[carry.sample].params.needs_history:
            key = self.keys[carry.sample]
            self.keys[carry.sample] = key._replace(history=[*key.history, token])


def prepare_forward(batch: ForwardBatch) -> PreparedForward:
    tokens: list[int] = []
    positions: list[int] = []
    ends: list[int] = []
    carries: list[Carry] = []
    contexts: list[int] = []
    for row in batch.rows:
        if row.carry >= 0:
            assert list(row.tokens) == [PLACEHOLDER], f"{row.request_id}: only a lone placeholder can be carried to"
            carries.append(Carry(len(tokens), row.carry, len(ends) if row.sample else None))
        if row.context >= 0:
            contexts.append(len(tokens) + row.context)
        tokens += row.tokens if row.carry < 0 else [0]
        positions += range(row.start, row.end)
        if row.sample:
            ends.append(len(tokens) - 1)
    keys = [_own(key) for key in batch.samples]
    ids, places, rows = (torch.tensor(numbers, dtype=torch.long) for numbers in (tokens, positions, ends))
    return PreparedForward(ids, places, rows, keys, carries, torch.tensor(contexts, dtype=torch.long))


def _own(key: SampleKey) -> SampleKey:
    """Without the engine's live list: copied where it is needed. A carried token is not in it yet."""
    return key._replace(history=list(key.history) if key.params.needs_history else ())

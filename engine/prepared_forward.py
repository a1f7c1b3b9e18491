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
    among them the rows that want a token end. `keys`: one per sample, with copies of the histories that are needed."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor
    keys: list[SampleKey]
    carries: list[Carry]

    def fill(self, previous: Samples | None) -> dict[int, str]:
        """Puts the carried tokens in their places. `previous`: the samples of the forward before; None if it failed.
        A row whose token there is none of keeps token 0: it runs and disturbs nobody, but its sample is void. Returns
        why, by sample."""
        void: dict[int, str] = {}
        for carry in self.carries:
            token = previous[carry.source] if previous is not None else "its forward failed"
            if isinstance(token, SampledToken):
                self._put(carry, token.token)
            elif carry.sample is not None:
                void[carry.sample] = f"the token before it is missing: {token}"
        return void

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
    for row in batch.rows:
        if row.carry >= 0:
            assert list(row.tokens) == [PLACEHOLDER], f"{row.request_id}: only a lone placeholder can be carried to"
            carries.append(Carry(len(tokens), row.carry, len(ends) if row.sample else None))
        tokens += row.tokens if row.carry < 0 else [0]
        positions += range(row.start, row.end)
        if row.sample:
            ends.append(len(tokens) - 1)
    keys = [_own(key) for key in batch.samples]
    return PreparedForward(torch.tensor(tokens), torch.tensor(positions), torch.tensor(ends), keys, carries)


def _own(key: SampleKey) -> SampleKey:
    """Without the engine's live list: copied where it is needed, a carried token's placeholder left out."""
    if not key.params.needs_history:
        return key._replace(history=())
    return key._replace(history=[token for token in key.history if token != PLACEHOLDER])

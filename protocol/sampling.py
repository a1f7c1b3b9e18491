"""How a request's tokens are chosen."""

from typing import Annotated

import msgspec

Probability = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, le=100.0)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """temperature 0 is greedy. `seed` None draws one on the decode node. `max_new_tokens` counts generated tokens.
    `ignore_eos` keeps going past the model's end tokens, up to `max_new_tokens`."""

    max_new_tokens: Annotated[int, msgspec.Meta(ge=0)]
    temperature: Temperature = 0.0
    top_p: Probability = 1.0
    seed: Seed | None = None
    ignore_eos: bool = False

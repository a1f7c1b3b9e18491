"""How a request's tokens are chosen."""

from typing import Annotated

import msgspec

MAX_BIASED_TOKENS = 1024
MAX_STOP_TOKENS = 128

Probability = Annotated[float, msgspec.Meta(gt=0.0, le=1.0)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Temperature = Annotated[float, msgspec.Meta(ge=0.0, le=100.0)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
TokenCount = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Factor = Annotated[float, msgspec.Meta(ge=0.01, le=100.0)]
Penalty = Annotated[float, msgspec.Meta(ge=-2.0, le=2.0)]
Bias = Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Every default means "off". Hashable; ranges are checked on decoding, not on construction."""

    max_new_tokens: TokenCount
    """Generated tokens at most; the end of the model's context ends the output as well."""
    min_tokens: TokenCount = 0
    """So many generated tokens before an end or stop token may be chosen."""
    stop_token_ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=MAX_STOP_TOKENS)] = ()
    """End the output as the model's own end tokens do."""
    ignore_eos: bool = False
    """Keep going past the model's end tokens (not past stop_token_ids), up to max_new_tokens."""
    temperature: Temperature = 0.0
    """0 is greedy, and then top_k, top_p, min_p and the seed have no say."""
    top_k: TokenCount = 0
    """Choose among so many of the likeliest tokens; 0 is off."""
    top_p: Probability = 1.0
    """Choose among the likeliest tokens that together have this probability; 1 is off."""
    min_p: Share = 0.0
    """Choose among tokens at least this share as probable as the likeliest one; 0 is off."""
    seed: Seed | None = None
    """Of what is drawn; None draws one where the request decodes."""
    repetition_penalty: Factor = 1.0
    """Divides (or, below 0, multiplies) the logits of tokens of the prompt or the output; 1 is off."""
    presence_penalty: Penalty = 0.0
    """Taken from the logits of tokens of the output, once."""
    frequency_penalty: Penalty = 0.0
    """Taken from the logits of tokens of the output, once per occurrence."""
    logit_bias: Annotated[tuple[tuple[TokenId, Bias], ...], msgspec.Meta(max_length=MAX_BIASED_TOKENS)] = ()
    """(token, what is added to its logit) pairs; a token named twice gets both."""
    logprobs: bool = False
    """Report the natural logarithm of each chosen token's probability."""

    @property
    def penalises_output(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_history(self) -> bool:
        """Whether the next token depends on which tokens came before, beyond the model's own view of them."""
        return self.repetition_penalty != 1.0 or self.penalises_output

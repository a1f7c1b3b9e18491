"""Whether a request's sampling parameters can be served by this model. Pure."""

import msgspec

from protocol.sampling import SamplingParams


def sampling_refusal(params: SamplingParams, vocab_size: int) -> str | None:
    """What is wrong with them, as a sentence that names the field; None if nothing is."""
    try:
        msgspec.convert(msgspec.to_builtins(params), SamplingParams)
    except msgspec.ValidationError as error:
        return str(error)
    for name, tokens in (
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("stop_token_ids", params.stop_token_ids),
    ):
        if tokens and max(tokens) >= vocab_size:
            return f"{name} names token {max(tokens)}, the vocabulary ends at {vocab_size - 1}"
    return None

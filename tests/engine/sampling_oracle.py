"""What transformers' own logits processors make of one row: none of our code is asked."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.forward_batch import SampleKey
from protocol.sampling import SamplingParams


def processed(logits: torch.Tensor, key: SampleKey, end_tokens: Sequence[int]) -> torch.Tensor:
    """Before any warper: bias, repetition, our two penalties by their formula, the minimum length."""
    params, ids = key.params, torch.tensor([list(key.history)])
    row = logits[None].float()
    if params.logit_bias:
        row = _call(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias]), ids, row)
    if params.repetition_penalty != 1.0:
        row = _call(RepetitionPenaltyLogitsProcessor(params.repetition_penalty), ids, row)
    output = list(key.history[key.prompt_length :])
    for token in set(output):
        row[0, token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    ends = [*params.stop_token_ids, *([] if params.ignore_eos else end_tokens)]
    if params.min_tokens and ends:
        row = _call(MinNewTokensLengthLogitsProcessor(key.prompt_length, params.min_tokens, ends), ids, row)
    return row[0]


def probabilities(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """float64 `[vocab]` of processed logits, after temperature, top_k, top_p and min_p."""
    warpers: list[Any] = [TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return torch.softmax(_call(LogitsProcessorList(warpers), None, row[None].double())[0], dim=-1)


def _call(processor: Any, ids: torch.Tensor | None, row: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = processor(ids, row.clone())
    return result

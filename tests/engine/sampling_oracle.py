"""What transformers makes of sampling parameters, by row and for whole outputs: none of our code is asked."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
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


class OutputPenalties(LogitsProcessor):
    """presence_penalty and frequency_penalty, which transformers does not have, by their formula."""

    def __init__(self, prompt_length: int, params: SamplingParams) -> None:
        self._prompt_length = prompt_length
        self._params = params

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self._prompt_length :], minlength=scores.shape[-1])
        return scores - self._params.presence_penalty * (counts > 0) - self._params.frequency_penalty * counts


def generate(folder: Path, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[float]]:
    """A greedy output and its log probabilities, of a model that has no end token of its own."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=params.max_new_tokens,
            min_new_tokens=params.min_tokens,
            eos_token_id=list(params.stop_token_ids),
            pad_token_id=0,
            repetition_penalty=params.repetition_penalty,
            sequence_bias=[[[token], bias] for token, bias in params.logit_bias] or None,
            logits_processor=LogitsProcessorList([OutputPenalties(len(prompt), params)]),
            return_dict_in_generate=True,
            output_scores=True,
        )
    tokens = out.sequences[0, len(prompt) :].tolist()
    return tokens, [float(row[0].log_softmax(-1)[token]) for row, token in zip(out.scores, tokens, strict=True)]


def _call(processor: Any, ids: torch.Tensor | None, row: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = processor(ids, row.clone())
    return result

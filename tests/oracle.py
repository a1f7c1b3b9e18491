"""Greedy tokens, and contexts, from transformers' own `generate` and forward: none of our code is asked."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Oracle:
    """One prompt at a time, float32, no paging of ours. Each answer is computed once."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def context(self, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the position before the last token: hidden states behind the last norm, and logits."""
        with torch.inference_mode():
            out = self._model(torch.tensor([prompt]), output_hidden_states=True)
        return out.hidden_states[-1][0, -2], out.logits[0, -2]

    def greedy(self, prompt: list[int], max_new_tokens: int) -> list[int]:
        """Generated tokens, the end token included if one was reached."""
        key = (max_new_tokens, *prompt)
        if key not in self._known:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                out = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    pad_token_id=0,  # of one prompt nothing is padded; None would be complained about
                )
            self._known[key] = out[0, len(prompt) :].tolist()
        return self._known[key]

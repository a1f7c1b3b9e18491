"""What the cluster must answer, from transformers' own `generate` and tokenizer: none of our code is asked."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_model import save_tiny_model


def save_endless_model(folder: Path) -> Path:
    """A tiny model whose end token always has logit 0, and so never the highest: every output has the length that the
    test asked for."""
    save_tiny_model(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][AutoTokenizer.from_pretrained(folder).eos_token_id] = 0.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass(frozen=True)
class Expected:
    """`prompt_tokens`: how many the request must be billed."""

    text: str
    prompt_tokens: int


class Oracle:
    """Greedy answers, float32, one prompt at a time."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._known: dict[tuple[int, ...], list[int]] = {}

    def completion(self, prompt: str, max_tokens: int) -> Expected:
        return self._answer(self._tokenizer(prompt)["input_ids"], max_tokens)

    def chat(self, messages: list[dict[str, str]], max_tokens: int) -> Expected:
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self._answer(self._tokenizer(text)["input_ids"], max_tokens)

    def _answer(self, prompt: list[int], max_tokens: int) -> Expected:
        text = self._tokenizer.decode(self._greedy(prompt, max_tokens), skip_special_tokens=True)
        return Expected(str(text), len(prompt))

    def _greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """A shorter output is the beginning of a longer one."""
        known = self._known.get(tuple(prompt), [])
        if len(known) < max_tokens:
            ids = torch.tensor([prompt])
            with torch.inference_mode():
                mask = torch.ones_like(ids)
                out = self._model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
            known = self._known[tuple(prompt)] = out[0, len(prompt) :].tolist()
        return known[:max_tokens]

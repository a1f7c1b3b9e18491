"""transformers' `generate`: one batch at a time, padded to its longest, until all of it has ended."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, StoppingCriteriaList

from bench.peers.lines import Arrival, Prompt, Served, Settings, Timed, serve

PAD = 0
FILL_AT_ONCE = 4
"""Prompts of one prefill; more are slower on a CPU, and need memory for activations."""


class Clock:
    """A stopping criterion that stops nothing: when each token came."""

    def __init__(self) -> None:
        self.ticks: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.ticks.append(time.monotonic())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Generate:
    """Filled prompts are kept as one cache, in the order of `fill`; `decode` takes its first rows and tokens."""

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        self._model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)
        self._max_requests = settings.max_requests
        self._filled: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.inference_mode()
    def fill(self, prompts: Sequence[Prompt]) -> None:
        parts = []
        for at in range(0, len(prompts), FILL_AT_ONCE):
            cache: Any = DynamicCache()
            self._model.model(torch.tensor(prompts[at : at + FILL_AT_ONCE]), cache=cache)
            parts.append([(layer.keys, layer.values) for layer in cache.layers])
        self._filled = [
            (torch.cat([keys for keys, _ in layer]), torch.cat([values for _, values in layer]))
            for layer in zip(*parts, strict=True)
        ]

    @torch.inference_mode()
    def decode(self, prompts: Sequence[Prompt], steps: int) -> Timed:
        """The clock starts at the first token, with the last prompt token computed."""
        rows, past = len(prompts), len(prompts[0]) - 1
        cache = DynamicCache([(keys[:rows, :, :past], values[:rows, :, :past]) for keys, values in self._filled])
        ticks = self._generate(prompts, steps + 1, cache)
        return Timed(ticks[-1] - ticks[0], rows * steps)

    def prefill(self, prompt: Prompt) -> Timed:
        began = time.monotonic()
        return Timed(self._generate([prompt], 1)[0] - began, len(prompt))

    def replay(self, arrivals: Sequence[Arrival]) -> list[Served]:
        """Takes what has arrived as the next batch whenever the last one has ended."""
        began, served = time.monotonic(), list[Served]()
        while len(served) < len(arrivals):
            waiting = arrivals[len(served) :]
            time.sleep(max(0.0, began + waiting[0].at - time.monotonic()))
            now = time.monotonic() - began
            batch = [arrival for arrival in waiting if arrival.at <= now][: self._max_requests]
            ticks = self._generate([arrival.prompt for arrival in batch], max(arrival.new for arrival in batch))
            served += [Served(a.at, ticks[0] - began, ticks[a.new - 1] - began, a.new) for a in batch]
        return served

    def close(self) -> None:
        self._filled.clear()

    def _generate(self, prompts: Sequence[Prompt], new: int, cache: DynamicCache | None = None) -> list[float]:
        """When each of `new` tokens came."""
        longest = max(map(len, prompts))
        padded = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, max_new_tokens=new, eos_token_id=None, pad_token_id=PAD
        )
        clock = Clock()
        self._model.generate(
            padded,
            attention_mask=mask,
            generation_config=config,
            cache=cache,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        return clock.ticks


if __name__ == "__main__":
    serve(Generate)

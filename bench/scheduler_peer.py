"""transformers' continuous batching, driven step by step without a model: nothing is computed, token 0 comes back."""

from time import thread_time_ns
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.continuous_batching import RequestState

from bench.null_device import CONTEXT, HEAD_DIM, PAGE_SIZE, VOCAB, prompt

MAX_BATCH_TOKENS = 2048


class TransformersSteps:
    """A full batch of decodes in its batch processor. Satisfies scheduler.Stepping."""

    def __init__(self, batch: int, new_tokens: int) -> None:
        self._tensors_ns = 0
        self._processor = _processor(batch, new_tokens)
        self._prepare = self._processor.inputs_and_outputs.prepare_batch_tensors
        self._processor.inputs_and_outputs.prepare_batch_tensors = self._prepare_timed
        for index in range(batch):
            tokens = prompt(CONTEXT + index % PAGE_SIZE, index)
            state = RequestState(request_id=f"r{index}", initial_tokens=tokens, max_new_tokens=new_tokens)
            self._processor.scheduler.add_waiting_request(state)
        while self._processor.scheduler.waiting_requests or not self._decodes_only:
            self.step()

    def step(self) -> int:
        """Nanoseconds of a step less those of filling tensors, which are part of running a forward."""
        self._tensors_ns = 0
        began = thread_time_ns()
        prepared = self._processor.prepare_next_batch()
        self._processor.update_batch()
        elapsed = thread_time_ns() - began - self._tensors_ns
        assert prepared, "nothing was scheduled"
        return elapsed

    @property
    def _decodes_only(self) -> bool:
        return all(state.generated_len() for state in self._processor.scheduler.active_requests.values())

    def _prepare_timed(self, **arguments: Any) -> None:
        began = thread_time_ns()
        self._prepare(**arguments)
        self._tensors_ns += thread_time_ns() - began


def _processor(batch: int, new_tokens: int) -> Any:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HEAD_DIM,
        intermediate_size=HEAD_DIM,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
    )
    model = LlamaForCausalLM(config)
    batching = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=batch * (CONTEXT + PAGE_SIZE + new_tokens) * 3 // 2 // PAGE_SIZE,
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_requests_per_batch=batch,
    )
    generation = GenerationConfig(eos_token_id=1, do_sample=False)  # type: ignore[no-untyped-call]
    manager = model.init_continuous_batching(generation, batching)
    # Without flash attention it would keep a mask of gigabytes for a forward that never runs.
    model.config._attn_implementation = "flash_attention_2"
    return manager._create_batch_processor()

"""transformers' continuous batching: the manager behind `generate_batch`, with streaming and prefix sharing on."""

import queue

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

from bench.peers.lines import Prompt, Settings, serve
from bench.peers.stepping import Progress, SteppedPeer

PAGE_SIZE = 256
MAX_BATCH_TOKENS = 1024
"""Its default of 8192 computes one mask over all of them; on a CPU this is the faster choice."""
WAIT_S = 1.0


class GenerateBatch:
    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32, attn_implementation="sdpa")
        batching = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=-(-settings.cache_tokens // PAGE_SIZE),
            max_batch_tokens=MAX_BATCH_TOKENS,
            safety_margin=0.0,  # else cached blocks count as used, and all are dropped together
        )
        generation = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, eos_token_id=-1, max_new_tokens=1
        )
        self._manager: ContinuousBatchingManager = model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching
        )
        self._manager.start()

    def submit(self, request: str, prompt: Prompt, new: int) -> None:
        self._manager.add_request(prompt, request, max_new_tokens=new, streaming=True, eos_token_id=-1)

    def progress(self) -> list[Progress]:
        outputs = self._manager.output_router.output_queue
        try:
            came = [outputs.get(timeout=WAIT_S)]
        except queue.Empty:
            if not self._manager.is_running():
                raise RuntimeError("the generation thread has ended") from None
            return []
        while not outputs.empty():
            came.append(outputs.get())
        failed = [output.error for output in came if output.error]
        if failed:
            raise RuntimeError(failed[0])
        return [Progress(output.request_id, len(output.generated_tokens)) for output in came]

    def close(self) -> None:
        self._manager.stop(block=True, hard_stop=True)


if __name__ == "__main__":
    serve(lambda settings: SteppedPeer(GenerateBatch(settings)))

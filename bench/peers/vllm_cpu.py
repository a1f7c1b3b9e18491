"""vLLM on the CPU: float32, its engine stepped in this process, prefix caching on."""

import os

# Read when vllm is imported. In one process: the engine neither spins nor serialises between steps.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

from vllm import EngineArgs, LLMEngine, SamplingParams

from bench.peers.lines import Prompt, Settings, serve
from bench.peers.stepping import Progress, SteppedPeer

BYTES_PER_TOKEN = 30 * 3 * 64 * 2 * 4
"""KV of SmolLM2-135M in float32: layers, KV heads, head size, K and V, bytes."""
GIB = 1 << 30


class VllmCpu:
    def __init__(self, settings: Settings) -> None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        arguments = EngineArgs(
            model=settings.model,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            max_model_len=settings.max_context,
            max_num_seqs=settings.max_requests,
            kv_cache_memory_bytes=settings.cache_tokens * BYTES_PER_TOKEN,
            disable_log_stats=True,
        )
        self._engine = LLMEngine.from_engine_args(arguments)

    def submit(self, request: str, prompt: Prompt, new: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
        self._engine.add_request(request, {"prompt_token_ids": prompt}, params)

    def progress(self) -> list[Progress]:
        return [Progress(output.request_id, len(output.outputs[0].token_ids)) for output in self._engine.step()]

    def close(self) -> None:
        self._engine.engine_core.shutdown()


if __name__ == "__main__":
    serve(lambda settings: SteppedPeer(VllmCpu(settings)))

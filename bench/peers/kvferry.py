"""kvferry's own engine, with the nodes' defaults: stepped in this process, prefix sharing on."""

from pathlib import Path

from bench.peers.lines import Prompt, Settings, serve
from bench.peers.stepping import Progress, SteppedPeer
from engine.build import build_engine
from engine.config import ContinuousBatchingConfig
from engine.options import EngineOptions
from engine.request import Request
from protocol.messages import FinishReason
from protocol.sampling import SamplingParams

PAGE_SIZE = 64
MAX_BATCH_TOKENS = 512


class Kvferry:
    def __init__(self, settings: Settings) -> None:
        batching = ContinuousBatchingConfig(
            page_size=PAGE_SIZE,
            num_blocks=-(-settings.cache_tokens // PAGE_SIZE),
            max_batch_tokens=MAX_BATCH_TOKENS,
            max_requests_per_batch=settings.max_requests,
        )
        self._engine = build_engine(EngineOptions(Path(settings.model), batching, settings.threads), head=True)

    def submit(self, request: str, prompt: Prompt, new: int) -> None:
        self._engine.add(Request(request, prompt, SamplingParams(max_new_tokens=new, ignore_eos=True)))

    def progress(self) -> list[Progress]:
        output = self._engine.step()
        failed = [ended.failure for ended in output.ended if ended.reason is FinishReason.ERROR]
        if failed:
            raise RuntimeError(str(failed[0]))
        return [Progress(new.request_id, new.index + 1) for new in output.tokens]

    def close(self) -> None:
        self._engine.close()


if __name__ == "__main__":
    serve(lambda settings: SteppedPeer(Kvferry(settings)))

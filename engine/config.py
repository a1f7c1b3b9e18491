"""The settings of one engine: transformers' names and defaults where it has the setting, ours marked (ours)."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args, get_type_hints

import msgspec

from engine.documented import allowed
from engine.prefix_cache import EvictionPolicy

MIN_PAGE_SIZE = 4
MAX_COUNT = (1 << 31) - 1
"""Block ids and counts travel in 31 bits."""
DEFAULT_BATCH_TOKENS = 8192
DEFAULT_REQUESTS = 1024
DEFAULT_Q_PADDING = 64
DEFAULT_KV_PADDING = 16384
SchedulerType = Literal["fifo", "prefill_first"]
DEFAULT_MARGINS: dict[SchedulerType, float] = {"fifo": 0.15, "prefill_first": 0.0}
EVICTION_POLICIES: tuple[str, ...] = get_args(EvictionPolicy)
OMITTED = {
    "max_blocks_per_request": "block tables have no fixed width here, so decoding is always on the block-table path",
    "varlen_compile_config": "no step is compiled by torch.compile",
    "decode_compile_config": "no step is compiled by torch.compile",
    "default_compile_level": "no step is compiled by torch.compile",
    "per_request_processors": "always on",
    "drop_unsupported_processors": "none is unsupported",
    "return_logprobs": "asked for by each request (SamplingParams.logprobs)",
    "auto_switch_to_flash": "attention always runs on our own backends, the model is never changed",
    "disable_nccl_graph_mixing": "tensor parallelism is there on CPUs only, without NCCL",
    "cpu_group_timeout": "how long the processes of one model wait for each other is fixed",
    "use_default_compile_configs": "deprecated",
    "max_cached_graphs": "deprecated",
    "block_size": "deprecated, it is page_size",
}
"""Fields of transformers' ContinuousBatchingConfig that do not apply here, and why."""

Size = Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


@dataclass(frozen=True, kw_only=True)
class ContinuousBatchingConfig:
    """Raises ValueError at construction for values of another type or outside their range. Each comment below is the
    field's reference."""

    page_size: Annotated[int, msgspec.Meta(ge=MIN_PAGE_SIZE, le=MAX_COUNT)] = 256
    """Tokens in one page of KV."""
    num_blocks: Size | None = None
    """Size of the cache in blocks of `page_size` tokens of every layer; None: as much as the memory share allows."""
    max_batch_tokens: Size | None = None
    """Query tokens in one forward at most; None: 8192."""
    max_memory_percent: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] | None = None
    """Share of free memory for cache, inputs and activations; None: 0.8 on CUDA, 0.6 on a CPU."""
    max_requests_per_batch: Size | None = None
    """Requests in one forward at most; None: 1024. Never more than max_batch_tokens."""
    allow_block_sharing: bool = True
    """Let requests share cached blocks of equal prefixes. Models with sliding-window layers never do."""
    use_async_batching: bool | None = None
    """Schedule the next forward while one runs; None: on where CUDA graphs are."""
    use_cuda_graph: bool | None = None
    """Capture and replay forwards as CUDA graphs; None: on where there is CUDA. On a CPU True is ignored, with a
    warning."""
    q_padding_interval_size: Count = 0
    """Query tokens are padded to a multiple of it where graphs are used; 0: 64."""
    kv_padding_interval_size: Count = 0
    """KV tokens are padded to a multiple of it where graphs are used; 0: 16384."""
    scheduler_type: SchedulerType = "fifo"
    """"fifo": decodes before prompts under way; "prefill_first": the other way round. New prompts come last."""
    eviction_policy: EvictionPolicy = "most_recent"
    """(ours) Which cached blocks go first when room is needed: "most_recent" released, "lru", or "all" at once."""
    max_overtakes: Count = 64
    """(ours) Times that later requests may pass a waiting one that does not fit before it holds the queue; 0: never."""
    safety_margin: Share | None = None
    """Share of free cache below which no prompt is started or continued, unless nothing else runs; None: 0.15 for
    fifo, 0 for prefill_first. 1: prompts start only in an empty cache."""
    seed: int | None = None
    """Of the per-request seeds that requests leave to the engine; None: drawn from the operating system."""
    cpu_offload_space: Annotated[float, msgspec.Meta(ge=0.0, lt=MAX_COUNT)] | None = 0.0
    """GiB of memory for the KV of requests that had to make room; 0: none, they are computed anew; None: the share
    below of what is available. The log says how much was taken."""
    cpu_offload_space_safety_threshold: Share = 0.8
    """Share of available memory that cpu_offload_space may take at most; 1: no cap."""
    max_queue_size: Count = 0
    """Requests that may wait to be taken in by the engine's thread; 0: any number. Only ContinuousBatchingManager and
    `kvferry generate` have such a queue."""
    debug_pages: bool = False
    """(ours) Poison free pages and check the poison when they are taken again. Slow."""

    def __post_init__(self) -> None:
        for name, hint in _TYPES.items():
            value = getattr(self, name)
            try:
                msgspec.convert(value, hint)
            except msgspec.ValidationError:
                raise ValueError(f"{name} {value!r}: must be {allowed(hint)}") from None

    @property
    def batch_tokens(self) -> int:
        return self.max_batch_tokens or DEFAULT_BATCH_TOKENS

    @property
    def request_cap(self) -> int:
        return min(self.max_requests_per_batch or DEFAULT_REQUESTS, self.batch_tokens)

    @property
    def margin(self) -> float:
        return DEFAULT_MARGINS[self.scheduler_type] if self.safety_margin is None else self.safety_margin


_TYPES = get_type_hints(ContinuousBatchingConfig, include_extras=True)

"""The settings of one engine: transformers' names and defaults where it has the setting, ours marked (ours)."""

from dataclasses import dataclass
from typing import get_args

from engine.prefix_cache import EvictionPolicy

MIN_PAGE_SIZE = 4
MAX_COUNT = (1 << 31) - 1
"""Block ids and counts travel in 31 bits."""
DEFAULT_BATCH_TOKENS = 8192
DEFAULT_REQUESTS = 1024
DEFAULT_Q_PADDING = 64
DEFAULT_KV_PADDING = 16384
DEFAULT_MARGINS = {"fifo": 0.15, "prefill_first": 0.0}
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
    "disable_nccl_graph_mixing": "no tensor parallelism inside an engine",
    "cpu_group_timeout": "no tensor parallelism inside an engine",
    "use_default_compile_configs": "deprecated",
    "max_cached_graphs": "deprecated",
    "block_size": "deprecated, it is page_size",
}
"""Fields of transformers' ContinuousBatchingConfig that do not apply here, and why."""


@dataclass(frozen=True, kw_only=True)
class ContinuousBatchingConfig:
    """Raises ValueError at construction for values that cannot work. Each comment below is the field's reference."""

    page_size: int = 256
    """Tokens in one page of KV, at least 4."""
    num_blocks: int | None = None
    """Size of the cache in blocks of `page_size` tokens of every layer; None: as much as the memory share allows."""
    max_batch_tokens: int | None = None
    """Query tokens in one forward at most; None: 8192."""
    max_memory_percent: float | None = None
    """Share of free memory, above 0 up to 1, for cache, inputs and activations; None: 0.8 on CUDA, 0.6
    on a CPU."""
    max_requests_per_batch: int | None = None
    """Requests in one forward at most; None: 1024. Never more than max_batch_tokens."""
    allow_block_sharing: bool = True
    """Let requests share cached blocks of equal prefixes. Models with sliding-window layers never do."""
    use_async_batching: bool | None = None
    """Schedule the next forward while one runs; None: on where CUDA graphs are."""
    use_cuda_graph: bool | None = None
    """Capture and replay forwards as CUDA graphs; None: on where there is CUDA."""
    q_padding_interval_size: int = 0
    """Query tokens are padded to a multiple of it where graphs are used; 0: 64."""
    kv_padding_interval_size: int = 0
    """KV tokens are padded to a multiple of it where graphs are used; 0: 16384."""
    scheduler_type: str = "fifo"
    """"fifo": decodes before prompts under way; "prefill_first": the other way round. New prompts come last."""
    eviction_policy: EvictionPolicy = "most_recent"
    """(ours) Which cached blocks go first when room is needed: "most_recent" released, "lru", or "all" at once."""
    max_overtakes: int = 64
    """(ours) Times that later requests may pass a waiting one that does not fit, before it holds the queue."""
    safety_margin: float | None = None
    """Share of free cache below which no prompt is started or continued, unless nothing else runs; None: 0.15 for
    fifo, 0 for prefill_first."""
    seed: int | None = None
    """Of the per-request seeds that requests leave to the engine; None: drawn from the operating system."""
    cpu_offload_space: float | None = 0.0
    """GiB of memory for the KV of requests that had to make room; 0: none, they are computed anew; None: the share
    below of what is available."""
    cpu_offload_space_safety_threshold: float = 0.8
    """Share of available memory that cpu_offload_space may take at most; 1: no cap."""
    max_queue_size: int = 0
    """Requests that may wait to be taken in by the engine's thread; 0: any number. Only the offline face has it."""
    debug_pages: bool = False
    """(ours) Poison free pages and check the poison when they are taken again. Slow."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_counts()
        for name in ("safety_margin", "cpu_offload_space_safety_threshold", "max_memory_percent"):
            share = getattr(self, name)
            if share is not None and not 0.0 <= share <= 1.0:
                raise ValueError(f"{name} {share}: must be within 0 and 1")
        if self.max_memory_percent == 0.0:
            raise ValueError("max_memory_percent 0: nothing would be left for the cache")
        if self.cpu_offload_space is not None and not 0.0 <= self.cpu_offload_space < MAX_COUNT:
            raise ValueError(f"cpu_offload_space {self.cpu_offload_space}: must be GiB, 0 or more, or None")

    def _check_choices(self) -> None:
        if self.scheduler_type not in DEFAULT_MARGINS:
            raise ValueError(f"scheduler_type {self.scheduler_type!r}: must be one of {', '.join(DEFAULT_MARGINS)}")
        if self.eviction_policy not in EVICTION_POLICIES:
            raise ValueError(f"eviction_policy {self.eviction_policy!r}: must be one of {', '.join(EVICTION_POLICIES)}")

    def _check_counts(self) -> None:
        for name, least in _LEAST_COUNTS.items():
            count = getattr(self, name)
            if count is not None and not least <= count <= MAX_COUNT:
                raise ValueError(f"{name} {count}: must be at least {least} and at most {MAX_COUNT}")

    @property
    def batch_tokens(self) -> int:
        return self.max_batch_tokens or DEFAULT_BATCH_TOKENS

    @property
    def request_cap(self) -> int:
        return min(self.max_requests_per_batch or DEFAULT_REQUESTS, self.batch_tokens)

    @property
    def margin(self) -> float:
        return DEFAULT_MARGINS[self.scheduler_type] if self.safety_margin is None else self.safety_margin


_LEAST_COUNTS = {
    "page_size": MIN_PAGE_SIZE,
    "num_blocks": 1,
    "max_batch_tokens": 1,
    "max_requests_per_batch": 1,
    "max_overtakes": 1,
    "q_padding_interval_size": 0,
    "kv_padding_interval_size": 0,
    "max_queue_size": 0,
}

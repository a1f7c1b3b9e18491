"""The settings of one engine."""

from dataclasses import dataclass

MIN_PAGE_SIZE = 4
MAX_COUNT = (1 << 31) - 1
"""Block ids and counts travel in 31 bits."""
SCHEDULERS = ("fifo",)


@dataclass(frozen=True, kw_only=True)
class ContinuousBatchingConfig:
    """Raises ValueError at construction for values that cannot work.

    num_blocks: the pool's size in blocks; a block is `page_size` tokens of every layer.
    max_batch_tokens: query tokens in one forward.
    max_requests_per_batch: capped to max_batch_tokens.
    safety_margin: share of free blocks below which no prompt is started or continued, unless nothing else runs.
    max_overtakes: times that later requests may pass a waiting one that does not fit, before it holds the queue.
    seed: of the per-request seeds that requests leave to the engine; None draws from the operating system.
    debug_pages: poison free pages and check the poison when they are taken again.
    """

    num_blocks: int
    page_size: int = 256
    max_batch_tokens: int = 8192
    max_requests_per_batch: int = 1024
    scheduler_type: str = "fifo"
    safety_margin: float = 0.15
    max_overtakes: int = 64
    seed: int | None = None
    debug_pages: bool = False

    def __post_init__(self) -> None:
        if self.page_size < MIN_PAGE_SIZE:
            raise ValueError(f"page_size {self.page_size}: must be at least {MIN_PAGE_SIZE} tokens")
        for name in ("num_blocks", "max_batch_tokens", "max_requests_per_batch", "max_overtakes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")
            if getattr(self, name) > MAX_COUNT:
                raise ValueError(f"{name} {getattr(self, name)}: must be at most {MAX_COUNT}")
        if not 0.0 <= self.safety_margin <= 1.0:
            raise ValueError(f"safety_margin {self.safety_margin}: must be within 0 and 1")
        if self.scheduler_type not in SCHEDULERS:
            raise ValueError(f"scheduler_type {self.scheduler_type!r}: must be one of {', '.join(SCHEDULERS)}")

    @property
    def request_cap(self) -> int:
        return min(self.max_requests_per_batch, self.max_batch_tokens)

    @property
    def cache_tokens(self) -> int:
        """Tokens whose KV the pool holds; also the cache budget: the most that one forward may read."""
        return self.num_blocks * self.page_size

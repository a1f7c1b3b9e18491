"""How large a cache the memory allows: the bytes of an engine as a function of its sizes, and its inverse. Pure.

The engine's peak, for M query tokens in a forward and a pool of S chunks of t tokens each (of the group with most):

    M * per_token             activations of the largest part of a layer (or of the head), and a token's inputs
  + S * per_chunk             a chunk, and the indices to read and write it
  + S * t * copy              KV that is gathered for attention
  + M * (S * t + M) * pair    masks, and scores where attention keeps them
  + fixed                     the two reserved chunks; the logits of each request where the head sees last tokens only

Where rows are attended to one by one, no more than the longest of them is gathered at once, nor masked for each query.
Latent vectors are gathered, and expanded, for all rows at once.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

from engine.geometry import RESERVED_CHUNKS, CacheGeometry
from engine.models.families import kv_shape
from protocol.layout import ITEM_SIZES

GIB = 1 << 30
_INDEX_BYTES = 8
_INPUT_BYTES = 4
_INPUTS_PER_TOKEN = 7
"""Token, position, carried token, row of logits, ends of queries and of keys, one to spare: 4 bytes each."""
_MASK_MAKING_BYTES = 9
"""Of a query and a key while torch makes their mask: a distance of 8 bytes and a bit of 1."""
_SCORES_KEPT = 4
"""Float32 copies of a head's scores that the plain formula (softcaps, sinks) holds at once."""


def default_memory_share(device_type: str) -> float:
    """Of what is available; `device_type` as torch names it. Requests may edit their logits, for which room is left."""
    return 0.6 if device_type in ("cpu", "mps") else 0.8


@dataclass(frozen=True)
class MemoryUse:
    """What an engine's peak depends on besides its two sizes, in bytes.

    `head`: of one row of logits. `max_requests`: rows of logits in a forward; None: as many as tokens. `layer`: of one
    token in the part of a layer that takes most, without what is gathered. `gathered`: of one cached token. `pair`: of
    one query and key. `longest`: tokens of the longest row where they are attended to one by one, else None.
    `together`: they are gathered for all rows at once all the same. `workspace`: of kernels. `asynchronous`: inputs and
    masks exist twice.
    """

    geometry: CacheGeometry
    head: int
    layer: int
    gathered: int
    pair: int = 0
    max_requests: int | None = None
    longest: int | None = None
    together: bool = False
    workspace: int = 0
    asynchronous: bool = False
    logprobs: bool = False

    @property
    def per_token(self) -> int:
        inputs = _INPUT_BYTES * (_INPUTS_PER_TOKEN + (2 if self.logprobs else 1)) + 2 * _INDEX_BYTES * self._groups
        head = self.head if self.max_requests is None else 0
        return max(head, self.layer + self.gathered) + self._copies * inputs

    @property
    def per_chunk(self) -> int:
        return self.geometry.chunk_bytes + self.chunk_tokens * self._copies * _INDEX_BYTES * self._groups

    @property
    def fixed(self) -> int:
        return RESERVED_CHUNKS * self.geometry.chunk_bytes + (self.max_requests or 0) * self.head + self.workspace

    @property
    def chunk_tokens(self) -> int:
        return self.geometry.page_size * max(self.geometry.blocks_per_chunk)

    def footprint(self, batch_tokens: int, chunks: int) -> int:
        held = chunks * self.chunk_tokens
        cached = held if self.together else self._at_once(held)
        seen = self._at_once(held + batch_tokens)
        attention = cached * self.gathered + batch_tokens * seen * self.pair * self._copies
        return self.fixed + batch_tokens * self.per_token + chunks * self.per_chunk + attention

    def chunks_within(self, budget: int, batch_tokens: int) -> int:
        """The most chunks whose footprint is within `budget`; 0 if not even one's is."""
        most = range(1, max(1, budget // self.per_chunk) + 1)
        return bisect_right(most, budget, key=lambda chunks: self.footprint(batch_tokens, chunks))

    def _at_once(self, tokens: int) -> int:
        return tokens if self.longest is None else min(tokens, self.longest)

    @property
    def _groups(self) -> int:
        return len(self.geometry.groups)

    @property
    def _copies(self) -> int:
        return 2 if self.asynchronous else 1


@dataclass(frozen=True)
class ModelSizes:
    """`intermediate`: features of the MLP that one token passes through at once. `plain_scores`: attention runs by the
    plain formula, for it knows a softcap or sinks that fused attention does not. `expanded`: of one head, features of a
    token's K and V that are made from its latent vector; 0 where pages hold K and V."""

    hidden: int
    intermediate: int
    heads: int
    vocab: int
    max_positions: int
    plain_scores: bool = False
    expanded: int = 0

    @classmethod
    def of(cls, config: Any) -> "ModelSizes":
        """`config`: a transformers configuration."""
        experts = getattr(config, "num_experts_per_tok", None) or 0
        softcap = getattr(config, "attn_logit_softcapping", None)
        return cls(
            hidden=config.hidden_size,
            intermediate=max(config.intermediate_size, experts * getattr(config, "moe_intermediate_size", 0)),
            heads=config.num_attention_heads,
            vocab=config.vocab_size,
            max_positions=config.max_position_embeddings,
            plain_scores=softcap is not None or config.model_type == "gpt_oss",
            expanded=_expanded(config) if kv_shape(config).parts == 1 else 0,
        )

    def divided(self, world: int) -> "ModelSizes":
        """Of one of `world` ranks."""
        return replace(self, heads=self.heads // world, intermediate=self.intermediate // world)

    def on_cuda(self, geometry: CacheGeometry, max_requests: int, asynchronous: bool, workspace: int) -> MemoryUse:
        """Attention reads pages in place and keeps no scores. What it would gather elsewhere is left for what is not
        counted: graphs and their schedules."""
        item = ITEM_SIZES[geometry.dtype]
        return MemoryUse(
            geometry=geometry,
            head=self.head_bytes(item),
            layer=self.layer_bytes(geometry),
            gathered=2 * geometry.kv_heads * geometry.head_dim * item,
            max_requests=max_requests,
            workspace=workspace,
            asynchronous=asynchronous,
            logprobs=True,
        )

    def on_cpu(self, geometry: CacheGeometry, max_requests: int, asynchronous: bool) -> MemoryUse:
        """Long chunks run in torch, row by row: K and V of one are gathered, and every row has its mask. Latent vectors
        are copied once more on their way through the projection."""
        item = ITEM_SIZES[geometry.dtype]
        masks = len(geometry.groups) * item + _MASK_MAKING_BYTES
        return MemoryUse(
            geometry=geometry,
            head=self.head_bytes(item),
            layer=self.layer_bytes(geometry),
            gathered=(2 * geometry.kv_heads * geometry.head_dim + self.heads * self.expanded) * item,
            pair=masks + (4 * _SCORES_KEPT * self.heads if self.plain_scores else 0),
            max_requests=max_requests,
            longest=self.max_positions,
            together=self.expanded > 0,
            asynchronous=asynchronous,
            logprobs=True,
        )

    def head_bytes(self, item: int) -> int:
        """A hidden state, and its logits in float32."""
        return self.hidden * item + 4 * self.vocab

    def layer_bytes(self, geometry: CacheGeometry) -> int:
        """Attention: the residual, and Q, K and V. MLP: the residual and its norm, and gate, up and their product."""
        attention = self.hidden + (self.heads + 2 * geometry.kv_heads) * geometry.head_dim
        return ITEM_SIZES[geometry.dtype] * max(attention, 2 * self.hidden + 3 * self.intermediate)


@dataclass(frozen=True)
class MemoryBudget:
    """`share` of the `available` bytes."""

    available: int
    share: float

    @property
    def bytes(self) -> int:
        return int(self.available * self.share)

    def __str__(self) -> str:
        return f"{gib(self.bytes)} ({self.share:g} of {gib(self.available)} available)"


def choose_chunks(use: MemoryUse, budget: MemoryBudget, batch_tokens: int, num_blocks: int | None) -> int:
    """Data chunks of the pool: those for `num_blocks` if it is given, else as many as the budget allows. Raises
    MemoryError where they, or a single one, do not fit, and ValueError for sizes that are none."""
    if batch_tokens < 1 or (num_blocks is not None and num_blocks < 1):
        raise ValueError(f"max_batch_tokens {batch_tokens}, num_blocks {num_blocks}: must be at least 1")
    most = use.chunks_within(budget.bytes, batch_tokens)
    if num_blocks is None:
        if most < 1:
            raise MemoryError(_too_little(use, budget, batch_tokens))
        return most
    chunks = use.geometry.chunks_for(num_blocks)
    needed = use.footprint(batch_tokens, chunks)
    if needed > budget.bytes:
        blocks = use.geometry.whole_blocks(most)
        advice = f"lower num_blocks to {blocks}" if blocks else "lower max_batch_tokens or num_blocks"
        raise MemoryError(
            f"num_blocks {num_blocks} with max_batch_tokens {batch_tokens} takes {gib(needed)} of {budget}: {advice},"
            " or raise max_memory_percent"
        )
    return chunks


def _too_little(use: MemoryUse, budget: MemoryBudget, batch_tokens: int) -> str:
    return (
        f"max_batch_tokens {batch_tokens} and a cache of one chunk take {gib(use.footprint(batch_tokens, 1))} of"
        f" {budget}: lower max_batch_tokens or page_size, or raise max_memory_percent"
    )


def offload_chunks(space: float | None, threshold: float, available: int, geometry: CacheGeometry) -> int:
    """Whole chunks of host memory for requests that had to make room. `space`: GiB, None for all that `threshold`, a
    share of the `available` bytes, lets it take; more than that it never gets."""
    cap = available * threshold
    wanted = cap if space is None else min(space * GIB, cap)
    return int(wanted) // geometry.chunk_bytes


def _expanded(config: Any) -> int:
    """Of one head: what the projection makes, then keys with their rotary part, and values as wide as those."""
    query = config.qk_nope_head_dim + config.qk_rope_head_dim
    return int(config.qk_nope_head_dim + config.v_head_dim + 2 * query)


def gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB // 100 else f"{size / (1 << 20):.2f} MiB"

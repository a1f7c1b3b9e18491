"""The engine's settings on a command line."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from engine.config import DEFAULT_MARGINS, EVICTION_POLICIES, ContinuousBatchingConfig, SchedulerType
from protocol.context import ContextName, context_names
from protocol.layout import ITEM_SIZES, MAX_RANKS, DType

MAX_ENGINES = 64


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`threads`: torch's intra-op threads of each device's process, None for its default. `device`: as torch names it.
    `tp`: devices that the model is divided among. `model`: a str or another PathLike becomes a Path. `context`: what is
    kept of the position before each prompt's last token. Raises ValueError for what cannot be."""

    model: Path
    batching: ContinuousBatchingConfig
    threads: int | None
    device: str = "cpu"
    dtype: DType = "float32"
    tp: int = 1
    context: tuple[ContextName, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", Path(self.model))
        if self.threads is not None and self.threads < 1:
            raise ValueError("threads (--threads) must be at least 1")
        if not 1 <= self.tp <= MAX_RANKS:
            raise ValueError(f"tp (--tp) must be at least 1 and at most {MAX_RANKS}")
        if self.tp > 1 and self.batching.use_async_batching:
            raise ValueError(
                "asynchronous batching (--async-batching) needs engines of one device each: leave out --tp"
            )


def add_engine_options(parser: argparse.ArgumentParser, alone: bool = False) -> None:
    """`alone`: the engine is no node's: it is one, and the help texts speak of none."""
    group = parser.add_argument_group("model and engine")
    group.add_argument("--model", required=True, type=Path, metavar="DIR", help="a local Hugging Face model folder")
    group.add_argument("--threads", type=int, help="CPU threads of each device (default: torch's choice)")
    group.add_argument(
        "--tp",
        type=int,
        default=1,
        help="devices that share the model, a process each, which reads the whole model to keep its part"
        " (default: %(default)s)",
    )
    if not alone:
        group.add_argument(
            "--dp",
            type=_engine_count,
            default=1,
            help="engines of this node, each for requests of its own (default: %(default)s)",
        )
        _add_context_option(group)
    parser.set_defaults(context=())
    _add_device_options(group)
    _add_cache_options(group)
    _add_scheduling_options(group, alone)
    checks = "check the poison when they are taken again" if alone else "on decode nodes compare checksums on arrival"
    group.add_argument("--debug-pages", action="store_true", help=f"poison freed pages and {checks} (slow)")


def _add_device_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="default: %(default)s")
    group.add_argument(
        "--dtype", default="float32", choices=tuple(ITEM_SIZES), help="of weights and KV (default: %(default)s)"
    )


def _add_context_option(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--context",
        type=_context,
        metavar="PARTS",
        help="keep of each prompt what the model made of the position before its last token: hidden (states, the last"
        " norm applied), logits or hidden,logits, in float32. A prefill node must keep what any of its decode nodes"
        " does, and sends it along (default: nothing)",
    )


def _add_cache_options(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--page-size", type=int, default=64, help="tokens per KV page (default: %(default)s)")
    group.add_argument(
        "--num-blocks",
        type=_count_or_auto,
        default=128,
        metavar="N|auto",
        help="KV blocks in the pool; auto: as many as the memory share allows (default: %(default)s)",
    )
    group.add_argument(
        "--max-memory-percent", type=float, metavar="SHARE", help="share of free memory to use (default: 0.6 on a CPU)"
    )
    group.add_argument("--no-block-sharing", action="store_true", help="never reuse the KV of equal prefixes")
    group.add_argument(
        "--eviction-policy",
        choices=EVICTION_POLICIES,
        default="most_recent",
        help="which cached prefixes go first",
    )
    group.add_argument(
        "--cpu-offload-space",
        type=float,
        default=0.0,
        metavar="GIB",
        help="host memory for the KV of requests that must make room; 0: compute it anew (default: %(default)s)",
    )


def _add_scheduling_options(group: "argparse._ArgumentGroup", alone: bool) -> None:
    group.add_argument(
        "--max-batch-tokens", type=int, default=512, help="tokens in a forward pass (default: %(default)s)"
    )
    group.add_argument(
        "--max-requests", type=int, default=64, help="requests in one forward pass (default: %(default)s)"
    )
    group.add_argument(
        "--scheduler",
        choices=tuple(DEFAULT_MARGINS),
        help="what goes first: decodes (fifo) or prompts under way (default: fifo"
        + (")" if alone else ", on prefill nodes prefill_first)"),
    )
    group.add_argument(
        "--safety-margin", type=float, metavar="SHARE", help="free share of the cache below which no prompt starts"
    )
    group.add_argument(
        "--async-batching",
        action="store_true",
        help="schedule the next forward while one runs" + ("" if alone else " (not on prefill nodes)"),
    )


def engine_options_from(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, scheduler: SchedulerType = "fifo"
) -> EngineOptions:
    """`scheduler`: where none is asked for. Exits with argparse's message if a value is impossible."""
    try:
        batching = ContinuousBatchingConfig(
            page_size=arguments.page_size,
            num_blocks=arguments.num_blocks,
            max_memory_percent=arguments.max_memory_percent,
            allow_block_sharing=not arguments.no_block_sharing,
            eviction_policy=arguments.eviction_policy,
            cpu_offload_space=arguments.cpu_offload_space,
            max_batch_tokens=arguments.max_batch_tokens,
            max_requests_per_batch=arguments.max_requests,
            scheduler_type=arguments.scheduler or scheduler,
            safety_margin=arguments.safety_margin,
            use_async_batching=arguments.async_batching or None,
            debug_pages=arguments.debug_pages,
        )
        return EngineOptions(
            model=arguments.model,
            batching=batching,
            threads=arguments.threads,
            device=arguments.device,
            dtype=arguments.dtype,
            tp=arguments.tp,
            context=arguments.context,
        )
    except ValueError as error:
        parser.error(str(error))


def _engine_count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= MAX_ENGINES:
        raise argparse.ArgumentTypeError(f"a node has 1 to {MAX_ENGINES} engines, not {number}")
    return number


def _context(text: str) -> tuple[ContextName, ...]:
    try:
        return context_names(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count_or_auto(text: str) -> int | None:
    return None if text == "auto" else int(text)

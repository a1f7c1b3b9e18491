"""The engine's settings on a node's command line."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from engine.config import ContinuousBatchingConfig


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """`threads`: torch's intra-op threads, None for its default."""

    model: Path
    batching: ContinuousBatchingConfig
    threads: int | None


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model and engine")
    group.add_argument("--model", required=True, type=Path, metavar="DIR", help="a local Hugging Face model folder")
    group.add_argument("--page-size", type=int, default=64, help="tokens per KV page (default: %(default)s)")
    group.add_argument("--num-blocks", type=int, default=128, help="KV blocks in the pool (default: %(default)s)")
    group.add_argument(
        "--max-batch-tokens", type=int, default=512, help="tokens in a forward pass (default: %(default)s)"
    )
    group.add_argument(
        "--max-requests", type=int, default=64, help="requests in one forward pass (default: %(default)s)"
    )
    group.add_argument("--threads", type=int, help="CPU threads of the model (default: torch's choice)")
    group.add_argument(
        "--debug-pages", action="store_true", help="poison freed pages and compare page checksums on arrival (slow)"
    )


def engine_options_from(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> EngineOptions:
    """Exits with argparse's message if a value is impossible."""
    if arguments.threads is not None and arguments.threads < 1:
        parser.error("--threads must be at least 1")
    try:
        batching = ContinuousBatchingConfig(
            page_size=arguments.page_size,
            num_blocks=arguments.num_blocks,
            max_batch_tokens=arguments.max_batch_tokens,
            max_requests_per_batch=min(arguments.max_requests, arguments.max_batch_tokens),
            debug_pages=arguments.debug_pages,
        )
    except ValueError as error:
        parser.error(str(error))
    return EngineOptions(model=arguments.model, batching=batching, threads=arguments.threads)

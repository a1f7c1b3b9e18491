"""What `kvferry generate` is told on its command line."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.options import EngineOptions, add_device_options, add_engine_options, engine_options_from
from protocol.sampling import SamplingParams

PROGRAM = "kvferry generate"
DESCRIPTION = """\
Generate from a file of prompts on this machine, without a cluster. Each input line is a JSON object with one of
"prompt" (text), "prompt_token_ids" or "messages" (for the model's chat template), and, where wanted, "id", "n" and
sampling parameters ("max_new_tokens", "temperature", "top_k", "seed", "logprobs", ...), which override the options
below. Output lines come in the order of the input. A line that cannot be used has its error there and does not stop the
others; the exit code is then 1. After Ctrl-C (130) what is finished is there."""


@dataclass(frozen=True)
class GenerateOptions:
    """`source`, `target`: None for standard input and output. `defaults`: of the sampling parameters."""

    engine: EngineOptions
    source: Path | None
    target: Path | None
    defaults: dict[str, Any]
    quiet: bool


def parse_options(argv: Sequence[str]) -> GenerateOptions:
    """Exits with a message on bad options, as argparse does."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description=DESCRIPTION)
    parser.add_argument("--input", required=True, metavar="FILE", help="prompts, a JSON object per line; - for stdin")
    parser.add_argument("--output", required=True, metavar="FILE", help="results, likewise; - for stdout")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no line of totals")
    add_engine_options(parser)
    add_device_options(parser)
    _add_sampling_options(parser)
    arguments = parser.parse_args(argv)
    source, target = _path(arguments.input), _path(arguments.output)
    if source is not None and target is not None and source.resolve() == target.resolve():
        parser.error("--input and --output are the same file")
    return GenerateOptions(
        engine=engine_options_from(parser, arguments),
        source=source,
        target=target,
        defaults=_sampling_defaults(parser, arguments),
        quiet=arguments.quiet,
    )


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling, where a line does not say")
    group.add_argument("--max-new-tokens", type=int, default=256, help="tokens per result (default: %(default)s)")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    group.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling (default: %(default)s)")
    group.add_argument("--seed", type=int, help="of each request (default: another one for each)")


def _sampling_defaults(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> dict[str, Any]:
    values = {name: getattr(arguments, name) for name in ("max_new_tokens", "temperature", "top_p", "seed")}
    try:
        msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as error:
        parser.error(str(error))
    return values


def _path(name: str) -> Path | None:
    return None if name == "-" else Path(name)

"""What `kvferry generate` is told on its command line."""

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.batch_file import PromptLine
from engine.documented import field_texts
from engine.options import EngineOptions, add_engine_options, engine_options_from
from protocol.sampling import SamplingParams

DESCRIPTION = """\
Generate from a file of prompts on this machine, without a cluster (`python -m engine` is the same command). Each input
line is a JSON object with a prompt, and where wanted sampling parameters, which override the options below."""
EPILOG = """\
fields of a line (docs/generation-file.md says more; null stands for the default):
{fields}

A line that cannot be used has its error in the output and does not stop the others. A result is written once all lines
before it are done, unless --as-completed is given. The output file is opened, and what was in it lost, when the first
result is written. After Ctrl-C or SIGTERM what is finished is there.

exit codes: 0; 1 if some lines failed; 2 if nothing could be run; 130 after Ctrl-C, 143 after SIGTERM"""
WIDTH = 118


@dataclass(frozen=True)
class GenerateOptions:
    """`source`, `target`: None for standard input and output. `in_order`: results come in the order of the lines.
    `defaults`: of the sampling parameters."""

    engine: EngineOptions
    source: Path | None
    target: Path | None
    in_order: bool
    defaults: dict[str, Any]
    quiet: bool


class _Parser(argparse.ArgumentParser):
    def format_help(self) -> str:
        self.epilog = EPILOG.format(fields=_fields_help())
        return super().format_help()


def parse_options(program: str, argv: Sequence[str]) -> GenerateOptions:
    """Exits with a message on bad options, as argparse does."""
    parser = _Parser(prog=program, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, metavar="FILE", help="prompts, a JSON object per line; - for stdin")
    parser.add_argument("--output", required=True, metavar="FILE", help="results, likewise; - for stdout")
    parser.add_argument(
        "--as-completed", action="store_true", help="write each result at once, whichever line it belongs to"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no line of totals")
    add_engine_options(parser, alone=True)
    _add_sampling_options(parser)
    arguments = parser.parse_args(argv)
    source, target = _path(arguments.input), _path(arguments.output)
    if source is not None and target is not None and source.resolve() == target.resolve():
        parser.error("--input and --output are the same file")
    return GenerateOptions(
        engine=engine_options_from(parser, arguments),
        source=source,
        target=target,
        in_order=not arguments.as_completed,
        defaults=_sampling_defaults(parser, arguments),
        quiet=arguments.quiet,
    )


def _fields_help() -> str:
    texts = {**field_texts(PromptLine), **field_texts(SamplingParams)}
    return "\n".join(
        textwrap.fill(f"{name:<19} {text}", WIDTH, initial_indent="  ", subsequent_indent=" " * 22)
        for name, text in texts.items()
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

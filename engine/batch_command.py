"""One run of `kvferry generate`: what has to be in place first, the run, its exit code."""

import codecs
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from engine.batch_options import GenerateOptions, parse_options
from engine.batch_progress import BatchProgress
from engine.batch_results import OrderedLines, ResultsFile, plain_reason
from engine.batch_run import BatchRun
from engine.build import build_engine
from engine.engine import Engine
from engine.errors import EngineError, UnusableFile
from engine.exit_codes import NOTHING_RAN, SOME_FAILED
from engine.interruption import Interruption
from engine.manager import ContinuousBatchingManager, StopMode
from engine.model_tokenizer import ModelTokenizer, load_tokenizer
from engine.models.loading import check_model

WINDOW_BATCHES = 2
"""Lines under way, in full batches: one that runs, one that waits."""


@dataclass(frozen=True)
class Prepared:
    """What a run takes besides its options."""

    lines: Sequence[bytes]
    tokenizer: ModelTokenizer
    engine: Engine
    target: ResultsFile


def run_command(program: str, argv: Sequence[str], interruption: Interruption) -> int:
    """The exit code: 0; 1 if some lines failed; 2 if nothing could be run, with the reason on standard error, and for
    usage errors, as argparse does; 130 or 143 if a signal came while lines were running."""
    options = parse_options(program, argv)
    try:
        prepared = prepare(options)
    except (EngineError, OSError, MemoryError, ValueError) as error:
        sys.stderr.write(f"{program}: {error}\n")
        return NOTHING_RAN
    try:
        with closing(prepared.engine), prepared.target:
            return run(program, options, prepared, interruption)
    except (EngineError, OSError) as error:
        sys.stderr.write(f"{program}: {error}\n")
        return SOME_FAILED


def prepare(options: GenerateOptions) -> Prepared:
    """What is quickly found wrong comes first. Nothing is written."""
    lines = read_lines(options.source)
    target = ResultsFile(options.target)
    target.check()
    check_model(options.engine.model, options.engine.tp)
    tokenizer = load_tokenizer(options.engine.model)
    return Prepared(lines, tokenizer, build_engine(options.engine, head=True), target)


def run(program: str, options: GenerateOptions, prepared: Prepared, interruption: Interruption) -> int:
    """The exit code."""
    engine, lines = prepared.engine, prepared.lines
    progress = BatchProgress(engine, sum(bool(line.strip()) for line in lines), options.quiet)
    window = WINDOW_BATCHES * engine.config.request_cap
    output = OrderedLines(prepared.target.write, options.in_order)
    with interruption.postponed(), ContinuousBatchingManager(engine) as manager:
        batch = BatchRun(manager, prepared.tokenizer, output, options.defaults, window, lambda: interruption.requested)
        batch.run(lines, progress.show)
        manager.stop(StopMode.HARD)
    progress.close(batch.totals)
    if interruption.requested:
        sys.stderr.write(f"{program}: {progress.interrupted(batch.totals)}\n")
        return interruption.exit_code
    prepared.target.write(b"")
    return SOME_FAILED if batch.totals.failed else 0


def read_lines(source: Path | None) -> Sequence[bytes]:
    """`source`: None for standard input. Without a byte order mark at the beginning. Raises UnusableFile."""
    try:
        raw = sys.stdin.buffer.read() if source is None else source.read_bytes()
    except OSError as error:
        raise UnusableFile(f"{source}: cannot be read: {plain_reason(error)}") from error
    return raw.removeprefix(codecs.BOM_UTF8).splitlines()

"""`python -m engine` (or `kvferry generate`): generate from a file of prompts, on this machine alone."""

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from engine.batch_options import PROGRAM, GenerateOptions, parse_options
from engine.batch_progress import BatchProgress
from engine.batch_run import BatchRun, OrderedLines
from engine.build import build_engine
from engine.engine import Engine
from engine.errors import EngineError
from engine.manager import ContinuousBatchingManager, StopMode
from engine.model_tokenizer import ModelTokenizer, load_tokenizer

INTERRUPTED = 130
WINDOW_BATCHES = 2
"""Lines under way, in full batches: one that runs, one that waits."""


class Interrupt:
    """The first Ctrl-C asks to stop; a second one stops at once."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """On the main thread."""
        self._before = signal.signal(signal.SIGINT, self._asked)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._before)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self._before)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 if anything failed, 130 after Ctrl-C; usage errors exit with 2 as argparse does."""
    options = parse_options(sys.argv[1:] if argv is None else argv)
    try:
        return generate(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (EngineError, OSError, MemoryError, ValueError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 1


def generate(options: GenerateOptions) -> int:
    """Nothing is written before the input is read and the model loaded."""
    source = sys.stdin.buffer.read() if options.source is None else options.source.read_bytes()
    tokenizer = load_tokenizer(options.engine.model)
    with closing(build_engine(options.engine, head=True)) as engine, opened(options.target) as target:
        return run(options, engine, tokenizer, source.splitlines(), target)


def run(
    options: GenerateOptions, engine: Engine, tokenizer: ModelTokenizer, lines: Sequence[bytes], target: BinaryIO
) -> int:
    """The exit code."""
    interrupt = Interrupt()
    progress = BatchProgress(engine, sum(bool(line.strip()) for line in lines), options.quiet)
    window = WINDOW_BATCHES * engine.config.request_cap
    with interrupt.watched(), ContinuousBatchingManager(engine) as manager:
        output = OrderedLines(flushing(target))
        batch = BatchRun(manager, tokenizer, output, options.defaults, window, lambda: interrupt.requested)
        batch.run(lines, progress.show)
        manager.stop(StopMode.HARD)
    progress.close(batch.totals)
    if interrupt.requested:
        return INTERRUPTED
    return 1 if batch.totals.failed else 0


def flushing(target: BinaryIO) -> Callable[[bytes], None]:
    """A line is in the file as soon as it is written."""

    def write(line: bytes) -> None:
        target.write(line)
        target.flush()

    return write


@contextmanager
def opened(target: Path | None) -> Iterator[BinaryIO]:
    if target is None:
        yield sys.stdout.buffer
    else:
        with target.open("wb") as file:
            yield file


if __name__ == "__main__":
    sys.exit(main())

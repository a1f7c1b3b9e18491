"""Playing seeds, with or without a trace of what happened."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from tests.simulation.script import draw
from tests.simulation.world import World

REGRESSIONS = Path(__file__).with_name("regressions.txt")


class SeedFailed(AssertionError):
    """`seed` is wrong in the way of its cause."""

    def __init__(self, seed: int, cause: BaseException) -> None:
        super().__init__(f"seed {seed}: {type(cause).__name__}: {cause}")
        self.seed = seed


def play(seed: int, say: Callable[[str], None] | None = None) -> None:
    """Raises SeedFailed. `say`: takes the trace, line by line."""
    if say is None:
        _play(World(draw(seed)))
        return
    script = draw(seed)
    world = World(script)
    clock = world.schedule.clock
    world.say = lambda line: say(f"{clock():12.6f}  {line}")
    with told(world.say):
        _play(world)


def _play(world: World) -> None:
    try:
        world.run()
    except Exception as error:
        raise SeedFailed(world.script.seed, error) from error


def first_failure(seeds: Iterable[int], at_most: int) -> tuple[int, SeedFailed] | None:
    """(seeds played, what went wrong), or None if none of the first `at_most` fails."""
    with quiet():
        for played, seed in enumerate(islice(seeds, at_most), 1):
            try:
                play(seed)
            except SeedFailed as failure:
                return played, failure
    return None


def regressions() -> list[int]:
    """Seeds that once failed."""
    lines = REGRESSIONS.read_text().splitlines()
    return [int(line.split()[0]) for line in lines if line and not line.startswith("#")]


@contextmanager
def quiet() -> Iterator[None]:
    """The nodes' logs are off: no formatting, and no noise."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def told(say: Callable[[str], None]) -> Iterator[None]:
    """What the nodes log becomes part of the trace."""
    handler = _Teller(say)
    level = logging.root.level
    logging.root.addHandler(handler)
    logging.root.setLevel(logging.INFO)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)
        logging.root.setLevel(level)


class _Teller(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", {})
        shown = ", ".join(f"{name}={value}" for name, value in fields.items())
        self._say(f"{record.getMessage()}: {shown}")

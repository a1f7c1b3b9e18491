"""Play many seeds, on every core, until one fails: `python -m tests.simulation --seeds 1000000`."""

import argparse
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext

from tests.simulation.play import SeedFailed, first_failure, play, quiet

BATCH = 200
REPORT_S = 10.0


def main() -> int:
    options = _options()
    if options.seed is not None:
        return _replay(options.seed, options.trace)
    return _search(range(options.first, options.first + options.seeds), options.jobs)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1_000_000, help="how many to play (default %(default)s)")
    parser.add_argument("--from", dest="first", type=int, default=10_000, help="the first one (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count(), help="processes (default: all cores)")
    parser.add_argument("--seed", type=int, help="play this one alone")
    parser.add_argument("--trace", action="store_true", help="with --seed: say what happens, in virtual seconds")
    return parser.parse_args()


def _replay(seed: int, trace: bool) -> int:
    try:
        with quiet() if not trace else nullcontext():
            play(seed, _say if trace else None)
    except SeedFailed as failure:
        _say("".join(traceback.format_exception(failure.__cause__)))
        _say(str(failure))
        return 1
    _say(f"seed {seed} is green")
    return 0


def _search(seeds: range, jobs: int) -> int:
    started = reported = time.monotonic()
    done = 0
    with multiprocessing.Pool(jobs) as pool:
        for batch, failed in pool.imap_unordered(_play_batch, _batches(seeds)):
            if failed is not None:
                pool.terminate()
                _replay(failed, trace=True)
                _say(f"again: python -m tests.simulation --seed {failed} --trace")
                _say("keep it: add it to tests/simulation/regressions.txt")
                return 1
            done += len(batch)
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                _say(f"{done} of {len(seeds)} seeds are green, {done / (reported - started):.0f} a second")
    _say(f"{done} seeds are green")
    return 0


def _batches(seeds: range) -> Iterator[range]:
    return (seeds[at : at + BATCH] for at in range(0, len(seeds), BATCH))


def _play_batch(seeds: range) -> tuple[range, int | None]:
    """The batch, and the seed that failed, if one did."""
    found = first_failure(seeds, len(seeds))
    return seeds, found[1].seed if found else None


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

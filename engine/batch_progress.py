"""How far a batch has come, for whoever watches."""

import sys
import time

from tqdm import tqdm

from engine.batch_run import Totals
from engine.engine import Engine

BAR = "{percentage:3.0f}% |{bar}| {n_fmt}/{total_fmt} prompts [{elapsed}<{remaining}{postfix}]"


class BatchProgress:
    """On standard error: a bar while it is a terminal, and a line of totals. Nothing where `quiet`."""

    def __init__(self, engine: Engine, lines: int, quiet: bool) -> None:
        self._engine = engine
        self._lines = lines
        self._quiet = quiet
        self._bar = tqdm(total=lines, bar_format=BAR, disable=True if quiet else None)
        self._began = time.monotonic()

    def show(self, totals: Totals) -> None:
        self._bar.set_postfix_str(f"{self._per_second(self._engine.counters.tokens)} tokens/s", refresh=False)
        self._bar.update(totals.lines - self._bar.n)
        self._bar.refresh()

    def close(self, totals: Totals) -> None:
        self._bar.close()
        if not self._quiet:
            sys.stderr.write(
                f"{totals.lines} prompts, {totals.failed} failed; {totals.prompt_tokens} prompt tokens, {totals.tokens}"
                f" new ones in {time.monotonic() - self._began:.1f} s: {self._per_second(totals.tokens)} tokens/s\n"
            )

    def interrupted(self, totals: Totals) -> str:
        """What an interruption left undone."""
        return f"interrupted: {totals.lines} of {self._lines} lines written"

    def _per_second(self, tokens: int) -> int:
        return round(tokens / max(time.monotonic() - self._began, 1e-3))

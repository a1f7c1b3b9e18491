"""`python -m engine`, which is `kvferry generate`: generate from a file of prompts, on this machine alone."""

import sys
from collections.abc import Sequence

from engine.exit_codes import NOTHING_RAN
from engine.interruption import Interruption

PROGRAM = "kvferry generate"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: that of `run_command`. After Ctrl-C or SIGTERM it is 130 or 143, with one line and no traceback,
    whenever the signal comes."""
    interruption = Interruption(f"{PROGRAM}: interrupted")
    with interruption.watched():
        try:
            from engine.batch_command import run_command  # takes seconds, in which a signal may come
        except ImportError as error:
            sys.stderr.write(f"{PROGRAM}: {error}; this install lacks what it needs, see `kvferry doctor`\n")
            return NOTHING_RAN
        return run_command(PROGRAM, sys.argv[1:] if argv is None else argv, interruption)


if __name__ == "__main__":
    sys.exit(main())

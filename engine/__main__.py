"""`python -m engine`, which is `kvferry generate`: generate from a file of prompts, on this machine alone."""

import sys
from collections.abc import Sequence

from engine.interruption import Interruption

PROGRAM = "kvferry generate"
NOTHING_RAN = 2


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: that of `run_command`, 130 or 143 after Ctrl-C or SIGTERM, which at any time leave one line and no
    traceback."""
    interruption = Interruption()
    with interruption.watched():
        try:
            from engine.batch_command import run_command  # takes seconds, in which a signal may come

            return run_command(PROGRAM, sys.argv[1:] if argv is None else argv, interruption)
        except BaseException as error:
            # Whatever an import or a model's loading makes of a KeyboardInterrupt.
            if interruption.requested:
                sys.stderr.write(f"{PROGRAM}: interrupted\n")
                return interruption.exit_code
            if isinstance(error, ImportError):
                sys.stderr.write(f"{PROGRAM}: {error}; this install lacks what it needs, see `kvferry doctor`\n")
                return NOTHING_RAN
            raise


if __name__ == "__main__":
    sys.exit(main())

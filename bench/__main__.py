"""`python -m bench NAME`: the benchmarks. Each prints one JSON line, then a table, always beside a peer or a limit."""

import sys

from bench import engine, prefix, scheduler, transfer

BENCHMARKS = {"engine": engine.main, "prefix": prefix.main, "scheduler": scheduler.main, "transfer": transfer.main}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in BENCHMARKS:
        sys.stderr.write(f"usage: python -m bench {{{','.join(BENCHMARKS)}}} [--help]\n")
        return 2
    return BENCHMARKS[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

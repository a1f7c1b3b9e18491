"""A child process that receives, for the tests that kill a target: opens a landing over 4 MiB and progresses.

Told by one JSON line on stdin (provider). Prints one JSON line with the landing's address, key, base and length.
"""

import json
import sys

import numpy as np

from fabric.libfabric import open_engine

LENGTH = 4 << 20


def main() -> None:
    engine = open_engine(json.loads(sys.stdin.readline())["provider"])
    memory = np.zeros(LENGTH, np.uint8)
    region = engine.register(memory.ctypes.data, LENGTH)
    landing = engine.open_landing("parent")
    remote = region.remote
    line = {"address": landing.address.hex(), "keys": remote.keys, "base": remote.base, "length": remote.length}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
    while True:
        engine.progress(60.0)


if __name__ == "__main__":
    main()

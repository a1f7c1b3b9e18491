"""A landing that `python -m bench messenger` stops before anybody connects to it."""

import sys

from bench.peers.orders import obey_orders
from fabric.libfabric import open_engine


def main() -> None:
    engine = open_engine(sys.argv[1])
    address = engine.open_landing("nobody").address.hex()
    obey_orders(lambda _: {"address": address})
    engine.close()


if __name__ == "__main__":
    main()

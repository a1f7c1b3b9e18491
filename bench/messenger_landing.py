"""A landing that `python -m bench messenger` stops before anybody connects to it."""

import sys
from typing import Any

from bench.peers.orders import obey_orders
from fabric.libfabric import open_engine


class Lands:
    def __init__(self, provider: str) -> None:
        self._engine = open_engine(provider)

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        return {"address": self._engine.open_landing("nobody").address.hex()}

    def close(self) -> None:
        self._engine.close()


if __name__ == "__main__":
    obey_orders(lambda: Lands(sys.argv[1]))

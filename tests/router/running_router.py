"""A real router, real HTTP and real ZeroMQ, on an event loop in a thread of the test's process."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from protocol.curve import ClusterKey
from router.config import RouterConfig
from router.model_folder import ModelFolder
from router.server import Router
from router.tokenizer import Tokenizer
from tests.router.fake_node import FakeNode, Script, node_status, stall
from tests.router.model_folder import MODEL

DEADLINE_S = 10.0
POLL_S = 0.01
_names = itertools.count()


class RunningRouter:
    """`config` overrides the defaults. Nodes made by `node` are closed with the router."""

    def __init__(self, folder: Path, key: ClusterKey, api_keys: tuple[bytes, ...] = (), **config: Any) -> None:
        self.key = key
        self.folder = ModelFolder(folder)
        self.tokenizer: Tokenizer = self.folder.tokenizer()
        self._config = RouterConfig(
            model=folder,
            served_model=MODEL,
            cluster_key=folder / "unused",
            **{"port": 0, "node_port": 0, "grace_s": 5.0, **config},
        )
        self._api_keys = api_keys
        self._addresses: Future[tuple[str, str]] = Future()
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)
        self._nodes: list[FakeNode] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._router: Router | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        self.url, self.nodes_address = self._addresses.result(DEADLINE_S)
        self.http = httpx.Client(base_url=self.url, timeout=DEADLINE_S, trust_env=False, verify=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.http.close()
        for node in self._nodes:
            node.close()
        self.stop()
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive(), "the router did not stop"

    def stop(self) -> None:
        if self._loop is not None and self._router is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._router.stop)

    def node(self, script: Script = stall, name: str | None = None, **status: Any) -> FakeNode:
        """A node that the router knows already."""
        node = self.unknown_node(script, name, **status).start()
        assert node.was_acknowledged()
        return node

    def unknown_node(self, script: Script = stall, name: str | None = None, **status: Any) -> FakeNode:
        """Not started yet."""
        described = node_status(name or f"node-{next(_names)}", **{"tokenizer": self.folder.digest, **status})
        node = FakeNode(self.nodes_address, self.key, described, script)
        self._nodes.append(node)
        return node

    def metric(self, name: str, labels: str = "") -> float:
        """The value of one sample; 0 where it has none yet."""
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(f"{name}{labels} "):
                return float(line.rpartition(" ")[2])
        return 0.0

    def eventually(self, holds: Callable[[], bool]) -> bool:
        """For state that only the router's pages show: asked again until it holds, within the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        pause = threading.Event()
        while not holds():
            if time.monotonic() > deadline:
                return False
            pause.wait(POLL_S)
        return True

    def members(self) -> dict[str, dict[str, Any]]:
        return {member["name"]: member for member in self.http.get("/v1/cluster").json()}

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            self._router = Router(self._config, self.folder, self.key, self._api_keys)
            await self._router.serve(lambda clients, nodes: self._addresses.set_result((clients, nodes)))
        except BaseException as error:
            if not self._addresses.done():
                self._addresses.set_exception(error)
            raise

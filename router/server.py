"""The router as one thing to open, serve and close."""

import asyncio
import contextlib
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence

import uvicorn
from fastapi import FastAPI

from protocol.curve import ClusterKey
from protocol.gates import Gates
from router.api_keys import ApiKeys
from router.app import create_app
from router.config import RouterConfig
from router.dispatch import Dispatcher
from router.generation import TextGenerator
from router.listener import listen
from router.membership import Membership
from router.metrics import Metrics
from router.model_folder import ModelFolder
from router.node_channel import NodeChannel
from router.node_events import NodeEvents
from router.operations import Operations
from router.prompts import Prompts
from router.serving import Serving

LAST_EVENT_S = 2
"""After the grace, for the error that ends each open answer. A client that does not even read that is cut."""


class Router:
    """Holds every part. `serve` returns after `stop` (or SIGTERM), once open answers ended; those that the grace does
    not suffice for end with an error."""

    def __init__(self, config: RouterConfig, model: ModelFolder, key: ClusterKey, api_keys: Sequence[bytes]) -> None:
        self._config = config
        self._gates = Gates(config.test_gates)
        self._channel = NodeChannel(key, f"tcp://{config.node_host}:{config.node_port}")
        membership = Membership(model.digest, time.monotonic())
        metrics = Metrics()
        self._dispatcher = dispatcher = Dispatcher(
            membership,
            self._channel,
            metrics,
            requests_per_node=config.requests_per_node,
            queue_limit=config.queue_limit,
        )
        self._events = NodeEvents(self._channel, membership, dispatcher)
        tokenizer, own = model.tokenizer(), model.max_context
        prompts = Prompts(tokenizer, own, lambda: membership.max_context(own), config.default_max_tokens)
        serving = Serving(config, prompts, TextGenerator(dispatcher, tokenizer, config.keep_alive_s, self._gates))
        operations = Operations(membership, dispatcher, lambda: self._events.alive)
        app = create_app(serving, operations, ApiKeys(api_keys), metrics, config.served_model)
        self._http = _HttpServer(_uvicorn_config(app, config))

    async def serve(self, announce: Callable[[str, str], None]) -> None:
        """`announce(clients, nodes)` gets both addresses once they are open. Raises OSError or zmq.ZMQError where an
        address is taken."""
        listener = listen(self._config.host, self._config.port)
        try:
            self._gates.start()
            self._channel.open()
            self._events.start()
            host, port = listener.getsockname()[:2]
            self._http.on_started = lambda: announce(f"http://{host}:{port}", self._channel.address)
            await self._http.serve(sockets=[listener])
        finally:
            listener.close()
            await self._events.close()
            self._channel.close()
            self._gates.close()

    def stop(self) -> None:
        """On the event loop: refuse new connections, give open answers the grace. Called again: end at once."""
        if self._http.should_exit:
            self._dispatcher.stop()
            self._http.force_exit = True
            return
        self._http.should_exit = True
        asyncio.get_running_loop().call_later(self._config.grace_s, self._dispatcher.stop)


class _HttpServer(uvicorn.Server):
    """Ends with a return instead of uvicorn's re-raised signal, and says when it listens."""

    on_started: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def stop_on_signals(router: Router) -> None:
    """SIGTERM and SIGINT stop the router. On the main thread's event loop."""
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, router.stop)


def _uvicorn_config(app: FastAPI, config: RouterConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=math.ceil(config.grace_s) + LAST_EVENT_S,
    )

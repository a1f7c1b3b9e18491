"""Named pause points for tests: a fault can be placed in exactly one phase of a request, without sleeps.

A process started with `--test-gates PATH` listens on that unix socket; a test holds, awaits and releases gates by
name (`prefill:from=64`, the chunk that begins at that token; `xfer:layer=1`, `decode:join`, `stream:tok=5`). Without
the switch every gate is open and costs one comparison.

One JSON object a line each way: {"hold": NAME} | {"release": NAME} | {"await": NAME, "timeout": SECONDS}
answered by {"ok": true} or {"ok": false}.
"""

import asyncio
import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

MAX_HOLD_S = 120.0
"""A thread waits at a held gate at most so long: a dead test must not hang a process."""


class Gates:
    """The gates of one process. Closed: every call returns at once."""

    def __init__(self, path: str | None = None) -> None:
        self._path = path
        self._held: set[str] = set()
        self._reached: set[str] = set()
        self._change = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._server: socket.socket | None = None

    def start(self) -> None:
        """Serve the unix socket, if a path was given."""
        if self._path is None:
            return
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(self._path)
        self._server.listen()
        threading.Thread(target=self._accept, name="gates", daemon=True).start()

    def close(self) -> None:
        if self._server is not None and self._path is not None:
            self._server.close()
            self._server = None
            os.unlink(self._path)

    def on_release(self, listener: Callable[[], None]) -> None:
        """`listener` runs on the gates' thread whenever a gate is released."""
        self._listeners.append(listener)

    def held(self, name: str) -> bool:
        """Whether `name` is held now; asking counts as reaching it. Never blocks."""
        if self._path is None:
            return False
        with self._change:
            return self._stands_at(name)

    def _stands_at(self, name: str) -> bool:
        """Under the lock. Whoever waits is asked again with every change: a gate that was released, and held again
        before it could go on, is reached anew."""
        if name in self._held and name not in self._reached:
            self._reached.add(name)
            self._change.notify_all()
        return name in self._held

    def wait(self, name: str) -> None:
        """Block this thread while `name` is held."""
        if self.held(name):
            with self._change:
                self._change.wait_for(lambda: not self._stands_at(name), MAX_HOLD_S)

    async def wait_async(self, name: str) -> None:
        """`wait` for a coroutine."""
        if self.held(name):
            await asyncio.to_thread(self.wait, name)

    def _accept(self) -> None:
        server = self._server
        while server is not None:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), name="gate-client", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rw") as lines:
            for line in lines:
                lines.write(json.dumps({"ok": self._obey(json.loads(line))}) + "\n")
                lines.flush()

    def _obey(self, command: dict[str, str | float]) -> bool:
        with self._change:
            if "hold" in command:
                self._held.add(str(command["hold"]))
                return True
            if "await" in command:
                name = str(command["await"])
                return self._change.wait_for(lambda: name in self._reached, float(command["timeout"]))
            self._held.discard(str(command["release"]))
            self._reached.discard(str(command["release"]))
            self._change.notify_all()
        for listener in self._listeners:
            listener()
        return True


class GateClient:
    """A test's end of one process's gates. Raises OSError where no such process runs."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise
        self._lines = self._socket.makefile("rw")

    def hold(self, name: str) -> None:
        self._ask({"hold": name})

    def release(self, name: str) -> None:
        self._ask({"release": name})

    def reached(self, name: str, timeout: float) -> bool:
        """Wait until some thread of the process stands at the held gate `name`."""
        return self._ask({"await": name, "timeout": timeout})

    def close(self) -> None:
        """Also after the process has gone, with a command still unsent."""
        with suppress(ConnectionError):
            self._lines.close()
        self._socket.close()

    def _ask(self, command: dict[str, str | float]) -> bool:
        self._lines.write(json.dumps(command) + "\n")
        self._lines.flush()
        answer = self._lines.readline()
        if not answer:
            raise ConnectionError("the process with the gates is gone")
        return bool(json.loads(answer)["ok"])

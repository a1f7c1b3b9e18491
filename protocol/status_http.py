"""The status pages of a node: a small HTTP server for `/health`, `/ready`, `/metrics` and `/debug/pages`.

Loopback unless told; GET only; a page is a function that returns its status and body, called on the server's thread.
"""

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

REQUEST_TIMEOUT_S = 5.0
CLOSE_CHECK_S = 0.1


@dataclass(frozen=True, slots=True)
class Page:
    status: int
    content_type: str
    body: bytes


def json_page(value: object, status: int = 200) -> Page:
    return Page(status, "application/json", json.dumps(value).encode())


class StatusServer:
    """Serves `pages` (path -> function) from its own threads between `start` and `close`."""

    def __init__(self, host: str, port: int, pages: Mapping[str, Callable[[], Page]]) -> None:
        self._host = host
        self._port = port
        self._pages = dict(pages)
        self._server: ThreadingHTTPServer | None = None
        self._thread: threading.Thread | None = None

    @property
    def address(self) -> str:
        """http://host:port, once started."""
        assert self._server is not None
        return f"http://{self._host}:{self._server.server_address[1]}"

    def start(self) -> None:
        """Raises OSError if the address is taken."""
        self._server = ThreadingHTTPServer((self._host, self._port), _handler_for(self._pages))
        self._server.daemon_threads = True
        serve = partial(self._server.serve_forever, poll_interval=CLOSE_CHECK_S)
        self._thread = threading.Thread(target=serve, name="status-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None


def _handler_for(pages: Mapping[str, Callable[[], Page]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_S

        def do_GET(self) -> None:
            make = pages.get(self.path.partition("?")[0])
            page = make() if make else json_page({"error": "no such page", "pages": sorted(pages)}, status=404)
            self.send_response(page.status)
            self.send_header("Content-Type", page.content_type)
            self.send_header("Content-Length", str(len(page.body)))
            self.end_headers()
            self.wfile.write(page.body)

        def log_message(self, format: str, *args: object) -> None:
            """Probes are not events."""

    return Handler

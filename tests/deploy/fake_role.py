"""Stands in for a role's process: `python fake_role.py router|prefill|decode OPTIONS`, with the real options' names.

The fake router serves /v1/cluster, /ready, /v1/models and chat completions; fake nodes join it by one HTTP request to
the address that real nodes would dial. The file faults.json in the model folder maps a process's name to a fault.
"""

import argparse
import json
import signal
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LEDGER = {
    "decode_node": "decode-0", "prefill_node": "prefill-0", "provider": "net", "attempts": 1, "prefill_chunks": 4,
    "queue_s": 0.01, "prefill_s": 0.2, "exposed_transfer_s": 0.02, "first_step_s": 0.03, "writes": 30, "bytes": 4096,
    "early_writes": 29, "last_chunk_writes": 30, "ttft_s": 0.3, "router_queue_s": 0.0, "other_s": 0.04, "tps": 20.0,
}  # fmt: skip


class Book:
    """The members that have joined."""

    def __init__(self) -> None:
        self.members: list[dict[str, Any]] = []


class Handler(BaseHTTPRequestHandler):
    book: Book
    fault: str

    def do_GET(self) -> None:
        models = {"object": "list", "data": [{"id": "fake", "object": "model"}]}
        self._answer({"/v1/cluster": self.book.members, "/ready": {}, "/v1/models": models}[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/join":
            self.book.members.append(body)
            self._answer({})
        elif self.fault == "error":
            self._answer({"error": {"message": "no decode node is ready"}}, status=503)
        else:
            self._stream()

    def _answer(self, value: object, status: int = 200) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        events: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": {"content": "An"}, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {"content": "swer"}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": 800, "completion_tokens": 2}, "kvferry": LEDGER},
        ]
        if self.fault == "cut":
            events = events[:1]
        for event in events:
            self.wfile.write(b": keep-alive\n\ndata: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("role")
    for option in (
        "--model",
        "--cluster-key",
        "--host",
        "--router",
        "--threads",
        "--name",
        "--node-host",
        "--grace",
        "--drain",
    ):
        parser.add_argument(option)
    for option in ("--port", "--node-port", "--max-batch-tokens"):
        parser.add_argument(option, type=int)
    options = parser.parse_args()
    faults = Path(options.model) / "faults.json"
    fault = json.loads(faults.read_text()).get(options.name or "router", "") if faults.exists() else ""
    if fault == "die":
        sys.stderr.write("out of memory, for example\n")
        return 3
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    assert Path(options.cluster_key).exists()
    if options.role == "router":
        serve(options, fault, stop)
    else:
        join(options)
        stop.wait()
    return 0


def serve(options: argparse.Namespace, fault: str, stop: threading.Event) -> None:
    handler = type("Bound", (Handler,), {"book": Book(), "fault": fault})
    servers = [ThreadingHTTPServer((options.host, port), handler) for port in (options.port, options.node_port)]
    threads = [threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    http, nodes = (server.server_address[1] for server in servers)
    sys.stdout.write(f"router listening on http://{options.host}:{http}\nnodes dial tcp://{options.host}:{nodes}\n")
    sys.stdout.flush()
    stop.wait()


def join(options: argparse.Namespace) -> None:
    member = {
        "role": options.role, "name": options.name, "ready": True, "provider": "net",
        "pages_total": 128, "pages_free": 128, "pages_quarantined": 0,
    }  # fmt: skip
    address = options.router.replace("tcp://", "http://")
    request = urllib.request.Request(f"{address}/join", data=json.dumps(member).encode(), method="POST")
    urllib.request.urlopen(request, timeout=10).close()


if __name__ == "__main__":
    sys.exit(main())

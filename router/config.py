"""What an operator may set."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """`host`/`port`: where clients connect. `node_host`/`node_port`: where nodes dial. Port 0: any free one.

    served_model: the `model` that clients name. default_max_tokens: new tokens where the client names no limit.
    deadline_s: from receipt to the last token. requests_per_node: at most so many at once on one decode node; the rest
    waits, at most `queue_limit` of them. keep_alive_s: silence after which a stream gets a comment. grace_s: how long
    open streams may go on after SIGTERM.
    """

    model: Path
    served_model: str
    cluster_key: Path
    host: str = "127.0.0.1"
    port: int = 8000
    node_host: str = "127.0.0.1"
    node_port: int = 8001
    default_max_tokens: int = 1024
    deadline_s: float = 300.0
    requests_per_node: int = 64
    queue_limit: int = 256
    keep_alive_s: float = 5.0
    max_body_bytes: int = 4 << 20
    grace_s: float = 30.0
    api_key_file: Path | None = None
    test_gates: str | None = None

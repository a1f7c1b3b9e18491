"""The router's command line."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from router.config import RouterConfig

DESCRIPTION = """
Serve the OpenAI-compatible endpoint of a kvferry cluster: /v1/chat/completions, /v1/completions, /v1/models, and for
operators /v1/cluster, /health, /ready, /metrics. Prefill and decode nodes dial the router; it needs the model's
tokenizer and chat template, not its weights, and runs without torch or a GPU.
"""
EPILOG = """
example:
  kvferry router --model ./SmolLM2-135M-Instruct --cluster-key cluster.key
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "SmolLM2-135M-Instruct", "messages": [{"role": "user", "content": "Hello"}]}'

SIGTERM stops it: nothing new is taken, open answers may end within the grace period, the exit code is 0.
Both addresses are printed on standard output; logs go to standard error, one JSON object a line.
"""


def parse_config(argv: Sequence[str] | None) -> RouterConfig:
    """Exits with argparse's message where the options make no sense."""
    return _config(_parser().parse_args(argv))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "kvferry router", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _add_model_options(parser)
    _add_address_options(parser)
    _add_limit_options(parser)
    parser.add_argument("--test-gates", metavar="SOCKET", help=argparse.SUPPRESS)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="Hugging Face folder of the model that the nodes serve"
    )
    parser.add_argument("--served-model", metavar="NAME", help="the `model` that clients name (default: DIR's name)")
    parser.add_argument(
        "--cluster-key", type=Path, required=True, metavar="FILE", help="the key file that a whole cluster shares"
    )
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="API keys, one a line; without it every client is let in"
    )


def _add_address_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("addresses (port 0: any free one, printed at start)")
    group.add_argument("--host", default="127.0.0.1", help="interface for clients (default: %(default)s)")
    group.add_argument("--port", type=_port, default=8000, help="port for clients (default: %(default)s)")
    group.add_argument("--node-host", default="127.0.0.1", help="interface that nodes dial (default: %(default)s)")
    group.add_argument("--node-port", type=_port, default=8001, help="port that nodes dial (default: %(default)s)")


def _add_limit_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    default = RouterConfig(Path(), "", Path())
    for option, kind, value, text in (
        ("--default-max-tokens", _positive, default.default_max_tokens, "new tokens where the client names no limit"),
        ("--deadline", _seconds, default.deadline_s, "seconds from a request's receipt to its last token"),
        ("--requests-per-node", _positive, default.requests_per_node, "requests at once on one decode node"),
        ("--queue-limit", _count, default.queue_limit, "requests waiting for a node; more are refused with 503"),
        ("--keep-alive", _seconds, default.keep_alive_s, "seconds of silence before a stream gets a comment"),
        ("--max-body-bytes", _positive, default.max_body_bytes, "largest request body"),
        ("--grace", _seconds, default.grace_s, "seconds that open answers may take after SIGTERM"),
    ):
        group.add_argument(option, type=kind, default=value, metavar="N", help=f"{text} (default: %(default)s)")


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError("must be a positive number of seconds")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value < 1 << 16:
        raise argparse.ArgumentTypeError("must be a port, or 0 for any")
    return value


def _config(arguments: argparse.Namespace) -> RouterConfig:
    return RouterConfig(
        model=arguments.model,
        served_model=arguments.served_model or arguments.model.resolve().name,
        cluster_key=arguments.cluster_key,
        host=arguments.host,
        port=arguments.port,
        node_host=arguments.node_host,
        node_port=arguments.node_port,
        default_max_tokens=arguments.default_max_tokens,
        deadline_s=arguments.deadline,
        requests_per_node=arguments.requests_per_node,
        queue_limit=arguments.queue_limit,
        keep_alive_s=arguments.keep_alive,
        max_body_bytes=arguments.max_body_bytes,
        grace_s=arguments.grace,
        api_key_file=arguments.api_key_file,
        test_gates=arguments.test_gates,
    )

"""`python -m router`: serve a cluster's OpenAI-compatible endpoint."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import zmq

from protocol.curve import ClusterKeyError, read_cluster_key
from protocol.logs import setup_logging
from router.api_keys import BadKeyFile, read_api_keys
from router.chat_template import BadTemplate
from router.config import RouterConfig
from router.pieces import UnsupportedTokenizer
from router.server import Router, stop_on_signals
from router.tokenizer import ModelFolder

DESCRIPTION = """
Serve the OpenAI-compatible endpoint of a kvferry cluster: /v1/chat/completions, /v1/completions, /v1/models, and for
operators /v1/cluster, /health, /ready, /metrics. Prefill and decode nodes dial the router; it needs the model's
tokenizer and chat template, not its weights, and runs without torch or a GPU.
"""
EPILOG = """
example:
  python -m router --model ./SmolLM2-135M-Instruct --cluster-key cluster.key
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"model": "SmolLM2-135M-Instruct", "messages": [{"role": "user", "content": "Hello"}]}'

SIGTERM stops it: nothing new is taken, open answers may end within the grace period, the exit code is 0.
Both addresses are printed on standard output; logs go to standard error, one JSON object a line.
"""


def main(argv: Sequence[str] | None = None) -> int:
    config = _config(_parser().parse_args(argv))
    setup_logging("router")
    try:
        router = _build(config)
        asyncio.run(_serve(router))
    except (ClusterKeyError, BadKeyFile, BadTemplate, UnsupportedTokenizer) as error:
        return _refuse(str(error))
    except (OSError, zmq.ZMQError) as error:
        return _refuse(f"cannot open its addresses or files: {error}")
    return 0


def _build(config: RouterConfig) -> Router:
    api_keys = read_api_keys(config.api_key_file) if config.api_key_file else []
    return Router(config, ModelFolder(config.model), read_cluster_key(config.cluster_key), api_keys)


async def _serve(router: Router) -> None:
    stop_on_signals(router)
    await router.serve(_announce)


def _announce(clients: str, nodes: str) -> None:
    sys.stdout.write(f"router listening on {clients}\nnodes dial {nodes}\n")
    sys.stdout.flush()


def _refuse(reason: str) -> int:
    sys.stderr.write(f"router: {reason}\n")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "router", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
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
    group.add_argument("--port", type=int, default=8000, help="port for clients (default: %(default)s)")
    group.add_argument("--node-host", default="127.0.0.1", help="interface that nodes dial (default: %(default)s)")
    group.add_argument("--node-port", type=int, default=8001, help="port that nodes dial (default: %(default)s)")


def _add_limit_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    default = RouterConfig(Path(), "", Path())
    for option, kind, value, text in (
        ("--default-max-tokens", int, default.default_max_tokens, "new tokens where the client names no limit"),
        ("--deadline", float, default.deadline_s, "seconds from a request's receipt to its last token"),
        ("--requests-per-node", int, default.requests_per_node, "requests at once on one decode node"),
        ("--queue-limit", int, default.queue_limit, "requests waiting for a node; more are refused with 503"),
        ("--keep-alive", float, default.keep_alive_s, "seconds of silence before a stream gets a comment"),
        ("--max-body-bytes", int, default.max_body_bytes, "largest request body"),
        ("--grace", float, default.grace_s, "seconds that open answers may take after SIGTERM"),
    ):
        group.add_argument(option, type=kind, default=value, metavar="N", help=f"{text} (default: %(default)s)")


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


if __name__ == "__main__":
    sys.exit(main())

"""`python -m router`: serve a cluster's OpenAI-compatible endpoint."""

import asyncio
import sys
from collections.abc import Sequence

import zmq

from protocol.curve import ClusterKeyError, read_cluster_key
from protocol.logs import setup_logging
from router.api_keys import BadKeyFile, read_api_keys
from router.config import RouterConfig
from router.model_errors import BadModelFolder
from router.model_folder import ModelFolder
from router.options import parse_config
from router.server import Router, stop_on_signals


def main(argv: Sequence[str] | None = None) -> int:
    config = parse_config(argv)
    setup_logging("router")
    try:
        router = _build(config)
        asyncio.run(_serve(router))
    except (ClusterKeyError, BadKeyFile, BadModelFolder) as error:
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


if __name__ == "__main__":
    sys.exit(main())

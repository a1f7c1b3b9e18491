"""`python -m prefill_node` (or `kvferry prefill`)."""

import sys
from collections.abc import Sequence

import zmq

from engine.build import build_engines, check_movable, device_addresses
from engine.errors import EngineError
from fabric.errors import FabricError
from kv_messenger.data_plane import open_data_plane
from kv_messenger.memory import register
from prefill_node.config import PrefillConfig, parse_config
from prefill_node.node import PrefillNode
from protocol.curve import ClusterKeyError, read_cluster_key
from protocol.digest import served_model
from protocol.gates import Gates
from protocol.lifecycle import run_node
from protocol.logs import setup_logging


def main(argv: Sequence[str] | None = None) -> int:
    config = parse_config(sys.argv[1:] if argv is None else argv)
    setup_logging(config.membership.name)
    refusals = (EngineError, FabricError, ClusterKeyError, MemoryError, OSError, zmq.ZMQError)
    return run_node("kvferry prefill", lambda: build_node(config), refusals, config.membership.drain_s)


def build_node(config: PrefillConfig) -> PrefillNode:
    """Key, fabric endpoint, model and cache, registered memory; nothing runs yet."""
    member, options = config.membership, config.engine
    key = read_cluster_key(member.cluster_key)
    check_movable(options)
    fabric, cores = open_data_plane(member, device_addresses(options))
    engines = build_engines(options, head=False, count=config.dp)
    memory = [register(fabric, engine.pools, engine.context_memory) for engine in engines]
    return PrefillNode(
        member,
        key,
        served_model(options.model),
        engines,
        fabric,
        memory,
        Gates(member.test_gates),
        port=config.port,
        max_queue=member.max_queue,
        cores=cores,
        readable=options.device == "cpu",
    )


if __name__ == "__main__":
    sys.exit(main())

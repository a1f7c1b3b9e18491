"""`python -m prefill_node` (or `kvferry prefill`)."""

import sys
from collections.abc import Sequence

from engine.build import build_engine
from engine.errors import EngineError
from fabric.errors import FabricError
from fabric.libfabric import open_engine
from prefill_node.config import PrefillConfig, parse_config
from prefill_node.node import PrefillNode
from protocol.curve import ClusterKeyError, read_cluster_key
from protocol.digest import served_model
from protocol.gates import Gates
from protocol.lifecycle import StopSignal
from protocol.logs import setup_logging


def main(argv: Sequence[str] | None = None) -> int:
    """0 after a clean stop, 1 if it could not start (one line on stderr says why), 3 if work was cut off at the
    end of the grace period, 4 if one of its threads died."""
    config = parse_config(sys.argv[1:] if argv is None else argv)
    setup_logging(config.membership.name)
    stop = StopSignal()
    try:
        node = build_node(config)
        node.start()
    except (EngineError, FabricError, ClusterKeyError, OSError) as error:
        sys.stderr.write(f"kvferry prefill: {error}\n")
        return 1
    broken = stop.wait_unless(node.unhealthy)
    if broken is not None:
        sys.stderr.write(f"kvferry prefill: {broken}; restart this node\n")
        return 4
    drained = node.drain(config.drain_s)
    node.close()
    return 0 if drained else 3


def build_node(config: PrefillConfig) -> PrefillNode:
    """Key, fabric endpoint, model and cache, registered memory; nothing runs yet."""
    member, options = config.membership, config.engine
    key = read_cluster_key(member.cluster_key)
    fabric = open_engine(member.provider, member.host)
    engine = build_engine(options, head=False)
    region = fabric.register(engine.pool.address, engine.pool.bytes)
    return PrefillNode(
        member,
        key,
        served_model(options.model),
        engine,
        fabric,
        region,
        Gates(member.test_gates),
        port=config.port,
        max_queue=config.max_queue,
        debug_pages=options.batching.debug_pages,
    )


if __name__ == "__main__":
    sys.exit(main())

"""The command-line options of a local cluster, shared by `up` and `demo`."""

import argparse
from pathlib import Path

from deploy.cluster_spec import START_TIMEOUT_S, ClusterSpec, Division

MODEL = Path(".kvferry/models/SmolLM2-135M-Instruct")
"""Where `make setup` puts the demo model."""


def add_cluster_options(parser: argparse.ArgumentParser, port: int) -> None:
    parser.add_argument(
        "--model",
        type=Path,
        default=MODEL,
        metavar="DIR",
        help="a local Hugging Face model folder (default: %(default)s)",
    )
    parser.add_argument("--prefill", type=int, default=1, metavar="N", help="prefill nodes (default: %(default)s)")
    parser.add_argument("--decode", type=int, default=3, metavar="N", help="decode nodes (default: %(default)s)")
    parser.add_argument(
        "--port",
        type=int,
        default=port,
        help="the router's port; 0 takes any free one and prints it (default: %(default)s)",
    )
    parser.add_argument(
        "--provider", help="libfabric provider: net, tcp;ofi_rxm, efa, ... (default: the best there is; see doctor)"
    )
    parser.add_argument(
        "--start-timeout",
        type=float,
        default=START_TIMEOUT_S,
        metavar="SECONDS",
        help="how long the router, and then all nodes together, may take to be ready (default: %(default)g)",
    )
    parser.add_argument(
        "--no-same-host", action="store_true", help="move KV over the provider, not through this host's shared memory"
    )


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Passed on to the nodes, which check them."""
    parser.add_argument("--page-size", type=int, metavar="TOKENS", help="tokens per KV page (default: the node's)")
    parser.add_argument("--num-blocks", type=int, metavar="N", help="KV blocks per engine (default: the node's)")
    parser.add_argument(
        "--context", metavar="PARTS", help="what all nodes keep of each prompt's end: hidden, logits or hidden,logits"
    )
    parser.add_argument(
        "--debug-pages", action="store_true", help="nodes poison freed pages and compare checksums on arrival (slow)"
    )
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}-tp",
            type=int,
            default=1,
            metavar="N",
            help=f"devices that share each {role} engine's model (default: 1)",
        )
        parser.add_argument(
            f"--{role}-dp", type=int, default=1, metavar="N", help=f"engines in each {role} node (default: 1)"
        )
    parser.add_argument(
        "--local-prefill",
        action="store_true",
        help="decode nodes compute prompts themselves: no KV crosses the network",
    )


def cluster_spec_from(arguments: argparse.Namespace) -> ClusterSpec:
    """Of `up`'s arguments. Raises SpecError."""
    spec = ClusterSpec(
        model=arguments.model,
        prefill=0 if arguments.local_prefill else arguments.prefill,
        decode=arguments.decode,
        port=arguments.port,
        provider=arguments.provider,
        same_host=not arguments.no_same_host,
        local_prefill=arguments.local_prefill,
        prefill_division=Division(arguments.prefill_tp, arguments.prefill_dp),
        decode_division=Division(arguments.decode_tp, arguments.decode_dp),
        context=arguments.context,
        debug_pages=arguments.debug_pages,
        start_timeout_s=arguments.start_timeout,
        page_size=arguments.page_size,
        num_blocks=arguments.num_blocks,
    )
    spec.check()
    return spec

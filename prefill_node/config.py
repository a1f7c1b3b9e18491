"""The prefill node's settings, from its command line."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.options import EngineOptions, add_engine_options, engine_options_from
from protocol.membership_options import Membership, add_membership_options, membership_from, port_number

DESCRIPTION = """\
Run a prefill node: it computes prompts for decode nodes and writes the KV cache into their memory, layer by layer,
over libfabric. It registers with the router, which tells decode nodes about it."""


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """`dp`: engines, each for prompts of its own. `port`: where decode nodes dial, 0 takes any."""

    membership: Membership
    engine: EngineOptions
    dp: int
    port: int


def parse_config(argv: Sequence[str]) -> PrefillConfig:
    """Exits with a message on bad options, as argparse does."""
    parser = argparse.ArgumentParser(prog="kvferry prefill", description=DESCRIPTION)
    add_membership_options(parser, default_name="prefill")
    add_engine_options(parser)
    group = parser.add_argument_group("prefilling")
    group.add_argument("--port", type=port_number, default=0, help="port that decode nodes dial (default: any)")
    arguments = parser.parse_args(argv)
    engine_options = engine_options_from(parser, arguments, scheduler="prefill_first")
    if engine_options.batching.use_async_batching:
        parser.error("--async-batching is not for prefill nodes: their layers are followed one by one")
    batching = replace(engine_options.batching, use_async_batching=False)  # None would mean yes on CUDA
    return PrefillConfig(
        membership=membership_from(arguments),
        engine=replace(engine_options, batching=batching),
        dp=arguments.dp,
        port=arguments.port,
    )

"""The decode node's settings, from its command line."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from engine.options import EngineOptions, add_engine_options, engine_options_from
from protocol.membership_options import Membership, add_membership_options, membership_from

DESCRIPTION = """\
Run a decode node: it receives requests from the router, has their prompts prefilled by a prefill node, and generates
the tokens. With --local-prefill it computes prompts itself and needs no prefill node."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """`dp`: engines, each for requests of its own. `local_prefill`: compute prompts here, ask no prefill node."""

    membership: Membership
    engine: EngineOptions
    dp: int
    local_prefill: bool


def parse_config(argv: Sequence[str]) -> DecodeConfig:
    """Exits with a message on bad options, as argparse does."""
    parser = argparse.ArgumentParser(prog="kvferry decode", description=DESCRIPTION)
    add_membership_options(parser, default_name="decode")
    add_engine_options(parser)
    group = parser.add_argument_group("decoding")
    group.add_argument("--local-prefill", action="store_true", help="compute prompts on this node, ask no prefill node")
    arguments = parser.parse_args(argv)
    return DecodeConfig(
        membership=membership_from(arguments),
        engine=engine_options_from(parser, arguments),
        dp=arguments.dp,
        local_prefill=arguments.local_prefill,
    )

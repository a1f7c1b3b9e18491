"""A node's data plane: the fabric that its options ask for, on the NICs and cores near its devices."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

from fabric.api import TransferEngine
from fabric.libfabric import open_engine
from fabric.placement import Wishes, find_placement
from protocol.logs import event
from protocol.membership_options import Membership

log = logging.getLogger(__name__)


class DataPlane(NamedTuple):
    """`cores`: for the messenger's thread; None: wherever the kernel puts it."""

    fabric: TransferEngine
    cores: frozenset[int] | None


def open_data_plane(member: Membership, devices: Sequence[str]) -> DataPlane:
    """`devices`: PCI addresses of the GPUs whose memory is moved; none: the host's is. Raises FabricUnavailable."""
    placement = find_placement(Wishes(member.host, member.nics, member.cores), devices)
    fabric = open_engine(
        member.provider,
        member.host,
        device_memory=bool(devices),
        same_host=member.same_host,
        rails=placement.rails,
        nics=placement.nics,
    )
    event(
        log,
        "data plane opened",
        provider=fabric.provider,
        nics=fabric.nics,
        same_host=member.same_host,
        messenger_cores="any" if placement.cores is None else sorted(placement.cores),
    )
    return DataPlane(fabric, placement.cores)

"""Registered memory as the fabric knows it, and as a ticket carries it."""

from fabric.api import RailKey, RemoteRegion
from protocol.ticket import RankRegion


def as_ticketed(region: RemoteRegion) -> RankRegion:
    return RankRegion(keys=[(rail, key) for rail, key in region.keys], base=region.base, length=region.length)


def as_remote(region: RankRegion) -> RemoteRegion:
    return RemoteRegion(tuple(RailKey(rail, key) for rail, key in region.keys), region.base, region.length)

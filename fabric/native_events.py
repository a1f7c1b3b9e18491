"""Turns the core's flat event records into the events of `fabric.api`."""

from collections.abc import Mapping
from typing import Any

from fabric.api import Arrived, EndpointFailed, Event, OverCounted, RailInDoubt, WritesEnded, WritesFailed
from fabric.limits import MAX_RAILS
from fabric.native import core, operation_error


def decode(raw: Any, peer: str) -> Event:
    """`peer`: the label of the endpoint that the event is about."""
    lib = core().lib
    if raw.kind == lib.KF_ARRIVED:
        return Arrived(raw.id, raw.count, raw.first_ns, raw.last_ns)
    if raw.kind == lib.KF_WRITES_ENDED:
        return _writes_ended(raw, peer)
    error = operation_error(raw.error, peer)
    if raw.kind == lib.KF_OVER_COUNTED:
        return OverCounted(raw.id, raw.count)
    assert error is not None, raw.kind
    if raw.kind == lib.KF_WRITES_FAILED:
        return WritesFailed(raw.id, raw.count, error)
    assert raw.kind == lib.KF_ENDPOINT_FAILED, raw.kind
    return EndpointFailed(raw.id, peer, error, raw.count if raw.count >= 0 else None)


def decode_doubt(raw: Any, peer: str, completed: Mapping[int, int]) -> RailInDoubt:
    error = operation_error(raw.error, peer)
    assert error is not None
    remotes = tuple(rail for rail in range(MAX_RAILS) if raw.completed >> rail & 1)
    return RailInDoubt(raw.id, peer, error, raw.count, remotes, completed)


def _writes_ended(raw: Any, peer: str) -> WritesEnded:
    return WritesEnded(
        handle=raw.id,
        posted=raw.count,
        completed=raw.completed,
        bytes=raw.bytes,
        cancelled=bool(raw.cancelled),
        error=operation_error(raw.error, peer),
        first_posted_ns=raw.first_ns,
        last_posted_ns=raw.last_ns,
        completed_ns=raw.completed_ns,
    )

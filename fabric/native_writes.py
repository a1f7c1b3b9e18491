"""Turns a batch of `fabric.api` into the core's flat record of it."""

from array import array
from typing import Any, NamedTuple

from fabric.api import PageWrites
from fabric.native import core
from fabric.rails import lanes


class FlatWrites(NamedTuple):
    """`arrays`: what the record points to; the core copies it before its call returns."""

    record: Any
    arrays: tuple[Any, ...]


def encode(batch: PageWrites, source: Any, local: bool, chance: int) -> FlatWrites:
    """`source`: the core's region of the batch's source. `local`: the same-host path, which has one lane, and knows
    memory by its first key. `chance`: see `lanes`."""
    ffi = core().ffi
    sources = ffi.from_buffer("uint64_t[]", array("Q", batch.source_indices))
    targets = ffi.from_buffer("uint64_t[]", array("Q", batch.target_indices))
    rails = [0] if local else [rail for rail, _ in batch.source.remote.keys]
    found = lanes(rails, batch.target.keys[:1] if local else batch.target.keys, chance)
    ways = ffi.new("kf_lane[]", [(rail, remote.rail, remote.key) for rail, remote in found])
    record = ffi.new("kf_writes *")
    record.source = batch.source.address + batch.source_offset
    record.source_stride, record.source_indices, record.source_region = batch.source_stride, sources, source
    record.target = batch.target.base + batch.target_offset
    record.target_stride, record.target_indices = batch.target_stride, targets
    record.lanes, record.lane_count = ways, len(ways)
    record.count, record.length, record.immediate = len(batch.source_indices), batch.length, batch.immediate
    return FlatWrites(record, (sources, targets, ways))

"""The memory that others may map is what its owner writes, at the offset that it says, and cannot be cut off."""

import mmap
import os

import pytest
import torch

from engine.cache_pool import CachePool, PoolMemory
from engine.geometry import full_geometry
from engine.shared_file import shared_bytes
from tests.engine.fake_workers import open_files
from tests.engine.traces import T0


def as_others_see(memory: PoolMemory) -> bytes:
    assert memory.file is not None
    size = memory.file_offset + memory.bytes
    with mmap.mmap(memory.file, size, prot=mmap.PROT_READ) as seen:
        return seen[memory.file_offset : size]


def test_a_pool_can_be_mapped_by_whoever_has_its_file() -> None:
    pool = CachePool(full_geometry(T0), 5)
    pool.pages(0)[3] = 2.0
    (memory,) = pool.memories
    assert as_others_see(memory) == bytes(pool.raw_blocks(0).flatten().tolist())


def test_it_neither_grows_nor_shrinks() -> None:
    _, file = shared_bytes("test", 8192)
    for size in (4096, 12288):
        with pytest.raises(PermissionError):
            os.ftruncate(file.fd, size)


def test_memory_outlives_its_file_and_nothing_outlives_both() -> None:
    before = open_files()
    memory, file = shared_bytes("test", 8192)
    del file
    memory[:] = 7
    assert int(memory.sum(dtype=torch.int64)) == 7 * 8192
    del memory
    assert open_files() == before

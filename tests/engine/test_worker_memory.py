"""Memory that ranks share: where each part lies, and when it goes."""

import gc
import mmap
from collections.abc import Iterator

import pytest
import torch

from engine.cache_manager import BlockMove
from engine.cache_pool import CachePool, pool_bytes
from engine.errors import PoisonBroken
from engine.geometry import full_geometry
from engine.offload import copy_blocks
from engine.progress import ProgressWord
from engine.workers.memory import SharedMemory
from protocol.layout import full_layout
from tests.engine.fake_workers import open_files

GEOMETRY = full_geometry(full_layout(layers=3, kv_heads=2, page_size=4, head_dim=8, dtype="float32"))
CHUNKS = 5
SIZE = pool_bytes(GEOMETRY, CHUNKS)


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory.create(3, SIZE)
    yield made
    made.close()


def pool_of(memory: SharedMemory, debug: bool = False) -> CachePool:
    """All ranks', as the main process sees them."""
    return CachePool(GEOMETRY, CHUNKS, debug, ranks=memory.ranks, memory=memory.pools(), file=memory.pools_file())


def rank_pool(memory: SharedMemory, rank: int) -> CachePool:
    return CachePool(GEOMETRY, CHUNKS, memory=memory.pool(rank))


def test_each_rank_sees_its_own_part_of_what_the_main_process_sees(memory: SharedMemory) -> None:
    everyone = pool_of(memory)
    for rank in range(3):
        rank_pool(memory, rank).pages(0)[4] = rank + 1.0
    blocks = everyone.raw_blocks(0)[:, 4].view(torch.float32)
    assert [set(part.tolist()) for part in blocks] == [{1.0}, {2.0}, {3.0}]
    assert int(everyone.raw_blocks(0).count_nonzero()) == int(everyone.raw_blocks(0)[:, 4].count_nonzero())


def test_parts_begin_at_pages_of_the_machine(memory: SharedMemory) -> None:
    assert SIZE % mmap.PAGESIZE, "or there is nothing to align"
    addresses = [one.address for one in pool_of(memory).memories]
    assert [one.bytes for one in pool_of(memory).memories] == [SIZE] * 3
    assert all(address % mmap.PAGESIZE == 0 for address in addresses)
    assert addresses[1] - addresses[0] == addresses[2] - addresses[1] >= SIZE


def test_each_ranks_pages_are_where_the_file_is_said_to_have_them(memory: SharedMemory) -> None:
    everyone = pool_of(memory)
    for rank, one in enumerate(everyone.memories):
        rank_pool(memory, rank).pages(0)[:] = rank + 1.0
        assert one.file is not None
        with mmap.mmap(one.file, one.file_offset + one.bytes, prot=mmap.PROT_READ) as seen:
            assert set(memoryview(seen[one.file_offset :]).cast("f")) == {rank + 1.0}


def test_blocks_are_copied_and_poisoned_on_every_rank(memory: SharedMemory) -> None:
    everyone = pool_of(memory, debug=True)
    for rank in range(3):
        rank_pool(memory, rank).pages(0)[4] = rank + 1.0
    copy_blocks(everyone, everyone, BlockMove(0, [4], [6]))
    for rank in range(3):
        assert (rank_pool(memory, rank).pages(0)[6] == rank + 1.0).all()
    everyone.poison(0, [4])
    for rank in range(3):
        assert rank_pool(memory, rank).pages(0)[4].isnan().all()
        assert not rank_pool(memory, rank).pages(0)[6].isnan().any()


def test_writing_to_a_free_block_of_any_rank_is_found_out(memory: SharedMemory) -> None:
    everyone = pool_of(memory, debug=True)
    everyone.check_poison(0, [6])
    rank_pool(memory, 2).pages(0)[6, 1, 0, 0, 0, 0] = 1.0
    with pytest.raises(PoisonBroken, match=r"block 6 .* first in page 1 of it on rank 2"):
        everyone.check_poison(0, [6])


def test_the_word_is_seen_by_both_sides(memory: SharedMemory) -> None:
    writer, reader = ProgressWord(memory.word()), ProgressWord(memory.word())
    writer.advance()
    assert reader.value == 1
    assert not pool_of(memory).raw_blocks(0).any()


def test_the_memory_goes_with_what_is_mapped() -> None:
    before = open_files()
    memory = SharedMemory.create(2, SIZE)
    pool, word = pool_of(memory), ProgressWord(memory.word())
    memory.close()
    pages = pool.pages(0)
    del pool
    pages[3] = 1.0
    assert open_files() - before
    del pages, word
    gc.collect()
    assert open_files() == before

"""Who holds which block: P17, P18, and a random life that never loses one."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.allocators import BlockState, FullAttentionCacheAllocator
from engine.cache_pool import CachePool
from engine.geometry import full_geometry
from engine.request import Owner
from tests.engine.traces import T0, Harness

A, B = Owner("A", 1), Owner("B", 1)


def allocator_of(blocks: int, now: float = 0.0) -> FullAttentionCacheAllocator:
    return FullAttentionCacheAllocator(CachePool(full_geometry(T0), blocks), clock=lambda: now)


def test_p17_prompts_hold_whole_pages() -> None:
    h = Harness(tokens=64)
    for length in (3, 4, 5, 8):
        h.add(f"p{length}", length, 2)
    h.step()
    assert {length: h.blocks(f"p{length}") for length in (3, 4, 5, 8)} == {3: 1, 4: 1, 5: 2, 8: 2}


def test_p17_a_block_is_taken_when_its_first_token_is_written() -> None:
    h = Harness()
    h.add("A", 4, 6)
    held = []
    for _ in range(6):
        h.step()
        held.append(h.blocks("A"))
    assert held == [1, 2, 2, 2, 2, 0]


def test_p18_all_or_nothing() -> None:
    allocator = allocator_of(2)
    assert not allocator.can_grow(A, 9)
    assert allocator.free == 2
    assert allocator.can_grow(A, 0)
    assert allocator.can_grow(A, 8)
    allocator.grow(A, 8)
    assert (allocator.free, len(allocator.blocks(A))) == (0, 2)
    assert allocator.can_grow(A, 8)
    assert not allocator.can_grow(B, 1)


def test_a_table_grows_in_token_order_and_keeps_what_it_has() -> None:
    allocator = allocator_of(4)
    allocator.grow(A, 3)
    first = list(allocator.blocks(A))
    allocator.grow(B, 1)
    allocator.grow(A, 9)
    assert list(allocator.blocks(A))[:1] == first
    assert len(set(allocator.blocks(A)) | set(allocator.blocks(B))) == 4


def test_the_ledger_says_state_owner_generation_and_age() -> None:
    now = [10.0]
    allocator = FullAttentionCacheAllocator(CachePool(full_geometry(T0), 3), clock=lambda: now[0])
    allocator.grow(A, 4)
    allocator.grow(Owner("B", 7), 4)
    now[0] = 12.0
    allocator.quarantine(Owner("B", 7))
    now[0] = 15.0
    rows = {(r.state, r.owner, r.generation, r.age_s) for r in allocator.ledger()}
    assert rows == {
        (BlockState.HELD, "A", 1, 5.0),
        (BlockState.QUARANTINED, "B", 7, 3.0),
        (BlockState.FREE, "", 0, 0.0),
    }


class LifeOfBlocks(RuleBasedStateMachine):
    """Against the simplest model: a table of tokens and states by owner."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = allocator_of(12)
        self.tokens: dict[Owner, int] = {}
        self.quarantined: set[Owner] = set()

    owners = st.builds(Owner, st.sampled_from("ABC"), st.integers(1, 2))

    @rule(owner=owners, tokens=st.integers(0, 30))
    def grow(self, owner: Owner, tokens: int) -> None:
        if owner in self.quarantined or not self.allocator.can_grow(owner, tokens):
            return
        self.allocator.grow(owner, tokens)
        self.tokens[owner] = max(tokens, self.tokens.get(owner, 0))

    @rule(owner=owners)
    def quarantine(self, owner: Owner) -> None:
        self.allocator.quarantine(owner)
        if self.tokens.get(owner):
            self.quarantined.add(owner)

    @rule(owner=owners)
    def release(self, owner: Owner) -> None:
        self.allocator.release(owner)
        self.tokens.pop(owner, None)
        self.quarantined.discard(owner)

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        self.allocator.check()
        wanted = {owner: -(-tokens // 4) for owner, tokens in self.tokens.items()}
        assert {owner: len(self.allocator.blocks(owner)) for owner in wanted} == wanted
        assert self.allocator.free == 12 - sum(wanted.values())
        assert self.allocator.quarantined == sum(wanted[owner] for owner in self.quarantined)


TestLifeOfBlocks = LifeOfBlocks.TestCase
TestLifeOfBlocks.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)

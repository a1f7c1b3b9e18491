"""Who holds which block, over a random life that never loses one."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.cache_manager import CacheManager
from engine.cache_pool import CachePool
from engine.geometry import full_geometry
from engine.ledger import BlockState, check, ledger
from engine.request import Owner
from tests.engine.traces import T0, T1

A, B = Owner("A", 1), Owner("B", 1)


def cache_of(blocks: int) -> CacheManager:
    return CacheManager(CachePool(full_geometry(T0), blocks))


def test_a_table_grows_in_token_order_and_keeps_what_it_has() -> None:
    cache = cache_of(4)
    cache.hold(A, 3)
    first = list(cache.tables(A)[0])
    cache.hold(B, 1)
    cache.hold(A, 9)
    assert cache.tables(A)[0][:1] == first
    assert len({*cache.tables(A)[0], *cache.tables(B)[0]}) == 4


def test_the_ledger_says_state_owner_generation_and_age() -> None:
    now = [10.0]
    cache = CacheManager(CachePool(full_geometry(T0), 3), clock=lambda: now[0])
    cache.hold(A, 4)
    cache.hold(Owner("B", 7), 4)
    now[0] = 12.0
    cache.quarantine(Owner("B", 7))
    now[0] = 15.0
    rows = {(r.state, r.owner, r.generation, r.age_s) for r in ledger(cache)}
    assert rows == {
        (BlockState.HELD, "A", 1, 5.0),
        (BlockState.QUARANTINED, "B", 7, 3.0),
        (BlockState.FREE, "", 0, 0.0),
    }


def test_an_id_may_come_back_while_a_forward_still_writes_to_its_old_blocks() -> None:
    cache = cache_of(4)
    cache.hold(A, 8)
    holding = cache.leave(A)
    assert holding is not None
    cache.hold(A, 8)
    check(cache)
    assert cache.free == 0
    assert not cache.can_hold(B, 1)
    cache.give_back(holding)
    check(cache)
    assert cache.free == 2


class LifeOfBlocks(RuleBasedStateMachine):
    """Against the simplest model: a table of tokens and states by owner. T1 has two groups, so chunks change hands."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = CacheManager(CachePool(T1, 12, debug_pages=True))
        self.tokens: dict[Owner, int] = {}
        self.left: list[Owner] = []

    owners = st.builds(Owner, st.sampled_from("ABC"), st.integers(1, 2))

    @rule(owner=owners, tokens=st.integers(0, 30))
    def hold(self, owner: Owner, tokens: int) -> None:
        self.cache.recycle()
        if self.cache.can_hold(owner, tokens):
            self.cache.hold(owner, tokens)
            self.tokens[owner] = max(tokens, self.tokens.get(owner, 0))

    @rule(owner=owners)
    def release(self, owner: Owner) -> None:
        self.cache.release(owner)
        self.tokens.pop(owner, None)

    @rule(tokens=st.integers(1, 60))
    def nothing_else_there(self, tokens: int) -> None:
        for owner in list(self.tokens):
            self.release(owner)
        self.cache.recycle()
        geometry = self.cache.pool.geometry
        assert self.cache.can_hold(A, tokens) == geometry.fits(tokens, 12) == (tokens <= geometry.max_tokens(12))

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        check(self.cache)
        for owner, tokens in self.tokens.items():
            wanted = [-(-tokens // 4), -(-min(tokens, 8) // 4)]
            assert [len(table) for table in self.cache.tables(owner)] == wanted
        used = sum(-(-t // 4) for t in self.tokens.values()) + 3 * sum(-(-min(t, 8) // 4) for t in self.tokens.values())
        assert self.cache.free_fraction == (36 - used) / 36


TestLifeOfBlocks = LifeOfBlocks.TestCase
TestLifeOfBlocks.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)

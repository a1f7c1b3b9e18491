"""Random work on a small pool: budgets hold, every request ends once, every page comes back."""

import random

import pytest

from engine.errors import CapacityExceeded
from engine.forward_batch import ForwardBatch
from tests.engine.traces import Harness

STEPS = 120


class RandomWork:
    """One seeded life of an engine, with every verb it has."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.h = Harness(
            num_blocks=self.random.choice([6, 10, 20]),
            tokens=self.random.choice([3, 8, 32]),
            margin=self.random.choice([0.0, 0.15, 1.0]),
            max_overtakes=self.random.choice([1, 64]),
            emit=lambda _, position: position % 50,
            eos=[49],
        )
        self.h.runner.on_run = self.look
        self.prefills: set[str] = set()
        self.remote: set[str] = set()
        self.quarantined: set[str] = set()
        self.expected: set[str] = set()
        self.next = 0

    def look(self, batch: ForwardBatch) -> None:
        assert 0 < batch.num_tokens <= self.h.config.batch_tokens
        assert len(batch.rows) <= self.h.config.request_cap
        tables = [block for row in batch.rows for block in row.tables[0]]
        assert len(tables) == len(set(tables)), "a block in two tables"
        for row in batch.rows:
            assert len(row.tables[0]) * 4 >= row.end
            assert row.request_id not in self.remote
        if self.random.random() < 0.02:
            raise RuntimeError("a forward that fails now and then")

    def act(self) -> None:
        self.next += 1
        name, verb = f"r{self.next}", self.random.randrange(6)
        length = self.random.randrange(1, 30)
        if verb < 2:
            self.offer(name, length)
        elif verb == 2 and self.h.can_reserve(length):
            self.h.engine.reserve(self.h.make(name, length, self.random.randrange(0, 12)))
            self.remote.add(name)
            self.expected.add(name)
        elif verb == 3 and self.remote:
            self.settle(self.random.choice(sorted(self.remote)))
        elif verb == 4 and self.expected - self.h.gathered.ended.keys():
            self.abort(self.random.choice(sorted(self.expected - self.h.gathered.ended.keys())))
        elif verb == 5 and self.prefills:
            self.h.engine.release(self.prefills.pop())

    def offer(self, name: str, length: int) -> None:
        try:
            if self.random.random() < 0.3:
                self.h.add_prefill(name, length)
                self.prefills.add(name)
            else:
                self.h.add(name, length, self.random.randrange(0, 12))
                self.expected.add(name)
        except CapacityExceeded:
            assert length > self.h.engine.max_context

    def settle(self, name: str) -> None:
        self.remote.discard(name)
        if self.random.random() < 0.7:
            self.h.engine.resume(name, computed=len(self.h.requests[name].prompt) - 1)
        else:
            self.h.engine.quarantine(name)
            self.quarantined.add(name)
            self.expected.discard(name)

    def abort(self, name: str) -> None:
        if name in self.remote:
            self.remote.discard(name)
            self.quarantined.add(name)
        self.h.engine.abort(name)

    def wind_down(self) -> None:
        for name in sorted(self.remote):
            self.settle(name)
        for name in self.quarantined:
            self.h.engine.free_quarantined(name, 1)
        self.h.run()
        while self.prefills:
            self.h.engine.release(self.prefills.pop())
            self.h.run()


@pytest.mark.parametrize("seed", range(12))
def test_every_request_ends_once_and_every_page_comes_back(seed: int) -> None:
    work = RandomWork(seed)
    for _ in range(STEPS):
        work.act()
        work.h.step()
    work.wind_down()
    ended = {name for name in work.h.gathered.ended if name in work.expected}
    assert ended == work.expected
    for name in ended:
        limit = work.h.requests[name].sampling.max_new_tokens
        assert work.h.generated(name) <= limit
    work.h.assert_at_rest()

"""Both state machines joined by a model of the network, driven by seeds: no page is declared safe while a write that
could still land exists, every attempt gets one outcome, and everything is released."""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from fabric.api import WritesEnded
from fabric.errors import OperationError
from kv_messenger import receiver_transfer as rx
from kv_messenger import sender_transfer as tx
from kv_messenger.plan import expected
from protocol.context import NO_CONTEXT, ContextLayout
from protocol.messages import Failure, FailureCode
from tests.kv_messenger.builders import BOTH, KEY, layout, plan

LAYERS, PAGE, CHUNK = 2, 4, 8
BROKEN = OperationError("fi_writedata", 5, "broken", "", "peer")
GONE = Failure(FailureCode.NODE_LOST, "gone")


@dataclass
class Batch:
    handle: int
    unposted: int
    in_flight: int = 0
    landed: int = 0
    failed: int = 0
    posted: int = 0
    error: OperationError | None = None


@dataclass
class World:
    """One transfer. Control messages are ordered per direction; writes land in any order."""

    rng: random.Random
    tokens: int
    context: ContextLayout = NO_CONTEXT
    now: float = 0.0
    word: int = 0
    batches: dict[int, Batch] = field(default_factory=dict)
    to_receiver: deque[Any] = field(default_factory=deque)
    to_sender: deque[str] = field(default_factory=deque)
    counted: int = 0
    asked: int = 0
    reported: bool = False
    fenced: bool = False
    sender_dead: bool = False
    outcomes: list[rx.Outcome] = field(default_factory=list)
    closed: int = 0
    released: int = 0
    handles: int = 0
    computed: int = 0
    mid_forward: bool = False

    def __post_init__(self) -> None:
        self.of = replace(layout(LAYERS, PAGE), context=self.context)
        pages = self.of.pages_for(0, self.tokens)
        self.asked = expected(self.of, self.of, self.tokens, 0).writes
        self.sender = tx.SenderTransfer(KEY, plan(self.of, self.tokens, range(pages)), 0, 1e9)
        self.receiver = rx.ReceiverTransfer(KEY, deadline=50.0, expected=self.asked)
        self.blocks = list(range(pages))

    # -- executing actions --

    def do_sender(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case tx.Arm():
                    self.handles += 1
                    self.batches[self.handles] = Batch(self.handles, len(action.writes.source_indices))
                    self.sender.on_armed(self.handles)
                case tx.StopPosting():
                    open_ = [self.batches[h] for h in action.handles]
                    for batch in open_:
                        batch.unposted = 0
                    self.do_sender(self.sender.on_cancelled(sum(b.posted for b in open_), sum(b.landed for b in open_)))
                case tx.ReportStopped():
                    self.to_receiver.append(("stopped", action))
                case tx.ReportFinished():
                    self.to_receiver.append(("finished", action))
                case tx.ReleaseSource():
                    assert not any(b.in_flight or b.unposted for b in self.batches.values()), "released while in use"
                    self.released += 1

    def do_receiver(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case rx.Decided():
                    self.outcomes.append(action.outcome)
                    if action.outcome is rx.Outcome.ARRIVED:
                        assert self.counted == expected(self.of, self.of, self.tokens, 0).writes
                case rx.AccountClosed():
                    self.closed += 1
                    assert self.fenced or self.writable() == 0, "safe while a write can still land"
                case rx.AskToStop():
                    self.to_sender.append("abort")
                case rx.Revise():
                    self.asked, self.reported = action.count, False
                    self.count_up(0)
                case rx.NeedFence():
                    self.fence()

    def writable(self) -> int:
        return sum(b.in_flight + b.unposted for b in self.batches.values())

    def fence(self) -> None:
        self.fenced = True
        self.do_receiver(self.receiver.on_fenced(GONE))

    def count_up(self, by: int) -> None:
        self.counted += by
        if self.counted == self.asked and not self.reported:
            self.reported = True
            self.do_receiver(self.receiver.on_arrived(self.counted))

    # -- what may happen next --

    def steps(self) -> list[Callable[[], None]]:
        alive = not self.sender_dead
        steps: list[Callable[[], None]] = [self.pass_time]
        if self.to_receiver:
            steps += [self.deliver_to_receiver] * 2
        if self.to_sender and alive:
            steps += [self.deliver_to_sender] * 2
        if alive and self.sender.live and not self.mid_forward and self.computed < self.tokens:
            steps += [self.begin_forward] * 2
        if alive and self.mid_forward:
            steps += [self.end_forward] * 2
        if alive and any(b.unposted for b in self.batches.values()):
            steps += [self.post] * 6
        if any(b.in_flight for b in self.batches.values()):
            steps += [self.land] * 6
        return steps

    def faults(self) -> list[Callable[[], None]]:
        faults: list[Callable[[], None]] = [self.abort]
        if not self.sender_dead:
            faults += [self.kill_sender, self.fail_engine]
        if any(b.in_flight for b in self.batches.values()):
            faults += [self.lose_write]
        return faults

    def pass_time(self) -> None:
        self.now += self.rng.choice([0.01, 0.5, 3.0])
        self.do_receiver(self.receiver.on_tick(self.now))

    def deliver_to_receiver(self) -> None:
        kind, report = self.to_receiver.popleft()
        if kind == "stopped":
            self.do_receiver(self.receiver.on_stopped(self.now, report.posted, report.failure))
        else:
            self.do_receiver(self.receiver.on_finished(self.now, report.posted, None))

    def deliver_to_sender(self) -> None:
        self.to_sender.popleft()
        self.do_sender(self.sender.stop(None))

    def begin_forward(self) -> None:
        end = min(self.tokens, self.computed + CHUNK)
        self.mid_forward = True
        self.do_sender(self.sender.on_chunk(tx.Chunk(self.computed, end, [self.blocks], 1, 0)))
        self.computed = end

    def end_forward(self) -> None:
        self.mid_forward = False
        self.do_sender(self.sender.on_forward_ended(1, 2))

    def post(self) -> None:
        batch = self.rng.choice([b for b in self.batches.values() if b.unposted])
        batch.unposted -= 1
        batch.posted += 1
        batch.in_flight += 1

    def land(self) -> None:
        batch = self.rng.choice([b for b in self.batches.values() if b.in_flight])
        batch.in_flight -= 1
        if not self.fenced:
            batch.landed += 1
            self.count_up(1)
        else:
            batch.failed += 1
            batch.error = BROKEN
        self.end_if_over(batch)

    def lose_write(self) -> None:
        batch = self.rng.choice([b for b in self.batches.values() if b.in_flight])
        batch.in_flight -= 1
        batch.failed += 1
        batch.error = BROKEN
        batch.unposted = 0
        self.end_if_over(batch)

    def end_if_over(self, batch: Batch) -> None:
        if batch.unposted or batch.in_flight or self.sender_dead:
            return
        event = WritesEnded(batch.handle, batch.posted, batch.landed, 0, False, batch.error, 1, 1, 1)
        self.do_sender(self.sender.on_batch_ended(event))
        if batch.error is not None:
            self.do_sender(self.sender.stop(GONE))

    def abort(self) -> None:
        self.do_receiver(self.receiver.abort(self.now, None))

    def fail_engine(self) -> None:
        self.do_sender(self.sender.stop(Failure(FailureCode.INTERNAL, "boom")))

    def kill_sender(self) -> None:
        """Bytes already on the wire may still land; the receiver notices some time later and fences."""
        self.sender_dead = True
        self.to_receiver.clear()
        for batch in self.batches.values():
            batch.unposted = 0

    def notice_death(self) -> None:
        self.do_receiver(self.receiver.on_peer_lost(GONE))
        self.fence()


@pytest.mark.parametrize("fault_rate", [0.0, 0.05, 0.3])
def test_random_walks_keep_pages_safe_and_end(fault_rate: float) -> None:
    for seed in range(700):
        rng = random.Random(f"{seed}/{fault_rate}")
        world = World(rng, rng.randint(1, 30), rng.choice([NO_CONTEXT, BOTH]))
        for _ in range(400):
            act = rng.choice(world.faults() if rng.random() < fault_rate else world.steps())
            act()
            if world.sender_dead and not world.fenced and rng.random() < 0.2:
                world.notice_death()
            if world.closed and world.outcomes and (world.sender_dead or world.released):
                break
        context = f"seed {seed}, fault rate {fault_rate}, {world}"
        assert len(world.outcomes) == 1 and world.closed == 1, context
        assert world.released == (0 if world.sender_dead and not world.released else 1), context
        if fault_rate == 0.0 and world.now < 50.0:
            assert world.outcomes == [rx.Outcome.ARRIVED], context

"""The scheduled fabric as the conformance suite of `tests.fabric` wants it: it moves when one of its parties does."""

from dataclasses import replace

import pytest

from fabric.api import Event, TransferEngine
from fabric.limits import Limits
from fabric.simulated import SimulatedEngine
from tests.fabric.conftest import Fabric, Link, each_of
from tests.fabric.party import Party
from tests.simulation.fabric import ScheduledEngine
from tests.simulation.network import ScheduledNetwork
from tests.simulation.schedule import Process, Schedule
from tests.simulation.script import Manners, draw

STEPS_PER_TURN = 8
PLAIN = replace(draw(0).manners, write_delay=0.01, ordered=True, early_share=0.0, busy_share=0.0, duplicate_share=0.0)
WILD = replace(PLAIN, ordered=False, busy_share=0.2)


class _Driven(ScheduledEngine):
    """Time passes while it makes progress. `wake` and waiting are the parent's: nobody waits for a schedule."""

    def __init__(self, schedule: Schedule, network: ScheduledNetwork, limits: Limits | None, rails: int) -> None:
        super().__init__(network, Process("party"), lambda: None, rails, limits)
        self._schedule = schedule

    def progress(self, timeout: float) -> list[Event]:
        if events := super().progress(timeout):
            return events
        for _ in range(STEPS_PER_TURN):
            if self._schedule.pending:
                self._schedule.step()
        return super().progress(timeout)


class ScheduledFabric(Fabric):
    def __init__(self, manners: Manners, rails: int = 1) -> None:
        super().__init__("simulated", rails)
        self.schedule = Schedule(20261130)
        self.scheduled = ScheduledNetwork(self.schedule, manners, needs_dead_peer=False)

    def engine(self, limits: Limits | None, rails: int) -> TransferEngine:
        return _Driven(self.schedule, self.scheduled, limits, rails)

    def stall(self, party: Party) -> None:
        self._engine(party).process.paused = True

    def resume(self, party: Party) -> None:
        self._engine(party).process.paused = False
        self.scheduled.released(self._engine(party))

    def cut(self, party: Party, rail: int) -> None:
        self.scheduled.break_rail(self._engine(party), rail, lasting=None)

    @staticmethod
    def _engine(party: Party) -> ScheduledEngine:
        assert isinstance(party.engine, SimulatedEngine) and isinstance(party.engine, ScheduledEngine)
        return party.engine


fabric = each_of(
    {
        "plain": lambda: ScheduledFabric(replace(PLAIN, lands_while_paused=False)),
        "wild": lambda: ScheduledFabric(replace(WILD, lands_while_paused=False), rails=2),
    }
)


@pytest.fixture
def link(fabric: Fabric) -> Link:
    return Link(fabric)

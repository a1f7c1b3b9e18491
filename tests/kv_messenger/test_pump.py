"""The messenger's thread: what is submitted runs there in order, and its death is seen by whoever waits."""

import os
import threading
from collections.abc import Iterator, Sequence

import pytest

from fabric.api import Event, Landing
from fabric.simulated import SimulatedEngine, SimulatedNetwork
from kv_messenger import pump as pump_module
from kv_messenger.pump import Pump, PumpDead

DEADLINE_S = 30.0


class Owner:
    """Notes on which thread it was called."""

    def __init__(self) -> None:
        self.ticked = threading.Event()
        self.threads: set[str] = set()

    def on_events(self, events: Sequence[Event]) -> None:
        self.threads.add(threading.current_thread().name)

    def on_tick(self, now: float) -> None:
        self.threads.add(threading.current_thread().name)
        self.ticked.set()


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def pump(owner: Owner) -> Iterator[Pump]:
    made = Pump(SimulatedEngine(SimulatedNetwork()), owner)
    made.start()
    yield made
    made.close()


def broken() -> None:
    raise ZeroDivisionError("a bug")


def join(pump: Pump) -> None:
    pump._thread.join(DEADLINE_S)
    assert not pump.alive


def test_what_is_submitted_runs_on_its_thread_in_order(pump: Pump) -> None:
    ran: list[tuple[int, str]] = []
    for number in range(100):
        pump.submit(lambda number=number: ran.append((number, threading.current_thread().name)))  # type: ignore[misc]
    pump.call(lambda: None)
    assert ran == [(number, "kv-messenger") for number in range(100)]


def test_call_returns_only_after_the_action_ran(pump: Pump) -> None:
    ran = []
    pump.call(lambda: ran.append(True))
    assert ran == [True]


def test_an_action_may_submit_another_one(pump: Pump) -> None:
    done = threading.Event()
    pump.submit(lambda: pump.submit(done.set))
    assert done.wait(DEADLINE_S)


def test_the_owner_is_ticked_on_the_pumps_thread(pump: Pump, owner: Owner) -> None:
    assert owner.ticked.wait(DEADLINE_S)
    assert owner.threads == {"kv-messenger"}


def test_the_thread_is_confined_to_its_cores_and_no_other_is(owner: Owner) -> None:
    allowed = os.sched_getaffinity(0)
    pump = Pump(SimulatedEngine(SimulatedNetwork()), owner, cores={min(allowed)})
    pump.start()
    found: list[set[int]] = []
    pump.call(lambda: found.append(os.sched_getaffinity(0)))
    assert found == [{min(allowed)}] and os.sched_getaffinity(0) == allowed
    pump.close()


def test_close_runs_what_was_submitted_before(owner: Owner) -> None:
    pump = Pump(SimulatedEngine(SimulatedNetwork()), owner)
    pump.start()
    ran: list[int] = []
    for number in range(50):
        pump.submit(lambda number=number: ran.append(number))  # type: ignore[misc]
    pump.close()
    assert ran == list(range(50)) and not pump.alive


def test_submitting_after_the_end_is_harmless_and_runs_nothing(owner: Owner) -> None:
    pump = Pump(SimulatedEngine(SimulatedNetwork()), owner)
    pump.start()
    pump.close()
    ran: list[bool] = []
    pump.submit(lambda: ran.append(True))
    pump.close()
    assert ran == []


def test_a_pump_that_was_never_started_can_be_closed(owner: Owner) -> None:
    Pump(SimulatedEngine(SimulatedNetwork()), owner).close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_action_that_raises_ends_the_thread_and_is_logged(pump: Pump, caplog: pytest.LogCaptureFixture) -> None:
    pump.submit(broken)
    join(pump)
    assert "KV messenger thread died" in caplog.text and "ZeroDivisionError" in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whoever_calls_what_raises_hears_that_the_thread_is_dead(pump: Pump, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pump_module, "CALL_TIMEOUT_S", 1.0)
    with pytest.raises(PumpDead):
        pump.call(broken)
    assert not pump.alive
    with pytest.raises(PumpDead):
        pump.call(lambda: None)


def test_what_the_fabric_holds_is_counted_on_the_pumps_thread(pump: Pump) -> None:
    assert pump.count().endpoints == 0
    landings: list[Landing] = []
    pump.call(lambda: landings.append(pump._fabric.open_landing("peer")))
    assert pump.count().endpoints == len(landings) == 1

"""Workers that end, fail or hang: noticed, named, and nothing of the group is left."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from engine.errors import DeviceLost
from engine.forward_batch import BatchRow, ForwardBatch
from engine.progress import ProgressWord
from engine.workers.messages import Forward, Loaded, Ready, Row
from engine.workers.runner import RemoteMainRunner
from tests.engine.fake_workers import (
    DEADLINE_S,
    LISTEN,
    OBEY,
    FakeGroup,
    children,
    fake_group,
    open_files,
    wait_until_gone,
)

NOTHING = Forward([], [])
BATCH = ForwardBatch([BatchRow("A", 0, [1], [[2]])])
GROUPS: list[FakeGroup] = []


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Closes the groups that a test has made."""
    files, threads, before = open_files(), threading.active_count(), children()
    yield
    for group in GROUPS:
        group.close()
        group.close()
    GROUPS.clear()
    assert (open_files(), threading.active_count(), children()) == (files, threads, before)


def group_of(*scripts: str, timeout_s: float = DEADLINE_S) -> FakeGroup:
    GROUPS.append(fake_group(*scripts, timeout_s=timeout_s))
    return GROUPS[-1]


def loss(group: FakeGroup) -> str:
    """Why it was lost, once it is."""
    lost: list[DeviceLost] = []
    noticed = threading.Event()

    def notice(error: DeviceLost) -> None:
        lost.append(error)
        noticed.set()

    group.when_lost(notice)
    assert noticed.wait(DEADLINE_S)
    assert len(lost) == 1
    for pid in group.pids:
        wait_until_gone(pid)
    with pytest.raises(DeviceLost) as raised:
        group.tell(NOTHING)
    assert str(raised.value) == str(lost[0]) == group.lost
    return str(lost[0])


def test_answers_of_all_are_waited_for() -> None:
    group = group_of("channel.send(Loaded())\n" + LISTEN, "channel.send(Loaded())\n" + LISTEN)
    group.wait_for(Loaded, DEADLINE_S)
    with pytest.raises(DeviceLost, match=r"not every worker was ready after 0\.05 s"):
        group.wait_for(Ready, 0.05)


def test_a_group_that_is_told_to_ends_well() -> None:
    group = group_of(OBEY, LISTEN)
    assert group.forward(NOTHING).result(DEADLINE_S).started_ns == 1
    group.close()
    assert group.lost is None


def test_a_killed_worker_is_named_and_takes_the_others_with_it() -> None:
    group = group_of(OBEY, "signal.pause()", LISTEN)
    pid = group.pids[1]
    os.kill(pid, signal.SIGKILL)
    assert loss(group) == f"rank 1 (process {pid}) was killed by SIGKILL"


def test_an_exit_is_named_with_its_status() -> None:
    group = group_of(OBEY, "sys.exit(3)")
    assert loss(group) == f"rank 1 (process {group.pids[1]}) ended with status 3"


def test_a_failure_is_reported_in_the_workers_words() -> None:
    assert (
        loss(group_of(OBEY, "channel.send(Failed('out of memory'))\nsignal.pause()")) == "rank 1 failed: out of memory"
    )


def test_who_ended_because_of_another_is_not_blamed() -> None:
    """Rank 0 waits for the process that it is told of, as the ranks of a collective wait for each other."""
    waits = "import select\nselect.select([os.pidfd_open(channel.receive().rows[0].start)], [], [])\n"
    group = group_of(waits + "os._exit(OTHERS_GONE)", "signal.pause()")
    group.tell(Forward([Row(group.pids[1], [], [], False, -1)], []))
    os.kill(group.pids[1], signal.SIGKILL)
    assert loss(group) == f"rank 1 (process {group.pids[1]}) was killed by SIGKILL"


def test_where_nobody_has_died_the_one_that_gave_up_says_so() -> None:
    group = group_of(OBEY, "os._exit(OTHERS_GONE)", LISTEN)
    assert loss(group) == f"rank 1 (process {group.pids[1]}) gave up waiting for another rank"


def test_a_worker_that_hangs_up_is_out_of_step() -> None:
    group = group_of("channel.close()\nsignal.pause()")
    assert loss(group) == f"rank 0 (process {group.pids[0]}) has closed its socket"


def test_only_the_main_rank_reports_tokens() -> None:
    group = group_of(OBEY, "channel.send(Done([], 1, 2))\nsignal.pause()")
    assert loss(group) == f"rank 1 (process {group.pids[1]}) is out of step: Done came from it"


def test_nonsense_from_a_worker_ends_the_group() -> None:
    group = group_of("os.write(channel.fileno(), b'\\1\\0\\0\\0\\xc1')\nsignal.pause()")
    assert "is out of step" in loss(group)


def test_a_forward_under_way_fails_with_the_worker() -> None:
    group = group_of("channel.receive()\nos.kill(os.getpid(), signal.SIGKILL)", LISTEN)
    with pytest.raises(DeviceLost, match=r"rank 0 .* was killed by SIGKILL"):
        group.forward(NOTHING).result(DEADLINE_S)


def test_a_worker_that_takes_nothing_ends_the_group() -> None:
    group = group_of("signal.pause()", timeout_s=0.1)
    with pytest.raises(DeviceLost, match="TimeoutError"):
        for _ in range(100):
            group.tell(Forward([Row(0, [0] * 100_000, [], False, -1)], []))


def test_a_silent_main_rank_hangs() -> None:
    group = group_of("signal.pause()")
    runner = RemoteMainRunner(group, ProgressWord(), asynchronous=True, silence_s=0.05)
    forward = runner.launch(BATCH)
    with pytest.raises(DeviceLost, match=r"rank 0 was not heard of for 0\.05 s: it hangs"):
        forward.result()


def test_a_main_rank_whose_word_moves_does_not_hang() -> None:
    group = group_of("channel.receive()\nchannel.receive()\nchannel.send(Done([], 3, 4))\n" + OBEY)

    class Busy(ProgressWord):
        reads = 0

        @property
        def value(self) -> int:
            Busy.reads += 1
            if Busy.reads == 8:
                group.tell(NOTHING)
            return Busy.reads

    runner = RemoteMainRunner(group, Busy(), asynchronous=False, silence_s=0.02)
    assert runner.launch(BATCH).result().started_ns == 3

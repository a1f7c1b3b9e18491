"""Virtual time: events in the order of when they are due, ties in the order in which they were made."""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random

START_S = 1000.0
"""Not 0: that is "never" to some."""

Action = Callable[[], None]


class Process:
    """One operating-system process. While it is paused, what happens to it waits; once it is dead, it is lost."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.paused = False
        self.dead = False
        self.backlog: list[Action] = []

    @property
    def running(self) -> bool:
        return not (self.paused or self.dead)


class Schedule:
    """The clock, and all chance: nothing else may draw."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = START_S
        self.steps = 0
        self._events: list[tuple[float, int, Process | None, Action]] = []
        self._made = 0

    def clock(self) -> float:
        return self.now

    def after(self, delay: float, action: Action, process: Process | None = None) -> None:
        """`process`: whose event it is; None: the world's."""
        self._made += 1
        heappush(self._events, (self.now + delay, self._made, process, action))

    def within(self, longest: float) -> float:
        """A random delay."""
        return self.random.random() * longest

    @property
    def pending(self) -> int:
        return len(self._events)

    def step(self) -> None:
        """The next event. There always is one where nodes tick."""
        due, _, process, action = heappop(self._events)
        self.now = due
        self.steps += 1
        if process is None:
            action()
        elif process.paused:
            process.backlog.append(action)
        elif not process.dead:
            action()

    def pause(self, process: Process) -> None:
        process.paused = True

    def resume(self, process: Process) -> None:
        """What waited happens now, in its order."""
        process.paused = False
        backlog, process.backlog = process.backlog, []
        for action in backlog:
            self.after(0.0, action, process)

    def kill(self, process: Process) -> None:
        process.dead, process.paused = True, False
        process.backlog.clear()


class Thread:
    """An inbox: what is posted runs later, on this process, in order. `lag`: how late at most."""

    def __init__(self, schedule: Schedule, process: Process, lag: float) -> None:
        self._schedule = schedule
        self._process = process
        self._lag = lag
        self._posted: deque[Action] = deque()

    def post(self, action: Action) -> None:
        self._posted.append(action)
        self._schedule.after(self._schedule.within(self._lag), self._run_next, self._process)

    def _run_next(self) -> None:
        self._posted.popleft()()

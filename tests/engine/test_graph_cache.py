"""Captured forwards: when they are recorded, when replayed, and how often they run."""

from collections.abc import Callable

from engine import graph_cache
from engine.graph_cache import GraphCache, Replay


class Recorder:
    """Counts what it records, and what of that is played."""

    def __init__(self) -> None:
        self.recording = False
        self.played: list[str] = []

    def capture(self, forward: Callable[[], None]) -> Replay:
        self.recording = True
        forward()
        self.recording = False
        return forward

    def forward(self, name: str) -> Callable[[], None]:
        return lambda: None if self.recording else self.played.append(name)


def test_the_first_forward_of_a_key_runs_once_and_later_ones_replay_it() -> None:
    recorder = Recorder()
    cache = GraphCache(recorder.capture)
    for _ in range(3):
        cache.run("a", recorder.forward("a"))
    cache.run("b", recorder.forward("b"))
    assert recorder.played == ["a", "a", "a", "b"]
    assert (cache.captures, cache.replays) == (2, 2)


def test_a_replay_is_what_was_captured_not_what_is_asked_for() -> None:
    recorder = Recorder()
    cache = GraphCache(recorder.capture)
    cache.run("a", recorder.forward("first"))
    cache.run("a", recorder.forward("second"))
    assert recorder.played == ["first", "first"]


def test_the_least_recently_used_graph_is_dropped() -> None:
    recorder = Recorder()
    cache = GraphCache(recorder.capture)
    for key in range(graph_cache.MAX_GRAPHS):
        cache.run(key, recorder.forward("old"))
    cache.run(0, recorder.forward("new"))
    cache.run("one more", recorder.forward("new"))
    cache.run(0, recorder.forward("new"))
    assert cache.replays == 2
    cache.run(1, recorder.forward("new"))
    assert (cache.captures, cache.replays) == (graph_cache.MAX_GRAPHS + 2, 2)

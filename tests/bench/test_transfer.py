"""The benchmark runs, and reports what it moved; how fast is not a test's business."""

import json
from collections.abc import Callable

import pytest

from bench.__main__ import main
from bench.peers.environments import PeerMissing
from bench.peers.orders import ChildFailed
from bench.transfer import PAGES, Comparison, Implementation, peers, table
from bench.transfer_paths import FabricWay, Way
from fabric.libfabric import providers
from fabric.same_host import SAME_HOST

ROW = {"implementation", "provider", "page_bytes", "in_flight", "gb_per_s", "median", "low", "high"}


def test_a_small_run_reports_every_way_at_every_page_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transfer", "--mib", "2", "--repeats", "2"]) == 0
    report, _, printed = capsys.readouterr().out.partition("\n\n")
    rows = json.loads(report)["rows"]
    ways = [("kvferry", name) for name in providers()] + [("kvferry_same_host", SAME_HOST)]
    ways += [("raw_tcp", "tcp"), ("memcpy", "memory")]
    assert [(r["implementation"], r["provider"], r["page_bytes"]) for r in rows] == [
        (*w, p) for w in ways for p in PAGES
    ]
    assert all(set(row) == ROW and len(row["gb_per_s"]) == 2 and row["low"] > 0 for row in rows)
    assert len(printed.splitlines()) == 1 + len(ways)


@pytest.mark.parametrize("provider", [*providers()[:1], SAME_HOST])
def test_the_pages_that_were_sent_are_those_that_arrive(provider: str) -> None:
    way = FabricWay(provider, in_flight=4)
    try:
        way.pool[:] = 0
        way.move(page=16 << 10, writes=7)
        assert way.pool[: 7 * (16 << 10)].any() and not way.pool[7 * (16 << 10) :].any()
    finally:
        way.close()


class Scripted:
    """A way that fails at its `fails`th turn."""

    def __init__(self, log: list[str], name: str, fails: int = -1) -> None:
        self._log, self._name, self._left = log, name, fails

    def move(self, page: int, writes: int) -> float:
        self._left -= 1
        if self._left == -1:
            raise ChildFailed("ended with 1: no memory")
        self._log.append(self._name)
        return page * writes / 2e9

    def close(self) -> None:
        self._log.append(f"{self._name} closed")


def scripted(log: list[str], name: str, fails: int = -1) -> Implementation:
    return Implementation(name, "none", lambda: Scripted(log, name, fails), 1)


def test_ways_take_turns_in_an_order_that_rotates() -> None:
    log: list[str] = []
    comparison = Comparison(1 << 20, repeats=2, pages=[1 << 20])
    comparison.run([scripted(log, "a"), scripted(log, "b")])
    assert log == ["b", "a", "a", "b", "b", "a", "a closed", "b closed"]
    assert [(row.implementation, row.gb_per_s) for row in comparison.rows] == [("a", [2.0, 2.0]), ("b", [2.0, 2.0])]


def test_one_that_is_missing_or_dies_is_said_and_the_others_go_on() -> None:
    def missing() -> Way:
        raise PeerMissing("not installed")

    log: list[str] = []
    comparison = Comparison(1 << 20, repeats=2, pages=[1 << 20])
    comparison.run([scripted(log, "a"), scripted(log, "dies", fails=2), Implementation("gone", "none", missing, 1)])
    assert comparison.missing == {"gone": "not installed", "dies": "ended with 1: no memory"}
    assert [row.implementation for row in comparison.rows] == ["a"]
    assert "missing: dies: ended with 1: no memory" in table(comparison)


@pytest.mark.slow
@pytest.mark.parametrize("one", peers(4), ids=lambda one: one.name)
def test_a_peer_that_is_installed_moves_pages(one: Implementation) -> None:
    opened = _open(one.open)
    try:
        assert opened.move(16 << 10, 64) > 0
        assert opened.move(64 << 10, 64) > 0
    finally:
        opened.close()


def _open(way: Callable[[], Way]) -> Way:
    try:
        return way()
    except PeerMissing as error:
        pytest.skip(str(error))


def test_an_unknown_benchmark_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    assert "transfer" in capsys.readouterr().err

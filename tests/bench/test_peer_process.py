"""A peer's process answers one order at a time; however it fails, the benchmark learns why and goes on."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.peers.lines import Arrival, Served, Settings, Timed
from bench.peers.orders import ChildFailed
from bench.peers.process import PeerProcess
from tests.bench.fake_peer import DIES, DIES_AT_START, FAILS


@contextmanager
def fake(log: Path, way: str = "") -> Iterator[PeerProcess]:
    settings = Settings("model", way, threads=1, max_requests=2, cache_tokens=64, max_context=32)
    peer = PeerProcess("tests.bench.fake_peer", Path(sys.executable), log, settings, sorted(os.sched_getaffinity(0)))
    try:
        yield peer
    finally:
        peer.close()


def test_every_order_is_answered_and_what_libraries_print_goes_to_the_log(tmp_path: Path) -> None:
    with fake(tmp_path / "log") as peer:
        peer.wait_ready()
        peer.fill([[1, 2], [3]])
        assert peer.decode([[1, 2], [3]], steps=3) == Timed(0.5, 6)
        assert peer.prefill([5, 6, 7]) == Timed(0.25, 3)
        assert peer.replay([Arrival(0.5, [1], 4)]) == [Served(0.5, 1.5, 2.5, 4)]
    assert "about 2 prompts" in (tmp_path / "log").read_text()


def test_an_error_is_told_and_the_peer_lives_on(tmp_path: Path) -> None:
    with fake(tmp_path / "log", FAILS) as peer:
        peer.wait_ready()
        with pytest.raises(ChildFailed, match="ValueError: it cannot do that"):
            peer.decode([[1]], steps=1)
        assert peer.prefill([5]).tokens == 1


@pytest.mark.parametrize(("way", "words"), [(DIES_AT_START, "ended with 1: no such model"), (DIES, "ended with 3")])
def test_the_last_words_of_one_that_dies_are_the_reason(tmp_path: Path, way: str, words: str) -> None:
    with fake(tmp_path / "log", way) as peer, pytest.raises(ChildFailed, match=words):
        peer.wait_ready()
        peer.decode([[1]], steps=1)

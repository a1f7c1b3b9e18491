"""The peers that run in our own environment serve every load, on a tiny model."""

from pathlib import Path

import pytest

from bench.engine import IMPLEMENTATIONS, Implementation, compare
from bench.engine_cells import Cell, Load, Phase, Plan
from bench.peers.environments import STAMP, Environment, PeerMissing, python_of
from bench.peers.hf_generate import Generate
from bench.peers.hf_generate_batch import GenerateBatch
from bench.peers.kvferry import Kvferry
from bench.peers.lines import Arrival, Peer, Settings
from bench.peers.stepping import SteppedPeer
from tests.tiny_model import save_tiny_model

PROMPTS = [[7 + i, 11, 13, 17, 19, 23, 29, 31, 37] for i in range(2)]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = save_tiny_model(tmp_path_factory.mktemp("bench"))
    return Settings(str(folder), "", threads=1, max_requests=2, cache_tokens=2048, max_context=128)


def _peer(name: str, settings: Settings) -> Peer:
    if name == "generate":
        return Generate(settings)
    return SteppedPeer(Kvferry(settings) if name == "kvferry" else GenerateBatch(settings))


@pytest.mark.parametrize("name", ["kvferry", "generate", "generate_batch"])
def test_a_peer_serves_every_load(name: str, settings: Settings) -> None:
    peer = _peer(name, settings)
    try:
        peer.fill(PROMPTS)
        assert peer.decode(PROMPTS, steps=4).tokens >= 2 * 4
        assert peer.decode([PROMPTS[0][:6]], steps=3).tokens == 3
        assert peer.prefill([41, 43, 47, 53]).tokens == 4
        served = peer.replay([Arrival(0.0, [5, 6, 7], 4), Arrival(0.001, [8, 9], 2)])
        assert [one.tokens for one in served] == [4, 2]
        assert all(one.at < one.first <= one.last for one in served)
    finally:
        peer.close()


def test_engines_that_are_not_installed_or_do_not_start_are_reported_with_the_reason(tmp_path: Path) -> None:
    plan = Plan((Cell(Phase.DECODE, 1, 8),), (), Load(1.0, 1, (4, 5), (2, 3)), repeats=1, seconds=0.1)
    absent = Implementation("absent", "bench.peers.vllm_cpu", Environment("never_installed", [["nothing"]]))
    broken = Implementation("broken", "bench.peers.no_such_module")
    comparison = compare(plan, [absent, broken], threads=1, seed=0)
    assert "python -m bench.peers.environments" in comparison.missing["absent"]
    assert "no_such_module" in comparison.missing["broken"]
    assert comparison.rows == []


def test_an_environment_is_ready_only_if_it_was_made_as_it_is_described(tmp_path: Path) -> None:
    environment = Environment("peer", [["package==1"]], folder=tmp_path)
    with pytest.raises(PeerMissing):
        python_of(environment)
    (tmp_path / "peer").mkdir()
    (tmp_path / "peer" / STAMP).write_text("of another version")
    assert not environment.is_ready


@pytest.mark.slow
def test_what_pip_says_is_why_an_environment_is_missing(tmp_path: Path) -> None:
    environment = Environment("peer", [["--no-index", "--no-cache-dir", "kvferry-has-no-such-peer"]], folder=tmp_path)
    with pytest.raises(PeerMissing, match="kvferry-has-no-such-peer"):
        environment.create()
    assert not environment.is_ready


def test_every_implementation_of_the_issue_is_there() -> None:
    names = [one.name for one in IMPLEMENTATIONS]
    assert names == ["kvferry", "generate", "generate_batch", "vllm_cpu", "llama_cpp_q4_1"]

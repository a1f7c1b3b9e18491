"""transformers' own way to divide a model, over gloo: the oracle of ours."""

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.models.loading import load_model
from engine.tensor_parallel import Shard
from tests.engine.fake_workers import ROOT
from tests.engine.ranks import RankThreads
from tests.engine.tiny_models import prompt_of
from tests.engine.tp_plan_oracle import NEW

START_S = 100.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3-moe", "deepseek-v2"])
def test_transformers_divides_the_same_and_says_the_same(
    kind: str, tiny_kind: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, prompt, world = tiny_kind(kind), prompt_of(11), 2
    command, port = [sys.executable, "-m", "tests.engine.tp_plan_oracle"], str(free_port())
    ranks = []
    for rank in range(world):
        arguments = [rank, world, port, folder, tmp_path / str(rank), *prompt]
        ranks.append(subprocess.Popen([*command, *map(str, arguments)], cwd=ROOT, stdout=subprocess.PIPE))
    said = [rank.communicate(timeout=START_S)[0].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world
    for rank in range(world):
        ours = dict(load_model(folder, shard=Shard(rank, world)).model.named_parameters())
        theirs = load_file(tmp_path / str(rank))
        assert theirs
        for name, part in theirs.items():
            assert torch.equal(ours[name], part), f"{name} on rank {rank}"
    with RankThreads(folder, world) as threads:
        assert threads.greedy(prompt, NEW, cut=5) == [int(token) for token in said[0].split()]

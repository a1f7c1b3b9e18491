"""What FlashInfer's kernels are told, with kernels of the CPU's own in their place: equal to plain torch."""

import dataclasses
from pathlib import Path

import pytest
import torch

from engine.attention.base import AttentionScores
from engine.attention.flashinfer import FlashInferAttention, scores_of, unsupported
from engine.attention.flashinfer_plans import StaticSizes
from engine.attention.torch_paged import TorchPagedAttention
from engine.device_runner import DeviceRunner, DeviceSizes, Graphs
from engine.errors import UnsupportedModel
from engine.geometry import LayerGroup
from engine.model_runner import ModelRunner
from engine.models.loading import LoadedModel, load_model
from engine.padding import Padding
from engine.runner import Runner
from tests.engine import fake_flashinfer
from tests.engine.fake_device import ImmediateStreams, record
from tests.engine.paged_cases import FULL, HYBRID, Cases, assert_close, geometry
from tests.engine.runners import MAX_LENGTH, Bench, batch
from tests.engine.tiny_models import prompt_of
from tests.tiny_model import VOCAB, save_weights

SCORES = AttentionScores(0.125)


@pytest.mark.parametrize("groups", [FULL, HYBRID])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2)])
@pytest.mark.parametrize("scores", [SCORES, AttentionScores(0.2, softcap=3.0)])
def test_prompts_in_slices_and_decodes_are_those_of_plain_torch(
    groups: tuple[LayerGroup, ...], heads: int, kv_heads: int, scores: AttentionScores
) -> None:
    cases = Cases(geometry(groups, "bfloat16", kv_heads=kv_heads), heads, seed=heads)
    flash = FlashInferAttention(cases.cache(), heads, scores, fake_flashinfer)
    wanted = cases.outputs(TorchPagedAttention(cases.cache(), torch.bfloat16), scores)
    assert_close(cases.outputs(flash, scores), wanted)


def test_each_group_is_planned_once_for_all_its_layers() -> None:
    cases = Cases(geometry(HYBRID, "float16"), heads=2, seed=1)
    flash = FlashInferAttention(cases.cache(), 2, SCORES, fake_flashinfer)
    decode = cases.batches()[-1]
    plan = flash.plan(decode)
    again = flash.plan(decode)
    assert [part.kernel.plans for part in plan] == [2, 2]
    assert [part.kernel for part in plan] == [part.kernel for part in again]


def test_what_the_kernels_cannot_do_is_said() -> None:
    half = geometry(FULL, "float16")
    assert unsupported(half, SCORES) is None
    assert "sinks" in (unsupported(half, AttentionScores(1.0, sinks=torch.zeros(2))) or "")
    assert "float32" in (unsupported(geometry(FULL, "float32"), SCORES) or "")
    assert "MLA" in (unsupported(dataclasses.replace(half, kv_heads=1, parts=1), SCORES) or "")
    assert "48" in (unsupported(dataclasses.replace(half, head_dim=48), SCORES) or "")
    cases = Cases(geometry(FULL, "float32"), heads=2, seed=1)
    with pytest.raises(UnsupportedModel, match="not in float32"):
        FlashInferAttention(cases.cache(), 2, SCORES, fake_flashinfer)


def test_a_model_says_how_it_wants_its_scores(tmp_path: Path) -> None:
    llama = scores_of(load_model(save_weights(tmp_path / "llama")).model)
    assert (llama.softcap, llama.sinks) == (None, None)
    assert llama.scaling == pytest.approx(8**-0.5)
    gemma = scores_of(load_model(save_weights(tmp_path / "gemma2", "gemma2")).model)
    assert gemma.softcap is not None
    gpt = scores_of(load_model(save_weights(tmp_path / "gpt_oss", "gpt_oss")).model)
    assert gpt.sinks is not None


class TorchBench(Bench):
    dtype = "float16"

    def attention(self, loaded: LoadedModel) -> TorchPagedAttention:
        return TorchPagedAttention(self.cache, torch.float16)


class FlashBench(Bench):
    """A model in 16 bits, on the stand-ins for FlashInfer's kernels."""

    dtype = "float16"

    def attention(self, loaded: LoadedModel) -> FlashInferAttention:
        return FlashInferAttention(self.cache, loaded.sizes.heads, scores_of(loaded.model), fake_flashinfer)

    def runner(self, pairs: int, varlen: bool) -> DeviceRunner:
        padding = Padding(self.geometry, max_tokens=64, max_requests=6, cache_tokens=10_000, q_interval=16)
        static = StaticSizes(padding.max_tokens, padding.max_rows, max_length=MAX_LENGTH)
        return DeviceRunner(
            self.model,
            [self.backend.planner(static) for _ in range(pairs)],
            ImmediateStreams(),
            DeviceSizes(torch.device("cpu"), torch.float16, VOCAB, padding.max_tokens, padding.max_requests),
            Graphs(padding, record, varlen=varlen),
        )


def answers(bench: Bench, runner: Runner, overlap: bool) -> list[list[int]]:
    """Three prompts, one in two slices, and some tokens of each."""
    a, b, c = sequences = [bench.sequence(f"r{n}", prompt_of(n)) for n in (5, 19, 1)]
    rows = [[a.row(), b.row(12)], [a.carried_row(0), b.row(), c.row()]]
    rows += [[s.carried_row(i) for i, s in enumerate(sequences)] for _ in range(6)]
    results, running = [], [[a], *[sequences] * 7]
    for forward in rows:
        results.append(runner.launch(batch(*forward)))
        if not overlap:
            results[-1].result()
    for of_forward, result in zip(running, results, strict=True):
        for sequence, token in zip(of_forward, result.result().tokens, strict=True):
            sequence.take(token)
    return [s.generated for s in sequences]


@pytest.mark.parametrize(("family", "varlen"), [("llama", True), ("gemma2", False)])
@pytest.mark.parametrize("pairs", [1, 2])
def test_captured_forwards_answer_as_plain_torch_does(tmp_path: Path, family: str, varlen: bool, pairs: int) -> None:
    directory = save_weights(tmp_path / family, family, head_dim=64)
    plain = TorchBench(directory)
    expected = answers(plain, ModelRunner(plain.model, plain.backend), overlap=False)
    bench = FlashBench(directory)
    runner = bench.runner(pairs, varlen)
    assert answers(bench, runner, overlap=pairs == 2) == expected
    captures = [cache.captures for cache in runner.graph_caches]
    assert answers(bench, runner, overlap=pairs == 2) == expected
    assert [cache.captures for cache in runner.graph_caches] == captures, "the same shapes again"
    assert sum(cache.replays for cache in runner.graph_caches) > sum(captures)

"""Models cut into shards: the parts are the whole, and together they compute what the whole does."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, GptOssConfig

from engine.errors import UnsupportedModel
from engine.models.binding import BoundModel
from engine.models.dense import DenseKernels
from engine.models.llama_like import LlamaLikeModel
from engine.models.loading import load_model
from engine.models.sharding import check_plan
from engine.progress import ProgressWord
from engine.tensor_parallel import Shard
from tests.engine.paged import Paged, randomise_vectors
from tests.engine.ranks import PAGE_SIZE, Bind, RankThreads
from tests.engine.tiny_models import greedy, prompt_of
from tests.tiny_model import WINDOW, save_weights


@dataclass(frozen=True)
class Case:
    family: str
    world: int
    settings: dict[str, Any] = field(default_factory=dict)


BIASED = {"attention_bias": True, "mlp_bias": True}
CASES = {
    "llama on 4": Case("llama", 4),
    "llama with biases on 2": Case("llama", 2, BIASED),
    "llama of 2 KV heads on 4": Case("llama", 4, {"num_key_value_heads": 2, **BIASED}),
    "qwen2 on 2": Case("qwen2", 2),
    "qwen3 of 2 KV heads on 4": Case("qwen3", 4, {"num_key_value_heads": 2}),
    "mistral that slides on 2": Case("mistral", 2, {"sliding_window": WINDOW}),
    "gemma3 on 4": Case("gemma3_text", 4),
    "deepseek v2 on 4": Case("deepseek_v2", 4),
    "deepseek v3 without experts, with biases on 2": Case(
        "deepseek_v3", 2, {"first_k_dense_replace": 3, "attention_bias": True}
    ),
    "qwen3 moe with a dense layer on 4": Case("qwen3_moe", 4, {"mlp_only_layers": [1]}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    def make(case: Case) -> Path:
        made = save_weights(tmp_path_factory.mktemp("model"), case.family, **case.settings)
        randomise_vectors(made)
        return made

    return make


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, folder: Callable[[Case], Path]) -> tuple[Path, int]:
    chosen = CASES[request.param]
    return folder(chosen), chosen.world


def weights(folder: Path, shard: Shard) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in load_model(folder, shard=shard).model.named_parameters()}


def whole_again(name: str, parts: list[torch.Tensor], kv_heads: int) -> torch.Tensor:
    """What the parts of one weight are parts of, by what its name says of it."""
    if name.endswith(("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")):
        return torch.cat(parts[:: max(1, len(parts) // kv_heads)])
    if name.endswith("experts.gate_up_proj"):
        gates, ups = zip(*(part.chunk(2, dim=1) for part in parts), strict=True)
        return torch.cat([*gates, *ups], dim=1)
    if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
        return torch.cat(parts, dim=-1)
    if re.search(r"\.(q|q_b|kv_b|gate|up)_proj\.", name):
        return torch.cat(parts)
    assert all(torch.equal(part, parts[0]) for part in parts), name
    return parts[0]


def test_the_shards_put_together_are_the_weights(case: tuple[Path, int]) -> None:
    folder, world = case
    whole, kv_heads = weights(folder, Shard(0, 1)), load_model(folder).kv.heads
    shards = [weights(folder, Shard(rank, world)) for rank in range(world)]
    for name, weight in whole.items():
        parts = [shard[name] for shard in shards if name in shard]
        assert torch.equal(whole_again(name, parts, kv_heads), weight), name
        if name.endswith(("o_proj.bias", "down_proj.bias")):
            assert name in shards[0] and len(parts) == 1, "a sum's bias is added once"
        else:
            assert len(parts) == world
        assert all(part.untyped_storage().nbytes() == part.numel() * 4 for part in parts), "no view of the whole"


def test_together_they_continue_prompts_as_generate_does(case: tuple[Path, int]) -> None:
    folder, world = case
    with RankThreads(folder, world) as ranks:
        for length, cut in ((11, 7), (3 * WINDOW, WINDOW + 4)):
            prompt = prompt_of(length)
            assert ranks.greedy(prompt, 12, cut) == greedy(folder, prompt, 12)


def by_modules(*parts: Any) -> BoundModel:
    return BoundModel(*parts)


def by_kernels(model: torch.nn.Module, backend: Any, progress: ProgressWord, collective: Any) -> LlamaLikeModel:
    return LlamaLikeModel(model, backend, progress, DenseKernels(), collective)


@pytest.fixture(scope="module")
def llama(folder: Callable[[Case], Path]) -> Path:
    return folder(Case("llama", 2, BIASED))


@pytest.mark.parametrize("bind", [by_modules, by_kernels])
@pytest.mark.parametrize("world", [2, 4])
def test_states_and_pages_are_those_of_the_whole_model(llama: Path, bind: Bind, world: int) -> None:
    whole = Paged(load_model(llama), BoundModel)
    prompt = prompt_of(30, seed=0)
    expected = whole.hidden([(0, 16)])
    with RankThreads(llama, world, bind) as ranks:
        for found in ranks.run(prompt[:16], 0, list(range(16)), head=False):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        pages = whole.pool.pages(0)[Paged.tables[0][: 16 // PAGE_SIZE]]
        for number, rank in enumerate(ranks.ranks):
            held = rank.pool.pages(0)[ranks.tables[0][: 16 // PAGE_SIZE]]
            mine = pages[:, :, Shard(number, world).kv_heads(4)]
            torch.testing.assert_close(held, mine, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bind", [by_modules, by_kernels])
def test_the_word_says_that_every_ranks_kv_of_a_layer_is_there(llama: Path, bind: Bind) -> None:
    """Also where no states are wanted, and the last layer's sum is of nothing."""
    incomplete: list[tuple[int, int]] = []

    def watched(model: torch.nn.Module, backend: Any, progress: ProgressWord, collective: Any) -> Any:
        class Watched(ProgressWord):
            def advance(self) -> None:
                super().advance()
                table = ranks.tables[0][: 16 // PAGE_SIZE]
                for number, rank in enumerate(ranks.ranks):
                    if rank.pool.pages(0)[table, self.value - 1].isnan().any():
                        incomplete.append((number, self.value))

        words.append(Watched())
        return bind(model, backend, words[-1], collective)

    words: list[ProgressWord] = []
    with RankThreads(llama, 2, watched) as ranks:
        ranks.run(prompt_of(16), 0, [])
        assert [word.value for word in words] == [3, 3]
        assert not incomplete
        assert len(ranks.collective.sums) == 6, "one behind attention, one behind the MLP, in each of three layers"


def test_families_that_nobody_says_how_to_divide_are_refused(tiny_kind: Callable[[str], Path]) -> None:
    with pytest.raises(UnsupportedModel, match=r"'gpt_oss' cannot be divided .*q_proj.*: choose --tp 1"):
        check_plan(GptOssConfig())
    with pytest.raises(UnsupportedModel, match="cannot be divided"):
        load_model(tiny_kind("gpt-oss"), shard=Shard(0, 2))


def test_plans_with_unknown_words_are_refused() -> None:
    config: Any = Gemma2Config()
    config.base_model_tp_plan = {**config.base_model_tp_plan, "embed_tokens": "vocab_rowwise"}
    with pytest.raises(UnsupportedModel, match="asks for vocab_rowwise"):
        check_plan(config)

"""Tokens chosen with every parameter: those of transformers' `generate` where it is greedy, and neither they nor drawn
ones depend on company, chunking, pages, restarts, offloads, cached prefixes, overlap or where the prompt ran."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.outputs import StepOutput
from engine.request import Request
from protocol.messages import FinishReason
from protocol.sampling import SamplingParams
from tests.engine.driving import Gathered, copy_pages, greedy_request, model_engine, prefill_here, run
from tests.engine.sampling_oracle import generate
from tests.engine.tiny_models import prompt_of

PROMPT = prompt_of(21, seed=9)
NEW = 20
WISHES: dict[str, Any] = {
    "max_new_tokens": NEW,
    "repetition_penalty": 1.1,
    "presence_penalty": -0.8,
    "frequency_penalty": 0.9,
    "logit_bias": ((5, 2.5), (17, -3.0), (40, 3.0)),
    "logprobs": True,
}
GREEDY = SamplingParams(**WISHES)
DRAWN = SamplingParams(**WISHES, temperature=1.2, top_k=30, top_p=0.95, min_p=0.01, seed=1234)
WAYS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "in chunks": {"page_size": 4, "max_batch_tokens": 7},
    "started over": {"page_size": 4, "num_blocks": 12},
    "offloaded": {"page_size": 4, "num_blocks": 12, "cpu_offload_space": 0.001},
    "overlapped": {"page_size": 4, "use_async_batching": True},
    "overlapped and started over": {"page_size": 4, "num_blocks": 12, "use_async_batching": True},
    "from a cached prefix": {"page_size": 4, "sharing": True},
}


@dataclass
class WithLogprobs(Gathered):
    logprobs: list[float] = field(default_factory=list)
    """Of the request S."""

    def take(self, output: StepOutput) -> None:
        super().take(output)
        self.logprobs += [new.logprob for new in output.tokens if new.request_id == "S" and new.logprob is not None]


def chosen(engine: Engine, params: SamplingParams, company: int = 0) -> WithLogprobs:
    for index in range(company):
        engine.add(greedy_request(f"other{index}", prompt_of(11 + index), 12))
    engine.add(Request("S", PROMPT, params))
    gathered = WithLogprobs()
    run(engine, gathered)
    return gathered


@pytest.fixture(scope="module")
def drawn(tiny_llama: Path) -> list[int]:
    return chosen(model_engine(tiny_llama), DRAWN).tokens["S"]


@pytest.fixture(scope="module")
def greedy(tiny_llama: Path) -> tuple[list[int], list[float]]:
    return generate(tiny_llama, PROMPT, GREEDY)


def test_every_parameter_matters_here(tiny_llama: Path, greedy: tuple[list[int], list[float]]) -> None:
    off = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": ()}
    for name, value in off.items():
        assert generate(tiny_llama, PROMPT, SamplingParams(**{**WISHES, name: value}))[0] != greedy[0], name


@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_and_their_log_probabilities_are_those_of_generate(
    tiny_llama: Path, greedy: tuple[list[int], list[float]], way: str
) -> None:
    engine = model_engine(tiny_llama, **WAYS[way])
    if "cached" in way:
        chosen(engine, DRAWN)
    gathered = chosen(engine, GREEDY, company=2)
    assert gathered.tokens["S"] == greedy[0]
    assert gathered.logprobs == pytest.approx(greedy[1], abs=1e-4)
    assert_went(engine, way)


@pytest.mark.parametrize("way", WAYS)
def test_drawn_tokens_are_the_same_whichever_way_they_came(tiny_llama: Path, drawn: list[int], way: str) -> None:
    engine = model_engine(tiny_llama, **WAYS[way])
    if "cached" in way:
        chosen(engine, GREEDY)
    assert chosen(engine, DRAWN, company=2).tokens["S"] == drawn
    assert_went(engine, way)
    assert len(set(drawn)) > 5


def assert_went(engine: Engine, way: str) -> None:
    assert (engine.counters.resets > 0) == ("started over" in way)
    assert (engine.counters.offloads > 0) == ("offloaded" in way)


@pytest.mark.parametrize("min_tokens", [0, 3, 9])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_stop_token_ends_the_output_once_it_is_long_enough(
    tiny_llama: Path, min_tokens: int, asynchronous: bool
) -> None:
    first = generate(tiny_llama, PROMPT, GREEDY)[0][2]
    params = SamplingParams(**WISHES, min_tokens=min_tokens, stop_token_ids=(first, 33))
    expected, _ = generate(tiny_llama, PROMPT, params)
    gathered = chosen(model_engine(tiny_llama, use_async_batching=asynchronous), params)
    assert gathered.tokens["S"] == expected and len(expected) >= min_tokens
    stopped = expected[-1] in params.stop_token_ids
    assert gathered.ended["S"].reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def test_a_prompt_computed_elsewhere_is_sampled_alike(tiny_llama: Path, drawn: list[int]) -> None:
    prefill = model_engine(tiny_llama, page_size=4, head=False)
    decode = model_engine(tiny_llama, page_size=4)
    reserved = decode.reserve(Request("S", PROMPT, DRAWN)).tables[0]
    source = prefill_here(prefill, {"S": PROMPT})["S"]
    copy_pages(prefill, source, decode, reserved[: len(source)])
    decode.resume("S", computed=20)
    assert run(decode).tokens["S"] == drawn


def test_requests_without_a_seed_differ(tiny_llama: Path) -> None:
    engine = model_engine(tiny_llama)
    free = SamplingParams(max_new_tokens=10, temperature=1.0)
    for name in ("A", "B"):
        engine.add(Request(name, PROMPT, free))
    tokens = run(engine).tokens
    assert tokens["A"] != tokens["B"]

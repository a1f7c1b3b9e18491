"""Sampled tokens of a real model do not depend on company, chunking, pages, restarts or where the prompt ran."""

from pathlib import Path

import pytest

from engine.engine import Engine
from engine.request import Request
from protocol.sampling import SamplingParams
from tests.engine.driving import copy_pages, greedy_request, model_engine, prefill_here, run
from tests.engine.tiny_models import prompt_of

PARAMS = SamplingParams(max_new_tokens=10, temperature=0.9, top_p=0.9, seed=1234)
PROMPT = prompt_of(21, seed=9)


def sampled(engine: Engine, company: int = 0) -> list[int]:
    for index in range(company):
        engine.add(greedy_request(f"other{index}", prompt_of(11 + index), 12))
    engine.add(Request("S", PROMPT, PARAMS))
    return run(engine).tokens["S"]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> list[int]:
    return sampled(model_engine(tiny_llama))


def test_a_seed_gives_the_same_tokens_in_company_chunks_and_other_pages(tiny_llama: Path, expected: list[int]) -> None:
    assert len(set(expected)) > 3
    assert sampled(model_engine(tiny_llama, page_size=4, max_batch_tokens=7), company=3) == expected


def test_a_soft_reset_does_not_change_what_is_sampled(tiny_llama: Path, expected: list[int]) -> None:
    engine = model_engine(tiny_llama, page_size=4, num_blocks=12)
    assert sampled(engine, company=2) == expected
    assert engine.counters.resets > 0


def test_a_prompt_computed_elsewhere_is_sampled_alike(tiny_llama: Path, expected: list[int]) -> None:
    prefill = model_engine(tiny_llama, page_size=4, head=False)
    decode = model_engine(tiny_llama, page_size=4)
    reserved = decode.reserve(Request("S", PROMPT, PARAMS)).blocks
    source = prefill_here(prefill, {"S": PROMPT})["S"]
    copy_pages(prefill, source, decode, reserved[: len(source)])
    decode.resume("S", computed=20)
    assert run(decode).tokens["S"] == expected


def test_requests_without_a_seed_differ(tiny_llama: Path) -> None:
    engine = model_engine(tiny_llama)
    free = SamplingParams(max_new_tokens=10, temperature=1.0)
    for name in ("A", "B"):
        engine.add(Request(name, PROMPT, free))
    tokens = run(engine).tokens
    assert tokens["A"] != tokens["B"]

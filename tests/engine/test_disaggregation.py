"""Prefill in one engine, decode in another, with the pages copied between: the same tokens."""

from pathlib import Path

import pytest
import torch

from engine.engine import Engine
from engine.request import Request
from protocol.messages import FinishReason
from protocol.sampling import SamplingParams
from tests.engine.driving import (
    assert_at_rest,
    copy_pages,
    greedy_request,
    model_engine,
    prefill_here,
    run,
)
from tests.engine.tiny_models import greedy, prompt_of

NEW = 6
CHUNK = 24


def serve_apart(prefill: Engine, decode: Engine, prompt: list[int]) -> list[int]:
    reserved = decode.reserve(greedy_request("r", prompt, NEW)).tables[0]
    assert not decode.has_work
    source = prefill_here(prefill, {"r": prompt})["r"]
    copy_pages(prefill, source, decode, reserved[: len(source)])
    prefill.release("r")
    decode.resume("r", computed=len(prompt) - 1)
    return run(decode).tokens["r"]


@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_tokens_are_those_of_one_engine(tiny_llama: Path, page_size: int) -> None:
    prefill = model_engine(tiny_llama, page_size=page_size, max_batch_tokens=CHUNK, head=False)
    decode = model_engine(tiny_llama, page_size=page_size, max_batch_tokens=CHUNK)
    edges = {2, page_size - 1, page_size, page_size + 1, page_size + 2, CHUNK, CHUNK + 1, CHUNK + 2, 3 * CHUNK + 5}
    for length in sorted(edges):
        prompt = prompt_of(length, seed=2)
        assert serve_apart(prefill, decode, prompt) == greedy(tiny_llama, prompt, NEW), f"prompt of {length} tokens"
        assert_at_rest(prefill)
        assert_at_rest(decode)
    assert prefill.counters.tokens == 0


@pytest.mark.parametrize(("blocks", "sharing", "forks"), [(64, False, 2), (64, True, 2), (13, False, 0), (13, True, 2)])
def test_sequences_of_one_arrived_prompt_draw_what_they_draw_in_an_engine_alone(
    tiny_llama: Path, blocks: int, sharing: bool, forks: int
) -> None:
    """Of 8 blocks of prompt a copy takes 8 more, or 1 where blocks are shared: what does not fit is computed here."""
    prompt = prompt_of(30, seed=7)
    drawn = SamplingParams(max_new_tokens=NEW, temperature=0.8, seed=11)
    alone, prefill = model_engine(tiny_llama, page_size=4), model_engine(tiny_llama, page_size=4, head=False)
    alone.add(Request("r", prompt, drawn, n=3))
    decode = model_engine(tiny_llama, page_size=4, num_blocks=blocks, sharing=sharing)
    for sampling in (drawn, SamplingParams(max_new_tokens=NEW)):
        request = Request("r", prompt, sampling, n=3)
        reservation = decode.reserve(request)
        source = prefill_here(prefill, {"r": prompt})["r"]
        copy_pages(
            prefill, source[reservation.cached :], decode, reservation.tables[0][reservation.cached : len(source)]
        )
        prefill.release("r")
        decode.resume("r", computed=len(prompt) - 1)
        tokens = run(decode).tokens
        assert_at_rest(decode)
        if sampling is drawn:
            assert tokens == run(alone).tokens
            assert len({tuple(sequence) for sequence in tokens.values()}) == 3
        else:
            assert tokens == dict.fromkeys(["r", *request.child_ids()], greedy(tiny_llama, prompt, NEW))
    assert decode.counters.forks == 2 * forks


def test_a_page_that_arrives_wrong_changes_the_tokens(tiny_llama: Path) -> None:
    prefill = model_engine(tiny_llama, page_size=4, head=False)
    decode = model_engine(tiny_llama, page_size=4)
    prompt = prompt_of(21, seed=3)
    reserved = decode.reserve(greedy_request("r", prompt, NEW)).tables[0]
    source = prefill_here(prefill, {"r": prompt})["r"]
    copy_pages(prefill, source, decode, reserved[: len(source)])
    decode.pool.pages(0)[reserved[2], 1] *= -1
    decode.resume("r", computed=len(prompt) - 1)
    assert run(decode).tokens["r"] != greedy(tiny_llama, prompt, NEW)


def test_local_and_remote_prompts_share_a_batch(tiny_llama: Path) -> None:
    prefill = model_engine(tiny_llama, page_size=4, head=False)
    decode = model_engine(tiny_llama, page_size=4)
    prompts = {"remote": prompt_of(30, seed=4), "local": prompt_of(33, seed=5)}
    reserved = decode.reserve(greedy_request("remote", prompts["remote"], NEW)).tables[0]
    source = prefill_here(prefill, {"remote": prompts["remote"]})["remote"]
    copy_pages(prefill, source, decode, reserved[: len(source)])
    decode.resume("remote", computed=29)
    decode.add(greedy_request("local", prompts["local"], NEW))
    assert run(decode).tokens == {i: greedy(tiny_llama, p, NEW) for i, p in prompts.items()}
    assert_at_rest(decode)


def test_a_limit_of_no_tokens_ends_on_arrival(tiny_llama: Path) -> None:
    decode = model_engine(tiny_llama)
    decode.reserve(Request("r", prompt_of(9), SamplingParams(max_new_tokens=0)))
    decode.resume("r", computed=8)
    gathered = run(decode)
    assert gathered.ended["r"].reason is FinishReason.LENGTH
    assert_at_rest(decode)


def test_the_kv_is_what_the_decode_engine_would_have_computed_slot_by_slot(tiny_llama: Path) -> None:
    """Attention does not mind the order of pages, so tokens alone would not show a mix-up: compare the KV itself."""
    prompt = prompt_of(23, seed=6)
    computed = []
    for busy in (False, True):
        engine = model_engine(tiny_llama, page_size=4, max_batch_tokens=9, head=False)
        others = {f"other{i}": prompt_of(10 + i) for i in range(3)} if busy else {}
        prefill_here(engine, others)
        for name in list(others)[::2]:
            engine.release(name)
        table = prefill_here(engine, {"r": prompt})["r"]
        assert busy == (table != sorted(table)), "the second table is meant to be out of order"
        pages = engine.pool.pages(0)[table]
        tokens = pages.permute(1, 2, 3, 0, 4, 5).reshape(3, 4, 2, len(table) * 4, 8)
        computed.append(tokens[:, :, :, : len(prompt) - 1])
    torch.testing.assert_close(computed[0], computed[1], rtol=1e-4, atol=1e-5)

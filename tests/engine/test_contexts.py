"""What the model made of the position before a prompt's last token: computed once, kept with the request, or in a slot
that is taken and given back with its blocks."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.contexts import Context, ContextSlots, pack, split
from engine.errors import PoisonBroken, UnknownRequest
from engine.request import Request
from protocol.context import ContextLayout, ContextName, ContextPart
from tests.engine.driving import greedy_request, model_engine, prefill_request, run
from tests.engine.recording import listening
from tests.engine.tiny_models import prompt_of
from tests.engine.traces import FAKE_CONTEXT, Harness
from tests.oracle import Oracle

BOTH: tuple[ContextName, ...] = ("hidden", "logits")
PROMPT = list(range(2, 40))


def seen(context: Context | None) -> list[float]:
    """Position, and tokens of the forward's row, as the fake device says them."""
    assert context is not None and context.hidden is not None and context.logits is None
    return context.hidden.tolist()


def slot_of(h: Harness, slot: int) -> list[float]:
    assert h.engine.context_memory is not None
    contexts = h.engine._cache.contexts
    assert contexts is not None
    return seen(contexts.read(slot))


# ---- prompts that run here ----


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("budget", "length"), [(64, 10), (9, 9), (8, 2), (1, 1)])
def test_the_chunk_that_computes_the_position_hands_it_over(asynchronous: bool, budget: int, length: int) -> None:
    h = Harness(tokens=budget, context_slots=2, asynchronous=asynchronous)
    request = h.add("A", 10, 3)
    h.run()
    assert seen(request.context) == [8.0, float(length)]
    assert h.engine.context_slots_free == 2, "no slot is needed for what stays here"


def test_a_prompt_of_one_token_has_none() -> None:
    h = Harness(context_slots=2)
    assert h.add("A", 1, 2).context is None
    assert h.run() and h.requests["A"].context is None


def test_it_can_be_asked_for_while_the_request_lives() -> None:
    h = Harness(context_slots=2)
    h.add("A", 5, 3)
    assert h.engine.context("A") is None
    h.step()
    assert seen(h.engine.context("A")) == [3.0, 5.0]
    h.run()
    with pytest.raises(UnknownRequest):
        h.engine.context("A")


def test_where_none_is_kept_no_row_wants_one() -> None:
    h = Harness()
    request = h.add("A", 5, 1)
    h.run()
    assert request.context is None and not any(b.has_contexts for b in h.runner.batches)
    assert h.engine.layout.context.parts == () and h.engine.context_memory is None


def test_forked_sequences_share_their_parents() -> None:
    h = Harness(context_slots=2, tokens=64)
    parent = h.make("A", 6, 2, n=3)
    h.engine.add(parent)
    h.step()
    contexts = [h.engine.context(name) for name in ("A", *parent.child_ids())]
    assert [seen(context) for context in contexts] == [[4.0, 5.0]] * 3
    h.run()
    assert sum(batch.has_contexts for batch in h.runner.batches) == 1


def test_a_request_that_starts_over_computes_it_once() -> None:
    h = Harness(num_blocks=4, tokens=16, context_slots=1)
    requests = [h.add(name, 5, 9) for name in "AB"]
    h.run()
    assert h.engine.counters.resets > 0
    assert [seen(request.context) for request in requests] == [[3.0, 5.0]] * 2
    assert sum(row.context >= 0 for batch in h.runner.batches for row in batch.rows) == 2


def test_a_cached_prefix_leaves_its_position_to_be_computed() -> None:
    h = Harness(sharing=True, context_slots=1)
    h.add("A", PROMPT[:9], 1)
    h.run()
    again = h.add("B", PROMPT[:9], 1)
    assert h.run() == "B5@4", "of the two cached blocks the second holds position 7"
    assert seen(again.context) == [7.0, 5.0]


# ---- prompts for others ----


def test_a_prefill_only_prompt_leaves_it_in_a_slot_until_it_is_released() -> None:
    h = Harness(tokens=8, context_slots=2)
    listener = listening(h)
    h.add_prefill("P", 12)
    h.step()
    assert h.engine.context_slots_free == 1, "taken with the blocks"
    (chunk,) = listener.announced[0]
    assert chunk.context_slot is not None
    h.run()
    assert slot_of(h, chunk.context_slot) == [11.0, 4.0]
    assert {c.context_slot for chunks in listener.announced for c in chunks} == {chunk.context_slot}
    h.engine.release("P")
    assert h.engine.context_slots_free == 2


def test_a_prompt_that_gets_no_slot_waits_for_one() -> None:
    h = Harness(context_slots=1)
    listening(h)
    h.add_prefill("P", 4)
    h.add_prefill("Q", 4)
    assert h.run() == "P4@0"
    assert (h.engine.waiting, h.blocks("Q")) == (1, 0)
    h.engine.release("P")
    assert h.run() == "Q4@0"


def test_of_a_cached_prompt_the_last_page_is_computed_again_into_a_block_of_its_own() -> None:
    h = Harness(sharing=True, context_slots=2)
    listener = listening(h)
    h.add_prefill("P", PROMPT[:8])
    h.run()
    shared = listener.announced[0][0].tables[0]
    h.add_prefill("Q", PROMPT[:8])
    assert h.run() == "Q4@4"
    table = listener.announced[1][0].tables[0]
    assert table[0] == shared[0] and table[1] != shared[1]


def test_an_aborted_prompt_keeps_its_slot_until_its_release() -> None:
    h = Harness(tokens=4, context_slots=1)
    listening(h)
    h.add_prefill("P", 8)
    h.step()
    h.engine.abort("P")
    assert h.engine.context_slots_free == 0
    h.engine.release("P")
    assert h.engine.context_slots_free == 1


# ---- prompts from others ----


def arrive(h: Harness, slot: int | None, *values: float) -> None:
    """As the network would write it."""
    assert slot is not None
    contexts = h.engine._cache.contexts
    assert contexts is not None
    contexts.write(slot, torch.tensor(values))


def test_what_has_come_goes_with_the_request_and_its_slot_is_free_at_once() -> None:
    h = Harness(context_slots=1)
    request = h.make("A", 9, 2)
    reservation = h.engine.reserve(request)
    assert h.engine.context_slots_free == 0 and not reservation.whole
    arrive(h, reservation.context_slot, 7.0, 77.0)
    h.engine.resume("A", computed=8)
    assert h.engine.context_slots_free == 1
    assert seen(h.engine.context("A")) == [7.0, 77.0]
    h.run()
    assert not any(batch.has_contexts for batch in h.runner.batches)
    assert seen(request.context) == [7.0, 77.0]


def test_sequences_of_a_prompt_from_elsewhere_share_it() -> None:
    h = Harness(context_slots=1)
    parent = h.make("A", 9, 2, n=3)
    arrive(h, h.engine.reserve(parent).context_slot, 7.0, 77.0)
    h.engine.resume("A", computed=8)
    assert [seen(h.engine.context(name)) for name in ("A", *parent.child_ids())] == [[7.0, 77.0]] * 3
    h.run()
    h.assert_at_rest()


def test_without_a_free_slot_nothing_is_reserved() -> None:
    h = Harness(context_slots=1)
    h.reserve("A", 9, 2)
    assert not h.can_reserve(4)
    h.engine.resume("A", computed=8)
    assert h.can_reserve(4)


def test_the_slot_of_a_failed_attempt_is_free_with_its_pages_and_not_before() -> None:
    h = Harness(context_slots=1)
    h.reserve("A", 9, 2)
    h.engine.quarantine("A")
    assert h.engine.context_slots_free == 0
    h.engine.check()
    h.engine.free_quarantined("A", 1)
    assert h.engine.context_slots_free == 1
    h.assert_at_rest()


def test_of_a_prompt_that_is_held_whole_the_position_is_computed_here() -> None:
    h = Harness(sharing=True, context_slots=1)
    h.add("A", PROMPT[:9], 1)
    h.run()
    request = h.make("B", 9, 1)
    request.prompt[:] = PROMPT[:9]
    reservation = h.engine.reserve(request)
    assert (reservation.whole, reservation.cached) == (True, 1)
    h.engine.resume("B", computed=4)
    assert h.run() == "B5@4"
    assert seen(request.context) == [7.0, 5.0]
    h.assert_at_rest()


# ---- the memory ----


def test_parts_come_out_as_they_went_in() -> None:
    layout = ContextLayout((ContextPart("logits", 12), ContextPart("hidden", 8)))
    hidden, logits = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0, 5.0]], dtype=torch.bfloat16)
    slots = ContextSlots(layout, 3)
    slot = slots.take()
    slots.write(slot, pack(layout, hidden, logits)[0])
    context = slots.read(slot)
    assert context.hidden is not None and context.logits is not None
    assert (context.hidden.tolist(), context.logits.tolist()) == ([1.0, 2.0], [3.0, 4.0, 5.0])
    assert split(FAKE_CONTEXT, torch.tensor([6.0, 7.0])).logits is None


def test_a_slot_that_was_written_to_while_free_is_found_out() -> None:
    slots = ContextSlots(FAKE_CONTEXT, 1, debug=True)
    slots.give_back(slots.take())
    slots.write(0, torch.tensor([0.0, 0.0]))
    with pytest.raises(PoisonBroken):
        slots.take()


# ---- real models ----


def expect_close(context: Context | None, oracle: Oracle, prompt: list[int]) -> None:
    assert context is not None and context.hidden is not None and context.logits is not None
    hidden, logits = oracle.context(prompt)
    torch.testing.assert_close(context.hidden, hidden, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(context.logits, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3-moe", "deepseek-v3"])
def test_it_is_what_transformers_says(tiny_kind: Callable[[str], Path], kind: str) -> None:
    """Gemma 2 bends its logits behind the head."""
    folder = tiny_kind(kind)
    oracle, engine = Oracle(folder), model_engine(folder, page_size=4, max_batch_tokens=8, context=BOTH)
    requests = [greedy_request(f"R{n}", prompt_of(n, seed=n), 2) for n in (2, 4, 5, 8, 9, 21)]
    for request in requests:
        engine.add(request)
    run(engine)
    for request in requests:
        expect_close(request.context, oracle, request.prompt)
    engine.close()


def test_a_model_without_a_head_keeps_hidden_states(tiny_llama: Path) -> None:
    engine, prompt = model_engine(tiny_llama, head=False, context=["hidden"]), prompt_of(20)
    request: Request = prefill_request("P", prompt)
    engine.add(request)
    run(engine)
    contexts = engine._cache.contexts
    assert contexts is not None and engine.layout.context == contexts.layout
    slot = engine._cache.slot(request.owner)
    assert slot is not None
    hidden, _ = Oracle(tiny_llama).context([*prompt, 0])
    torch.testing.assert_close(contexts.read(slot).hidden, hidden, atol=1e-4, rtol=1e-4)
    engine.close()

"""What is measured follows from a seed, and fits into the room that engines are told to have."""

import pytest

from bench.engine_cells import FULL, LARGEST_PAGE, QUICK, Phase, Plan, arrivals, prompts


def test_a_prompt_is_the_same_whatever_its_length_and_company() -> None:
    long, short = prompts([40, 40], seed=3), prompts([10, 20], seed=3)
    assert [short[0], short[1]] == [long[0][:10], long[1][:20]]
    assert long[0] != long[1] != prompts([40, 40], seed=4)[1]


@pytest.mark.parametrize("plan", [FULL, QUICK])
def test_every_decode_cell_finds_its_prompts_filled(plan: Plan) -> None:
    filled = plan.fill_lengths()
    for cell in plan.decode:
        assert all(filled[index] > cell.context for index in range(cell.batch))


@pytest.mark.parametrize("plan", [FULL, QUICK])
def test_there_is_room_for_what_is_filled_in_whole_pages(plan: Plan) -> None:
    assert plan.cache_tokens % LARGEST_PAGE == 0
    assert plan.cache_tokens >= sum(plan.fill_lengths()) + plan.max_context


def test_decodes_come_first_and_never_ask_for_more_than_those_before() -> None:
    phases = [cell.phase for cell in FULL.cells]
    assert phases == sorted(phases, key=list(dict.fromkeys((Phase.DECODE, Phase.PREFILL, Phase.MIXED))).index)
    contexts = [cell.context for cell in FULL.cells if cell.phase is Phase.DECODE]
    assert contexts == sorted(contexts, reverse=True)


def test_the_issue_s_cells_are_all_there() -> None:
    decode = {(cell.batch, cell.context) for cell in FULL.decode}
    assert decode == {(batch, context) for batch in (1, 8, 32) for context in (512, 1024)}
    assert [cell.context for cell in FULL.prefill] == [512, 2048]


def test_arrivals_are_seeded_ordered_and_within_their_bounds() -> None:
    load = FULL.load
    one = arrivals(load, seed=1)
    assert one == arrivals(load, seed=1) != arrivals(load, seed=2)
    assert len(one) == load.requests and one[0].at == 0.0
    assert [a.at for a in one] == sorted(a.at for a in one)
    assert all(load.prompt[0] <= len(a.prompt) <= load.prompt[1] for a in one)
    assert all(load.new[0] <= a.new <= load.new[1] for a in one)

"""P16: several choices of one request over one transfer, by real nodes: they say what the engine alone says."""

from pathlib import Path

import pytest

from engine.request import Request
from protocol.messages import FinishReason, RequestEnded
from protocol.sampling import SamplingParams
from tests.engine.driving import model_engine, run
from tests.nodes.conftest import open_named
from tests.nodes.pair import Cluster, Shape
from tests.nodes.prompts import END, NEW_TOKENS, prompt_of
from tests.nodes.router_stub import Answer
from tests.oracle import Oracle

N = 3
LAYERS = 3
PAGE = 16
DRAWN = SamplingParams(max_new_tokens=12, temperature=0.9, seed=5)
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS)
LENGTHS = [2, PAGE + 1, 40, 70]


def alone(model: Path, prompts: list[list[int]], n: int = N) -> list[list[list[int]]]:
    """The choices of each prompt, by one engine without any node."""
    engine = model_engine(model, page_size=PAGE)
    requests = [Request(f"r{i}", prompt, DRAWN, n=n) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    tokens = run(engine).tokens
    engine.close()
    return [[tokens[name] for name in (request.id, *request.child_ids())] for request in requests]


def outputs(answer: Answer, n: int = N) -> list[list[int]]:
    """Of all choices, once they have ended: each said how, but for the last."""
    assert answer.result().failure is None
    assert len(answer.reasons) == n - 1
    return [answer.outputs[choice] for choice in range(n)]


def reason_of(tokens: list[int]) -> FinishReason:
    return FinishReason.STOP if tokens[-1] == END else FinishReason.LENGTH


def test_eight_requests_of_three_choices_at_once_move_each_prompt_once(
    tiny_model: Path, oracle: Oracle, seed: int
) -> None:
    prompts = [prompt_of(length, seed) for length in LENGTHS]
    with Cluster(tiny_model, open_named("reordering", seed), Shape(page_size=PAGE)).start() as cluster:
        asked = [cluster.router.ask(prompt, sampling, n=N)[1] for sampling in (DRAWN, GREEDY) for prompt in prompts]
        drawn, greedy = asked[: len(prompts)], asked[len(prompts) :]
        assert [outputs(answer) for answer in drawn] == alone(tiny_model, prompts)
        assert [outputs(answer) for answer in greedy] == [[oracle.greedy(prompt, NEW_TOKENS)] * N for prompt in prompts]
        cluster.wait_pages_returned()
        cluster.wait_at_rest()
        expect_one_transfer_each(cluster, prompts * 2, [answer.result() for answer in asked])
    for answer in asked:
        for choice, reason in answer.reasons.items():
            assert reason is reason_of(answer.outputs[choice])


def expect_one_transfer_each(cluster: Cluster, prompts: list[list[int]], ends: list[RequestEnded]) -> None:
    """By what arrived, and by what the prefill node computed. Its cache and the decode node's spare some of either."""
    written = sum(end.ledger.writes for end in ends)
    assert written <= sum(-(-(len(prompt) - 1) // PAGE) * LAYERS for prompt in prompts)
    (prefill,), (decode,) = cluster.engines["prefill-0"], cluster.engines["decode-0"]
    assert prefill.counters.prompt_tokens <= sum(len(prompt) - 1 for prompt in prompts)
    assert decode.counters.forks == (N - 1) * len(prompts)
    assert decode.counters.prompt_tokens == 0, "children that were forked run their last token as a decode step"


@pytest.mark.parametrize("local", [False, True])
def test_a_prompt_of_one_token_and_one_that_runs_locally(tiny_model: Path, local: bool, seed: int) -> None:
    prompts = [prompt_of(length, seed) for length in ((1, 40) if local else (1,))]
    with Cluster(tiny_model, open_named("net"), Shape()).start(prefill=0 if local else 1, local=local) as cluster:
        asked = [cluster.router.ask(prompt, DRAWN, n=N)[1] for prompt in prompts]
        assert [outputs(answer) for answer in asked] == alone(tiny_model, prompts)
        assert all(answer.result().ledger.writes == 0 for answer in asked)
        cluster.wait_pages_returned()


def test_where_not_all_fit_they_take_turns_and_say_the_same(tiny_model: Path, seed: int) -> None:
    """A pool of 8 pages; one prompt of 3, and 5 choices that each grow by a page."""
    prompt = prompt_of(2 * PAGE + 9, seed)
    shape = Shape(decode_blocks=8, num_blocks=8)
    with Cluster(tiny_model, open_named("net"), shape).start() as cluster:
        _, answer = cluster.router.ask(prompt, DRAWN, n=5)
        assert outputs(answer, 5) == alone(tiny_model, [prompt], 5)[0]
        assert answer.result().ledger.writes == 3 * LAYERS
        cluster.wait_pages_returned()


def test_pages_of_other_sizes_on_the_decode_side_are_forked_alike(tiny_model: Path, seed: int) -> None:
    prompt = prompt_of(40, seed)
    with Cluster(tiny_model, open_named("net"), Shape(page_size=PAGE)) as cluster:
        cluster.add_prefill()
        cluster.add_decode(shape=Shape(page_size=4))
        cluster.router.wait_for(lambda nodes: len(nodes) == 2 and all(node.ready for node in nodes.values()))
        _, answer = cluster.router.ask(prompt, DRAWN, n=N)
        assert outputs(answer) == alone(tiny_model, [prompt])[0]
        cluster.wait_pages_returned()

"""SmolLM2-135M: real prompts across page and chunk edges, disaggregated, alone, and by transformers' own `generate`."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from protocol.messages import FinishReason, RequestEnded
from protocol.sampling import SamplingParams
from tests.nodes.conftest import open_named
from tests.nodes.crossing import HELD, Crossing, Facts, start_nodes
from tests.nodes.pair import Cluster, Shape
from tests.oracle import Oracle

NEW_TOKENS = 6
PAGE, CHUNK = 32, 64
LAYERS = 30
PAGE_BYTES = 3 * 2 * PAGE * 64 * 4
"""3 KV heads of 64 in float32, K and V."""
SHAPE = Shape(page_size=PAGE, num_blocks=64, max_batch_tokens=CHUNK)

QUESTIONS = [
    "Hi",
    "What is the capital of France?",
    "Übersetze: »Schöne Grüße aus Köln« 🌍",
    "请用一句话介绍长城。",
    "Name three fruits that are red, and one that never is.",
    "def fibonacci(n):",
    "Why is the sky blue? Explain it to a child in two sentences, without the word 'light'.",
    "😀😀😀 what do these faces mean? ありがとう",
]
FILLER = "The ferry crosses the river every morning, and the old captain counts the boats. "


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    """Chat prompts as a client's would arrive, and texts cut to lengths at the edges of page and chunk."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    chats: list[list[int]] = [
        tokenizer.apply_chat_template(  # type: ignore[misc]
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    long = tokenizer(FILLER * 40)["input_ids"]
    edges = [1, PAGE, PAGE + 1, CHUNK, CHUNK + 1, CHUNK + 2, 3 * CHUNK + 17]
    return chats + [long[:length] for length in edges]


@pytest.fixture(scope="module")
def expected(model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    oracle = Oracle(model_dir)
    return [oracle.greedy(prompt, NEW_TOKENS) for prompt in prompts]


def answers(cluster: Cluster, prompts: list[list[int]]) -> list[tuple[list[int], RequestEnded]]:
    asked = [cluster.router.ask(prompt, SamplingParams(max_new_tokens=NEW_TOKENS))[1] for prompt in prompts]
    ended = [answer.result() for answer in asked]
    cluster.wait_pages_returned()
    return [(answer.tokens, end) for answer, end in zip(asked, ended, strict=True)]


@pytest.fixture(scope="module")
def disaggregated(model_dir: Path) -> Iterator[Cluster]:
    with Cluster(model_dir, open_named("net"), SHAPE).start() as cluster:
        yield cluster


def expect(cluster: Cluster, prompts: list[list[int]], expected: list[list[int]]) -> None:
    given = answers(cluster, prompts)
    assert [tokens for tokens, _ in given] == expected
    assert {end.reason for _, end in given} <= {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.model
@pytest.mark.timeout(300)
def test_tokens_of_two_nodes_equal_generates(
    disaggregated: Cluster, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    expect(disaggregated, prompts, expected)


@pytest.mark.model
@pytest.mark.timeout(300)
def test_tokens_of_one_node_alone_equal_generates(
    model_dir: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with Cluster(model_dir, open_named("net"), SHAPE).start(prefill=0, local=True) as cluster:
        expect(cluster, prompts, expected)


@pytest.mark.model
@pytest.mark.timeout(300)
def test_layers_leave_while_the_last_chunk_still_computes(disaggregated: Cluster, prompts: list[list[int]]) -> None:
    """At least 80 % of the last chunk's writes are posted before its forward ends, by the recorded timeline. (How the
    durations of a ledger come about is tests/nodes/test_job.py's matter.)"""
    answers(disaggregated, prompts[:1])
    unseen = prompts[-1][::-1]
    ((_, end),) = answers(disaggregated, [unseen])
    ledger, tokens = end.ledger, len(prompts[-1]) - 1
    assert ledger.prefill_chunks == -(-tokens // CHUNK) == 4
    assert ledger.writes == -(-tokens // PAGE) * LAYERS and ledger.bytes == ledger.writes * PAGE_BYTES
    assert ledger.last_chunk_writes == -(-(tokens % CHUNK) // PAGE) * LAYERS
    assert ledger.early_writes >= 0.8 * ledger.last_chunk_writes > 0


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fabric", ["net", "reordering"])
def test_from_one_rank_or_three_with_small_pages_or_large(model_dir: Path, fabric: str, seed: int) -> None:
    """Its 3 KV heads, on one rank and on three, pages of 16 and of 64, with parts of the prompts held beforehand."""
    tokenizer, oracle = AutoTokenizer.from_pretrained(model_dir), Oracle(model_dir)
    one_small, one_large, three_small, three_large = (
        Shape(page, 3072 // page, CHUNK, tp=tp) for tp in (1, 3) for page in (16, 64)
    )
    chapters = itertools.count(seed)

    def chapter(length: int) -> list[int]:
        """Equal to no other, from its first page on."""
        return list(tokenizer(f"Chapter {next(chapters)}. {FILLER * 15}")["input_ids"][:length])

    with start_nodes(
        model_dir, open_named(fabric, seed), [one_small, three_large], [one_large, three_small]
    ) as cluster:
        for source, target in itertools.product((0, 1), (0, 1)):
            crossing = Crossing(cluster, oracle, Facts(LAYERS, heads=3), source, target)
            crossing.expect_all([chapter(length) for length in (17, PAGE + 1, CHUNK + 2)])
            for case in ("decode", "prefill", "both", "both, decode more"):
                crossing.expect_lacking(HELD[case], chapter(HELD[case].length))

"""SmolLM2-135M: real prompts across page and chunk edges, disaggregated, alone, and by transformers' own `generate`."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from protocol.messages import FinishReason, RequestEnded
from protocol.sampling import SamplingParams
from tests.nodes.conftest import Oracle, open_named
from tests.nodes.pair import Cluster, Shape

NEW_TOKENS = 12
PAGE, CHUNK = 64, 128
LAYERS = 30

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


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.parametrize("prefill", [1, 0], ids=["disaggregated", "alone"])
def test_tokens_equal_generates(
    model_dir: Path, prompts: list[list[int]], expected: list[list[int]], prefill: int
) -> None:
    shape = Shape(page_size=PAGE, num_blocks=48, max_batch_tokens=CHUNK)
    with Cluster(model_dir, open_named("net"), shape).start(prefill=prefill, local=not prefill) as cluster:
        given = answers(cluster, prompts)
    assert [tokens for tokens, _ in given] == expected
    assert {end.reason for _, end in given} <= {FinishReason.STOP, FinishReason.LENGTH}


@pytest.mark.model
@pytest.mark.timeout(300)
def test_layers_leave_while_the_last_chunk_still_computes(model_dir: Path, prompts: list[list[int]]) -> None:
    """At least 80 % of the last chunk's writes are posted before its forward ends, by the recorded timeline."""
    shape = Shape(page_size=PAGE, num_blocks=48, max_batch_tokens=CHUNK)
    with Cluster(model_dir, open_named("net"), shape).start() as cluster:
        answers(cluster, prompts[:1])
        ((_, end),) = answers(cluster, prompts[-1:])
    ledger = end.ledger
    pages = -(-(len(prompts[-1]) - 1) // PAGE)
    assert ledger.prefill_chunks == 4 and ledger.writes == pages * LAYERS
    assert ledger.early_writes >= 0.8 * ledger.last_chunk_writes > 0
    waited = ledger.queue_s + ledger.prefill_s + ledger.exposed_transfer_s
    assert 0 <= ledger.exposed_transfer_s < waited

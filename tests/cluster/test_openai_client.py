"""The unmodified `openai` client, and the answers of transformers' greedy `generate`."""

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionStreamOptionsParam

from tests.cluster.harness import MODEL, ProcessCluster
from tests.cluster.oracle import Oracle
from tests.cluster.serving import expect_both_serve

LONG = "a prompt of more than one prefill chunk, in which each page must arrive; " * 4
PROMPTS = ["Hi", "é", "日本語のテキスト 🙂", LONG]
"""One is a single page, one a few bytes of a character each, one several chunks."""
TOKENS = 24


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "one character", "unicode", "long"])
def test_a_chat_answers_as_the_oracle_does_streaming_and_not(
    client: openai.OpenAI, oracle: Oracle, prompt: str
) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": prompt},
    ]
    expected = oracle.chat([{"role": str(m["role"]), "content": str(m["content"])} for m in messages], TOKENS)
    create = client.chat.completions.create
    whole = create(model=MODEL, messages=messages, temperature=0, max_tokens=TOKENS)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (expected.prompt_tokens, TOKENS)
    usage: ChatCompletionStreamOptionsParam = {"include_usage": True}
    chunks = list(
        create(model=MODEL, messages=messages, temperature=0, max_tokens=TOKENS, stream=True, stream_options=usage)
    )
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == expected.text
    assert chunks[-1].usage == whole.usage
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["length"]


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "one character", "unicode", "long"])
def test_a_completion_answers_as_the_oracle_does_streaming_and_not(
    client: openai.OpenAI, oracle: Oracle, prompt: str
) -> None:
    expected = oracle.completion(prompt, TOKENS)
    create = client.completions.create
    whole = create(model=MODEL, prompt=prompt, temperature=0, max_tokens=TOKENS)
    assert whole.choices[0].text == expected.text
    chunks = create(model=MODEL, prompt=prompt, temperature=0, max_tokens=TOKENS, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text


def test_the_model_list_names_the_served_model(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_both_decode_nodes_serve(cluster: ProcessCluster, oracle: Oracle) -> None:
    expect_both_serve(cluster, oracle)

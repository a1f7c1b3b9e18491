"""The unmodified `openai` client against the router."""

from collections.abc import Iterator

import openai
import pytest

from tests.router.conftest import REPLY
from tests.router.fake_node import FakeNode
from tests.router.running_router import RunningRouter


@pytest.fixture
def client(router: RunningRouter) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="unused", max_retries=0, timeout=10) as client:
        yield client


def test_chat(client: openai.OpenAI, node: FakeNode) -> None:
    answer = client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}])
    assert answer.choices[0].message.content == REPLY
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.total_tokens > 0


def test_streaming_chat(client: openai.OpenAI, node: FakeNode) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == REPLY
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None


def test_completion_and_streaming_completion(client: openai.OpenAI, node: FakeNode) -> None:
    assert client.completions.create(model="tiny", prompt="Hi").choices[0].text == REPLY
    chunks = client.completions.create(model="tiny", prompt="Hi", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == REPLY


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_errors_arrive_as_the_clients_own_exceptions(client: openai.OpenAI, node: FakeNode) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="Hi")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as invalid:
        client.completions.create(model="tiny", prompt="Hi", temperature=3)
    assert invalid.value.param == "temperature"


def test_a_request_id_comes_back_and_stays_a_name(client: openai.OpenAI, node: FakeNode) -> None:
    raw = client.completions.with_raw_response.create(
        model="tiny", prompt="Hi", extra_headers={"X-Request-Id": "mine-" + "x" * 200}
    )
    assert raw.headers["x-request-id"] == "mine-" + "x" * 200
    assert node.requests[0].public_id == "mine-" + "x" * 200
    assert len(node.requests[0].request) == 32 and "mine" not in node.requests[0].request

"""The launcher with the real roles, on a tiny random model: what `kvferry up` does, and an unmodified openai client."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from deploy.cluster_api import ClusterApi
from deploy.cluster_spec import ClusterSpec
from deploy.leftovers import footprint, leftovers, shm_entries
from deploy.local import ClusterFailed, LocalCluster
from tests.tiny_model import save_tiny_model

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def ignore(line: str) -> None:
    """Progress is not looked at here."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """At its end nobody had to be killed, and nothing is left behind."""
    shm = shm_entries()
    spec = ClusterSpec(model, decode=1, port=0, page_size=16, max_batch_tokens=64)
    with LocalCluster(spec, tmp_path_factory.mktemp("run"), ignore) as running:
        yield running
        seen = footprint([child.id.pid for child in running.children], shm)
        assert seen.ports
        assert running.stop() == []
    assert leftovers(seen) == []


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.endpoint}/v1", api_key="unused", timeout=60, max_retries=0) as client:
        yield client


def test_the_openai_client_gets_the_same_answer_streaming_and_not(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    question = "a question that takes more than one prefill chunk " * 3
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": question}]
    create = client.chat.completions.create
    whole = create(model=model, messages=messages, temperature=0, max_tokens=12)
    chunks = list(create(model=model, messages=messages, temperature=0, max_tokens=12, stream=True))
    streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.prompt_tokens > 128


def test_every_node_reports_its_provider_and_its_pages(cluster: LocalCluster) -> None:
    with ClusterApi(cluster.endpoint) as api:
        members = api.members()
    assert sorted(member.role for member in members) == ["decode", "prefill"]
    assert all(member.provider and member.pages_total > 0 for member in members)


def test_a_model_that_cannot_be_served_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "tiny")
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config.replace('"model_type": "llama"', '"model_type": "gpt2"'))
    spec = ClusterSpec(model, prefill=0, decode=1, port=0, local_prefill=True)
    cluster = LocalCluster(spec, tmp_path / "run", ignore)
    with pytest.raises(ClusterFailed, match="its family is not one of"):
        cluster.start()

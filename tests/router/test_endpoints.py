"""What a client gets from the generating endpoints when all goes well."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol.curve import ClusterKey
from protocol.gates import GateClient
from protocol.messages import FinishReason
from protocol.sampling import SamplingParams
from tests.router.conftest import REPLY
from tests.router.fake_node import FakeNode, answer, tokens_then_nothing
from tests.router.running_router import RunningRouter
from tests.router.streaming import DONE, open_stream

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": "Hi"}


def stream(router: RunningRouter, path: str, body: dict[str, Any], **headers: str) -> list[str]:
    """The data of each event."""
    answer = router.http.post(path, json={**body, "stream": True}, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]


def test_chat_answers_with_the_nodes_tokens_as_text(router: RunningRouter, node: FakeNode) -> None:
    answer = router.http.post("/v1/chat/completions", json=CHAT).json()
    choice = answer["choices"][0]
    assert choice["message"]["content"] == REPLY
    assert choice["finish_reason"] == "stop"
    prompt = node.requests[0].prompt
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == len(router.tokenizer.encode(REPLY)) + 1


def test_the_prompt_is_the_chat_template_rendered_and_encoded(router: RunningRouter, node: FakeNode) -> None:
    router.http.post("/v1/chat/completions", json=CHAT)
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert node.requests[0].prompt == router.tokenizer.encode(rendered)


@pytest.mark.parametrize("prompt", ["Hi there", ["Hi there"]])
def test_completion_takes_text(router: RunningRouter, node: FakeNode, prompt: object) -> None:
    answer = router.http.post("/v1/completions", json={**COMPLETION, "prompt": prompt}).json()
    assert answer["choices"][0]["text"] == REPLY
    assert node.requests[0].prompt == router.tokenizer.encode("Hi there")


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
def test_completion_takes_token_ids(router: RunningRouter, node: FakeNode, prompt: object) -> None:
    assert router.http.post("/v1/completions", json={**COMPLETION, "prompt": prompt}).status_code == 200
    assert node.requests[0].prompt == [5, 6, 7]


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_a_stream_joins_to_the_same_text_and_ends_with_done(
    router: RunningRouter, node: FakeNode, path: str, body: dict[str, Any]
) -> None:
    *chunks, done = stream(router, path, {**body, "stream_options": {"include_usage": True}})
    parsed = [json.loads(chunk) for chunk in chunks]
    texts = [
        choice.get("text") or choice.get("delta", {}).get("content") or "" for c in parsed for choice in c["choices"]
    ]
    assert "".join(texts) == REPLY
    assert done == "[DONE]"
    assert parsed[-2]["choices"][0]["finish_reason"] == "stop"
    assert parsed[-1]["choices"] == [] and parsed[-1]["usage"]["completion_tokens"] > 0
    assert all(chunk["usage"] is None for chunk in parsed[:-1])


def test_no_chunk_holds_half_a_character(router: RunningRouter, node: FakeNode) -> None:
    chunks = [json.loads(chunk) for chunk in stream(router, "/v1/completions", COMPLETION)[:-1]]
    assert len(chunks) > 5
    assert not any("\ufffd" in chunk["choices"][0]["text"] for chunk in chunks)


def test_the_token_limit_ends_with_length(router: RunningRouter, node: FakeNode) -> None:
    answer = router.http.post("/v1/completions", json={**COMPLETION, "max_tokens": 3}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


def test_sampling_fields_reach_the_node_with_openais_defaults(router: RunningRouter, node: FakeNode) -> None:
    router.http.post("/v1/completions", json=COMPLETION)
    chosen = {"temperature": 0, "top_p": 0.5, "seed": -1, "max_tokens": 9, "ignore_eos": True}
    router.http.post("/v1/completions", json={**COMPLETION, **chosen})
    default, set_by_client = (request.sampling for request in node.requests)
    assert (default.temperature, default.top_p, default.seed, default.ignore_eos) == (1.0, 1.0, None, False)
    assert (set_by_client.temperature, set_by_client.top_p, set_by_client.ignore_eos) == (0.0, 0.5, True)
    assert set_by_client.seed == (1 << 63) - 1
    assert set_by_client.max_new_tokens == 9


VLLM_FIELDS: dict[str, Any] = {
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.2,
    "min_tokens": 2,
    "stop_token_ids": [7, 8],
}
PENALTIES: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": -0.5}


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_vllms_fields_penalties_and_biases_reach_the_node(
    router: RunningRouter, node: FakeNode, path: str, body: dict[str, Any]
) -> None:
    wishes = {**VLLM_FIELDS, **PENALTIES, "logit_bias": {"5": -100, "11": 1.5}, "seed": 4, "max_tokens": 30}
    assert router.http.post(path, json={**body, **wishes}).status_code == 200
    sent = node.requests[0].sampling
    assert sent == SamplingParams(
        **{**VLLM_FIELDS, "stop_token_ids": (7, 8)},
        **PENALTIES,
        logit_bias=((5, -100.0), (11, 1.5)),
        seed=4,
        temperature=1.0,
        max_new_tokens=30,
    )


def test_what_says_off_in_its_own_way_is_off(router: RunningRouter, node: FakeNode) -> None:
    off = {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "logit_bias": {}, "min_tokens": 0}
    router.http.post("/v1/completions", json={**COMPLETION, **off, "stop_token_ids": [], "max_tokens": 3})
    router.http.post("/v1/completions", json={**COMPLETION, **dict.fromkeys(off), "max_tokens": 3})
    plain = SamplingParams(max_new_tokens=3, temperature=1.0)
    assert [request.sampling for request in node.requests] == [plain, plain]


def test_a_stop_token_ends_the_output_and_is_not_shown(router: RunningRouter, node: FakeNode) -> None:
    reply, stop = router.tokenizer.encode("Hello"), router.tokenizer.encode("!")[0]
    node.script = answer(reply, stop)
    said = router.http.post("/v1/completions", json={**COMPLETION, "stop_token_ids": [stop]}).json()
    assert said["choices"][0] == {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}
    assert said["usage"]["completion_tokens"] == len(reply) + 1


def test_without_a_limit_the_rest_of_the_context_is_the_limit(router: RunningRouter, node: FakeNode) -> None:
    router.http.post("/v1/completions", json={**COMPLETION, "prompt": [5] * 500})
    assert node.requests[0].sampling.max_new_tokens == 12


def test_a_stop_string_ends_the_text_before_it_and_aborts_the_node(router: RunningRouter, node: FakeNode) -> None:
    node.script = tokens_then_nothing(router.tokenizer.encode(REPLY))
    answer = router.http.post("/v1/completions", json={**COMPLETION, "stop": ["wö", "never"]}).json()
    assert answer["choices"][0]["text"] == "Hello "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert node.was_aborted(node.requests[0].request)


def test_the_ledger_comes_only_when_asked_for(router: RunningRouter, node: FakeNode) -> None:
    plain = router.http.post("/v1/completions", json=COMPLETION).json()
    asked = router.http.post("/v1/completions", json=COMPLETION, headers={"X-Kvferry-Ledger": "1"}).json()
    assert "kvferry" not in plain
    ledger = asked["kvferry"]
    parts = ("router_queue_s", "queue_s", "prefill_s", "exposed_transfer_s", "first_step_s", "other_s")
    assert ledger["ttft_s"] == pytest.approx(sum(ledger[part] for part in parts))
    assert ledger["decode_node"] == node.status.name and ledger["writes"] == 7
    assert ledger["request"] == node.requests[1].request


def test_the_ledger_of_a_stream_is_in_its_last_text_chunk(router: RunningRouter, node: FakeNode) -> None:
    chunks = stream(router, "/v1/chat/completions", CHAT, **{"X-Kvferry-Ledger": "1"})
    assert "kvferry" in json.loads(chunks[-2])
    assert not any("kvferry" in chunk for chunk in chunks[:-2])


def test_models_are_listed_and_found_by_name(router: RunningRouter) -> None:
    assert [model["id"] for model in router.http.get("/v1/models").json()["data"]] == ["tiny"]
    assert router.http.get("/v1/models/tiny").json()["id"] == "tiny"
    assert router.http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_a_request_stopped_by_a_string_still_gets_its_nodes_ledger(router: RunningRouter, node: FakeNode) -> None:
    node.script = tokens_then_nothing(router.tokenizer.encode(REPLY))
    body = {**COMPLETION, "stop": "wö"}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(router.http.post, "/v1/completions", json=body, headers={"X-Kvferry-Ledger": "1"})
        assert node.was_asked() and node.was_aborted(node.requests[0].request)
        node.end(node.requests[0], FinishReason.CANCELLED)
        assert asked.result(10).json()["kvferry"]["writes"] == 7


@pytest.mark.parametrize("name", ["with-dashes-" + "x" * 200, "äöü-🙂"])
def test_the_clients_request_id_is_echoed_and_never_the_key(router: RunningRouter, node: FakeNode, name: str) -> None:
    headers = httpx.Headers({b"x-request-id": name.encode()})
    answer = router.http.post("/v1/completions", json=COMPLETION, headers=headers)
    assert dict(answer.headers.raw)[b"x-request-id"].decode() == name
    assert node.requests[0].public_id == name
    assert answer.json()["id"] == f"cmpl-{node.requests[0].request}"


def test_a_gate_holds_a_stream_after_its_nth_token(model_folder: Path, key: ClusterKey, tmp_path: Path) -> None:
    gates = str(tmp_path / "gates")
    with RunningRouter(model_folder, key, test_gates=gates) as router, closing(GateClient(gates)) as client:
        client.hold("stream:tok=2")
        router.node(answer(router.tokenizer.encode("abc")))
        with open_stream(router) as events:
            assert events.next_text() and events.next_text()
            assert client.reached("stream:tok=2", 10)
            client.release("stream:tok=2")
            assert events.rest()[-1] == DONE

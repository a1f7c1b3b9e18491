"""How nodes join, are paired, and are kept out; what happens to frames that make no sense."""

import random
from typing import Any

import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from protocol import PROTOCOL_VERSION
from protocol.context import ContextLayout, ContextPart
from protocol.curve import new_cluster_key
from protocol.messages import Abort, DecodeRequest, FinishReason, Nack, Role, TokenDelta, TokenDeltas
from tests.router.conftest import REPLY, end_token
from tests.router.fake_node import FakeNode, answer, stall
from tests.router.running_router import RunningRouter

BODY = {"model": "tiny", "prompt": "Hi"}
DROPPED = "kvferry_router_frames_dropped_total"
SEED = 20261130


def prefill(router: RunningRouter, name: str, **status: Any) -> FakeNode:
    address = f"tcp://prefill/{name}"
    return router.node(stall, name, role=Role.PREFILL, local_prefill=False, control_address=address, **status)


def decode(router: RunningRouter, **status: Any) -> FakeNode:
    script = answer(router.tokenizer.encode(REPLY), end_token(router))
    return router.node(script, **{"local_prefill": False, **status})


def test_a_request_carries_the_compatible_prefill_nodes_best_first(router: RunningRouter) -> None:
    prefill(router, "busy", waiting=3)
    prefill(router, "other", compatibility="other")
    prefill(router, "idle")
    prefill(router, "stopping", draining=True)
    prefill(router, "loading", ready=False)
    node = decode(router)
    assert router.http.post("/v1/completions", json=BODY).status_code == 200
    assert [one.name for one in node.requests[0].prefills] == ["idle", "busy"]
    assert node.requests[0].prefills[0].address == "tcp://prefill/idle"


def test_incompatible_nodes_are_never_paired(router: RunningRouter) -> None:
    prefill(router, "of-another-layout", compatibility="other")
    node = decode(router)
    assert router.http.post("/v1/completions", json=BODY).status_code == 503
    assert router.http.get("/ready").status_code == 503
    prefill(router, "of-this-layout")
    assert router.http.post("/v1/completions", json=BODY).status_code == 200
    assert [one.name for one in node.requests[0].prefills] == ["of-this-layout"]


def test_a_decode_node_that_no_prefill_node_goes_with_takes_no_request_and_says_why(
    router: RunningRouter, caplog: pytest.LogCaptureFixture
) -> None:
    prefill(router, "p0")
    picky = decode(router, context=ContextLayout((ContextPart("hidden", 8),)))
    fitting = decode(router, running=9)
    assert router.http.post("/v1/completions", json=BODY).status_code == 200
    assert not picky.requests and len(fitting.requests) == 1
    shown = router.members()
    assert shown[picky.status.name]["ready"] is False and "p0" in shown[picky.status.name]["refusal"]
    assert all(shown[name]["ready"] and shown[name]["refusal"] is None for name in ("p0", fitting.status.name))
    (warning,) = [record for record in caplog.records if record.getMessage() == "nodes do not go together"]
    said = vars(warning)["fields"]
    assert (said["prefill"], said["decode"], said["others"]) == ("p0", picky.status.name, 0)
    assert "--context hidden" in said["reason"]


def test_where_no_two_nodes_go_together_clients_are_not_told_to_wait(router: RunningRouter) -> None:
    decode(router, name="d0")
    waiting = router.http.post("/v1/completions", json=BODY).json()["error"]["message"]
    assert "try again" in waiting, "a prefill node may come"
    prefill(router, "p0", compatibility="other", dtype="bfloat16")
    refused = router.http.post("/v1/completions", json=BODY)
    message = refused.json()["error"]["message"]
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_capacity"
    assert "try again" not in message
    assert all(word in message for word in ("d0", "p0", "bfloat16", "float32", "--dtype"))


def test_a_node_with_another_tokenizer_is_refused_with_the_reason(router: RunningRouter) -> None:
    node = router.node(stall, tokenizer="of-another-model")
    refusal = node.acks[0].refusal
    assert refusal is not None and "tokenizer" in refusal
    assert router.http.post("/v1/completions", json=BODY).status_code == 503
    shown = router.members()[node.status.name]
    assert shown["refusal"] == refusal and shown["ready"] is False


def test_a_node_of_another_protocol_version_is_told_so_and_never_asked(router: RunningRouter) -> None:
    node = router.node(stall, protocol_version=PROTOCOL_VERSION + 1)
    refusal = node.acks[0].refusal
    assert refusal is not None and "protocol version" in refusal
    assert router.http.post("/v1/completions", json=BODY).status_code == 503
    assert router.members()[node.status.name]["refusal"] == refusal
    assert not node.requests


def test_a_status_that_cannot_be_read_is_answered_with_nack(router: RunningRouter) -> None:
    node = router.node(stall)
    later = msgspec.to_builtins(node.status) | {"field_of_a_later_version": 1}
    node.say_bytes(msgspec.msgpack.encode(later))
    assert node.wait_for(lambda node: bool(node.of(Nack)))
    assert "field_of_a_later_version" in node.of(Nack)[0].failure.message


def test_a_draining_node_gets_nothing_new(router: RunningRouter) -> None:
    leaving = router.node(stall)
    leaving.announce(draining=True)
    assert router.eventually(lambda: not router.members()[leaving.status.name]["ready"])
    assert router.http.post("/v1/completions", json=BODY).status_code == 503
    assert not leaving.requests


def test_the_smallest_context_of_the_nodes_in_use_is_the_limit(router: RunningRouter) -> None:
    decode(router, local_prefill=True, max_context=100)
    response = router.http.post("/v1/completions", json={**BODY, "prompt": [5] * 100})
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "100 tokens here, as the nodes' KV cache (--num-blocks times --page-size)" in error["message"]


def test_a_replaced_instance_is_told_so(router: RunningRouter) -> None:
    old = router.node(stall)
    router.node(stall, status_address=old.status.status_address)
    assert old.wait_for(lambda node: any(ack.refusal and "replaced" in ack.refusal for ack in node.acks))
    assert old.status.name not in router.members()


def test_every_ack_names_the_same_router_instance(router: RunningRouter) -> None:
    one, two = router.node(stall), router.node(stall)
    assert one.acks[0].router_instance == two.acks[0].router_instance


def test_cluster_shows_what_operators_need(router: RunningRouter) -> None:
    node = decode(router, local_prefill=True, pages_free=60, pages_quarantined=1)
    shown = router.members()[node.status.name]
    assert shown["role"] == "decode" and shown["ready"] is True and shown["refusal"] is None
    assert (shown["pages_total"], shown["pages_free"], shown["pages_quarantined"]) == (64, 60, 1)
    assert shown["instance"] == node.instance and shown["provider"] == "net"


def test_tokens_for_an_unknown_request_are_dropped_counted_and_answered_with_abort(router: RunningRouter) -> None:
    node = router.node(stall)
    node.say(TokenDelta(request="nobody's", index=0, tokens=[5]))
    assert node.was_aborted("nobody's")
    assert router.metric(DROPPED, '{reason="unknown_request"}') == 1


def test_tokens_that_share_a_frame_count_one_by_one(router: RunningRouter) -> None:
    def answer_at_once(node: FakeNode, request: DecodeRequest) -> None:
        tokens = enumerate(router.tokenizer.encode(REPLY))
        deltas = [TokenDelta(request=request.request, index=index, tokens=[token]) for index, token in tokens]
        stray = TokenDelta(request="nobody's", index=0, tokens=[5])
        node.say(TokenDeltas(deltas=[*deltas[:1], stray, *deltas[1:]]))
        node.end(request, FinishReason.LENGTH)

    node = router.node(answer_at_once)
    assert router.http.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == REPLY
    assert node.was_aborted("nobody's")


def test_a_node_cannot_speak_for_another_nodes_request(router: RunningRouter) -> None:
    def answer_through_a_stranger(node: FakeNode, request: DecodeRequest) -> None:
        stranger.say(TokenDelta(request=request.request, index=0, tokens=[70]))
        stranger.end(request, FinishReason.LENGTH)
        assert stranger.was_aborted(request.request)
        answer(router.tokenizer.encode(REPLY), end_token(router))(node, request)

    stranger = router.node(stall, running=5)
    router.node(answer_through_a_stranger)
    assert router.http.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == REPLY


def test_a_heartbeat_under_a_foreign_instance_is_dropped(router: RunningRouter) -> None:
    node = router.node(stall)
    own = node.instance
    node.announce(instance="somebody-else")
    assert router.eventually(lambda: router.metric(DROPPED, '{reason="foreign_instance"}') >= 1)
    assert [member["instance"] for member in router.members().values()] == [own]


def test_frames_that_cannot_be_read_are_counted_refused_and_change_nothing(router: RunningRouter) -> None:
    node = router.node(answer(router.tokenizer.encode(REPLY), end_token(router)))
    chance = random.Random(SEED)
    for _ in range(300):
        node.say_bytes(chance.randbytes(chance.randrange(64)))
    assert node.wait_for(lambda node: len(node.of(Nack)) == 300), f"seed {SEED}"
    assert router.metric(DROPPED, '{reason="bad_frame"}') == 300
    assert router.http.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == REPLY


def test_a_message_meant_for_nodes_is_refused(router: RunningRouter) -> None:
    node = router.node(stall)
    node.say(Abort(request="x"))
    assert node.wait_for(lambda node: bool(node.of(Nack)))


@pytest.mark.parametrize("held", ["a foreign key", "no key"])
def test_a_peer_without_the_cluster_key_is_refused_before_it_can_speak(router: RunningRouter, held: str) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED)
        if held == "a foreign key":
            new_cluster_key().secure_client(socket)
            socket.curve_serverkey = router.key.public
        socket.connect(router.nodes_address)
        assert monitor.poll(10_000), "no refusal"
        assert recv_monitor_message(monitor)["event"] in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_DISCONNECTED)
        socket.disable_monitor()
        monitor.close()
    assert router.members() == {}

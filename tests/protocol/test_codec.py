"""Frames are decoded against fixed types and sizes; anything else is a BadFrame, never another exception."""

from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import MAX_FRAME_BYTES, BadFrame, decode, encode
from protocol.context import ContextLayout, ContextPart
from protocol.layout import GroupLayout, KVLayout
from protocol.ledger import Ledger
from protocol.messages import (
    MAX_CHOICES,
    Abort,
    ChoiceEnded,
    DecodeRequest,
    Failure,
    FailureCode,
    FinishReason,
    FromDecode,
    FromNode,
    Hello,
    PrefillAddress,
    PrefillRequest,
    RequestEnded,
    Stopped,
    ToDecode,
    TokenDelta,
    ToNode,
)
from protocol.sampling import SamplingParams
from protocol.ticket import ContextSlot, RankRegion, TransferKey, TransferTicket

KEY = TransferKey("request", 2, "instance")
TICKET = TransferTicket(
    key=KEY,
    landing=1,
    first_page=0,
    immediate=2**32 - 1,
    blocks=[[3, 1], [2]],
    regions=[RankRegion(keys=[(0, 2**64 - 1)], base=2**47, length=4096)],
    context=ContextSlot(region=RankRegion(keys=[(0, 0)], base=0, length=512), slot=3),
)
HYBRID = KVLayout(
    groups=(GroupLayout(layers=(0, 2)), GroupLayout(layers=(1,), window=9)),
    kv_heads=3,
    page_size=64,
    head_dim=64,
    dtype="float32",
    context=ContextLayout((ContextPart("hidden", 256), ContextPart("logits", 512))),
)
EXAMPLES: list[tuple[Any, msgspec.Struct]] = [
    (
        FromDecode,
        Hello(
            instance="d",
            name="decode-0",
            expects="p",
            compatibility="c",
            layout=HYBRID,
            landing=1,
            landing_address=b"\x00\xff",
        ),
    ),
    (
        FromDecode,
        PrefillRequest(
            ticket=TICKET,
            public_id="Grüße-😀",
            tokens=[0, 49151],
            deadline_s=1.5,
            checksums=True,
        ),
    ),
    (ToDecode, Stopped(instance="p", key=KEY, posted=3, completed=2, failure=Failure(FailureCode.INTERNAL, "boom"))),
    (FromNode, TokenDelta(request="r", index=0, tokens=[5])),
    (FromNode, TokenDelta(request="r", index=3, tokens=[5, 6], choice=MAX_CHOICES - 1)),
    (FromNode, ChoiceEnded(request="r", choice=1, reason=FinishReason.LENGTH)),
    (ToNode, Abort(request="r", choice=2)),
    (
        FromNode,
        RequestEnded(
            request="r", reason=FinishReason.STOP, tokens=3, failure=None, ledger=Ledger(decode_node="decode-0")
        ),
    ),
    (
        ToNode,
        DecodeRequest(
            request="r",
            public_id="",
            prompt=[1, 2, 3],
            sampling=SamplingParams(max_new_tokens=4, temperature=0.5, seed=2**63 - 1),
            deadline_s=60.0,
            prefills=[PrefillAddress("p", "prefill-0", "tcp://127.0.0.1:1")],
            n=MAX_CHOICES,
        ),
    ),
]


@pytest.mark.parametrize(("channel", "message"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_a_message_survives_the_wire(channel: Any, message: msgspec.Struct) -> None:
    assert decode(encode(message), channel) == message


@given(st.binary(max_size=200))
def test_random_bytes_are_bad_frames(frame: bytes) -> None:
    with pytest.raises(BadFrame):
        decode(frame, FromDecode)


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_mutated_frame_decodes_to_a_message_or_is_a_bad_frame(
    example: tuple[Any, msgspec.Struct], data: st.DataObject
) -> None:
    channel, message = example
    frame = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded: msgspec.Struct = decode(bytes(frame), channel)
    except BadFrame:
        return
    assert decode(encode(decoded), channel) == decoded


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x91" * 3000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        msgpack.packb({1: 2}),
        msgpack.packb({"type": "Nothing"}),
        msgpack.packb({"type": "Ping", "instance": "x", "extra": 1}),
        msgpack.packb({"type": "Ping", "instance": 5}),
        msgpack.packb({"type": "Ping", "instance": ""}),
        msgpack.packb(msgpack.Timestamp(1)),
        msgpack.packb({"type": "Ping", "instance": "x"}) + b"\x00",
    ],
    ids=[
        "empty",
        "deep",
        "huge array",
        "huge bytes",
        "int key",
        "unknown",
        "extra",
        "wrong type",
        "short",
        "ext",
        "tail",
    ],
)
def test_what_is_not_a_known_message_is_a_bad_frame(frame: bytes) -> None:
    with pytest.raises(BadFrame):
        decode(frame, FromDecode)


def test_a_message_of_another_channel_is_a_bad_frame() -> None:
    with pytest.raises(BadFrame):
        decode(encode(TokenDelta(request="r", index=0, tokens=[5])), ToDecode)


def test_frames_over_the_limit_are_refused_on_both_sides() -> None:
    with pytest.raises(BadFrame, match="limit"):
        decode(bytes(MAX_FRAME_BYTES + 1), FromDecode)
    with pytest.raises(BadFrame):
        encode(
            Hello(
                **{
                    **{f: getattr(EXAMPLES[0][1], f) for f in Hello.__struct_fields__},
                    "landing_address": bytes(MAX_FRAME_BYTES),
                }
            )
        )

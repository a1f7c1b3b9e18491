"""Which two nodes go together, from plain statuses."""

from typing import Any

import pytest

from protocol.context import ContextLayout, ContextPart
from router.pairing import refuse_nodes
from tests.router.fake_node import node_status

HIDDEN, LOGITS = ContextPart("hidden", 24), ContextPart("logits", 40)
NARROW = ContextPart("hidden", 12)
BOTH, LOGITS_ALONE = ContextLayout((HIDDEN, LOGITS)), ContextLayout((LOGITS,))


def refusal(prefill: dict[str, Any], decode: dict[str, Any]) -> str | None:
    return refuse_nodes(node_status("p", **prefill), node_status("d", **decode))


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [({}, {}), ({"page_size": 4}, {"page_size": 48}), ({"context": BOTH}, {}), ({"context": BOTH}, {"context": BOTH})],
    ids=["alike", "page sizes", "a context that nobody wants", "a context that is wanted"],
)
def test_nodes_that_go_together(prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    assert refusal(prefill, decode) is None


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        ({"model": "small"}, {"model": "large"}, ["prefill node serves small", "decode node large"]),
        ({"dtype": "bfloat16"}, {}, ["prefill node runs in bfloat16", "decode node in float32", "one --dtype"]),
        ({}, {}, ["files of their models differ"]),
    ],
    ids=["model", "dtype", "nothing that is known"],
)
def test_of_unequal_digests_the_cause_is_said_as_far_as_it_is_known(
    prefill: dict[str, Any], decode: dict[str, Any], words: list[str]
) -> None:
    reason = refusal({"compatibility": "other", **prefill}, decode)
    assert reason is not None and all(word in reason for word in words)


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        ({}, {"context": BOTH}, "start it with --context hidden,logits"),
        ({"context": LOGITS_ALONE}, {"context": BOTH}, "wants the hidden"),
        ({"context": ContextLayout((NARROW,))}, {"context": BOTH}, "12 bytes on the prefill side, 24 on the decode"),
    ],
    ids=["none", "a part", "another size"],
)
def test_a_decode_node_that_wants_a_context_which_is_not_computed(
    prefill: dict[str, Any], decode: dict[str, Any], words: str
) -> None:
    assert words in (refusal(prefill, decode) or "")

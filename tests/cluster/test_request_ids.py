"""The client's name for a request is echoed and logged; the cluster's own key is another, and one for all nodes."""

import pytest

from tests.cluster.exchange import key_of
from tests.cluster.harness import ProcessCluster
from tests.cluster.waiting import eventually

PROMPT = "a prompt that must cross the network"
NAMES = {"dashes": "a-b--c---", "long": "x" * 200, "percent": "%E6%97%A5%20%F0%9F%99%82", "latin-1": "caf\xe9"}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_one_key_names_a_request_on_every_node(unharmed: ProcessCluster, name: str) -> None:
    """P15: an id from outside with anything in it, against one that each side would derive from it."""
    with unharmed.ask(PROMPT, 3, True, {"X-Request-Id": name}) as exchange:
        events = list(exchange.events())
        echoed = exchange.response.headers["X-Request-Id"]
    key = key_of(events[0])
    assert key.isalnum() and len(key) == 32 and key not in name and name not in key
    if name.isascii():
        assert echoed == name
    decode = unharmed.decode_of(key)
    for node in ("router", decode, "prefill-0"):
        expect_known(unharmed, node, key)
    assert public_ids(unharmed, "router", key) == public_ids(unharmed, decode, key)


def expect_known(cluster: ProcessCluster, node: str, key: str) -> None:
    eventually(lambda: key in cluster.requests_in(node), f"{node} knows the request by its key")


def public_ids(cluster: ProcessCluster, node: str, key: str) -> set[str]:
    """How a node's log calls the request."""
    return {line["public_id"] for line in cluster.events(node) if line.get("request") == key and "public_id" in line}

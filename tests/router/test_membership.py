"""Membership as a pure record of heartbeats, on a clock that the test turns."""

from protocol import PROTOCOL_VERSION
from protocol.messages import NodeStatus, Role
from router.membership import LOST_AFTER_S, MAX_NODES, Membership
from tests.router.fake_node import node_status

TOKENIZER = ""


def membership(*instances: str, at: float = 0.0) -> Membership:
    members = Membership(TOKENIZER, at)
    for instance in instances:
        assert observe(members, node_status(instance), at) == (None, [])
    return members


def observe(members: Membership, status: NodeStatus, now: float) -> tuple[str | None, list[str]]:
    """The lost by their instances."""
    refusal, lost = members.observe(status, now)
    return refusal, [member.instance for member in lost]


def names(members: Membership) -> list[str]:
    return [member.instance for member in members]


def run_until(members: Membership, now: float, until: float) -> list[str]:
    """Sweeps as the router does, four times a second."""
    lost = []
    while now < until:
        now += 0.25
        lost += [member.instance for member in members.sweep(now)]
    return lost


def test_a_node_is_lost_only_after_its_third_missed_heartbeat() -> None:
    members = membership("a")
    assert run_until(members, 0, LOST_AFTER_S) == []
    assert run_until(members, LOST_AFTER_S, LOST_AFTER_S + 0.5) == ["a"]
    assert names(members) == []


def test_a_node_paused_for_two_seconds_is_kept() -> None:
    members = membership("a")
    assert run_until(members, 0, 3.0) == []  # a beat at 0, the next would be at 1 but comes at 3
    members.observe(node_status("a"), 3.0)
    assert run_until(members, 3.0, 6.0) == []


def test_time_in_which_the_router_itself_stood_still_counts_for_nobody() -> None:
    members = membership("a", "b")
    assert run_until(members, 0, 2.0) == []
    assert members.sweep(60.0) == []
    assert run_until(members, 60.0, 61.5) == []
    assert sorted(run_until(members, 61.5, 65.0)) == ["a", "b"]


def test_a_new_instance_at_an_address_replaces_the_old_one_for_good() -> None:
    members = membership("old")
    address = node_status("old").status_address
    assert observe(members, node_status("new", status_address=address), 1.0) == (None, ["old"])
    refusal, lost = members.observe(node_status("old"), 2.0)
    assert refusal is not None and "new" in refusal and lost == []
    assert names(members) == ["new"]


def test_a_prefill_node_is_known_by_its_control_address_too() -> None:
    members = Membership(TOKENIZER, 0.0)
    members.observe(node_status("old", role=Role.PREFILL, control_address="tcp://p", status_address="http://1"), 0.0)
    replaced = node_status("new", role=Role.PREFILL, control_address="tcp://p", status_address="http://2")
    assert observe(members, replaced, 0.1) == (None, ["old"])


def test_an_address_that_a_node_left_is_free_for_another() -> None:
    members = membership("a")
    left = node_status("a").status_address
    members.observe(node_status("a", status_address="http://elsewhere"), 1.0)
    assert observe(members, node_status("b", status_address=left), 1.0) == (None, [])
    assert observe(members, node_status("c", status_address="http://elsewhere"), 1.0) == (None, ["a"])


def test_a_heartbeat_updates_the_member_and_keeps_its_count() -> None:
    members = membership("a")
    member = members.get("a")
    assert member is not None
    member.in_flight = 3
    members.observe(node_status("a", pages_free=1, ready=False), 1.0)
    assert members.get("a") is member
    assert (member.in_flight, member.status.pages_free, member.usable) == (3, 1, False)


def test_a_refused_node_is_kept_for_show_and_not_used() -> None:
    members = Membership("ours", 0.0)
    refusal, _ = members.observe(node_status("a", tokenizer="theirs"), 0.0)
    member = members.get("a")
    assert refusal and member is not None and not member.usable
    assert members.max_context(100_000) == 100_000


def test_a_node_of_another_protocol_version_is_refused_with_both_versions() -> None:
    members = Membership("ours", 0.0)
    other = PROTOCOL_VERSION + 1
    refusal, _ = members.observe(node_status("a", protocol_version=other, tokenizer="theirs"), 0.0)
    assert refusal is not None
    assert f"protocol version {other}" in refusal and str(PROTOCOL_VERSION) in refusal


def test_the_context_is_the_smallest_of_the_model_and_the_nodes_in_use() -> None:
    members = Membership(TOKENIZER, 0.0)
    members.observe(node_status("a", max_context=300), 0.0)
    members.observe(node_status("b", max_context=100, ready=False), 0.0)
    assert members.max_context(200) == 200
    assert members.max_context(400) == 300


def test_membership_is_bounded() -> None:
    members = membership(*(f"n{i}" for i in range(MAX_NODES)))
    refusal, _ = members.observe(node_status("one more"), 0.0)
    assert refusal is not None and members.get("one more") is None

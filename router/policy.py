"""Which nodes serve a request. Pure: members in, ranking out.

Only nodes that go together (`pairing`) are paired. Among decode nodes the least loaded comes first, of equals the one
with most free pages; nodes that cannot hold the prompt now come last, for it may wait there.
"""

from collections.abc import Collection, Iterable

from protocol.messages import PrefillAddress, Role
from router.membership import Member
from router.pairing import refuse_nodes

MAX_PREFILLS = 8
"""A decode node asks at most so many, in order."""


def able_decodes(decodes: Iterable[Member], prefills: Iterable[Member]) -> list[Member]:
    """Usable decode nodes that can get a prompt's KV from somewhere."""
    kinds = _kinds(prefills)
    return [
        member
        for member in decodes
        if member.usable
        and (member.status.local_prefill or any(refuse_nodes(kind.status, member.status) is None for kind in kinds))
    ]


def why_unfed(decode: Member, prefills: Iterable[Member]) -> str | None:
    """Why none of the usable prefill nodes can ever feed it; None if one can, or there is none to say so of."""
    kinds = [] if decode.status.local_prefill else _kinds(prefills)
    reasons = [(kind.status.name, refuse_nodes(kind.status, decode.status)) for kind in kinds]
    if not reasons or any(reason is None for _, reason in reasons):
        return None
    return "goes with no prefill node: " + "; ".join(f"not with {name}, as {reason}" for name, reason in reasons)


def misfits(one: Member, others: Iterable[Member]) -> list[tuple[Member, Member, str]]:
    """The prefill and decode node, and why these never exchange KV, of each pair of `one` with a usable other."""
    pairs = [(one, other) if one.status.role is Role.PREFILL else (other, one) for other in others if other.usable]
    reasons = [(*pair, refuse_nodes(pair[0].status, pair[1].status)) for pair in pairs if _exchange(*pair)]
    return [(prefill, decode, reason) for prefill, decode, reason in reasons if reason is not None]


def rank_decodes(able: Iterable[Member], prompt_tokens: int, limit: int, tried: Collection[str] = ()) -> list[Member]:
    """Of `able_decodes`, best first; none that was tried already or has `limit` requests of ours."""
    free = [member for member in able if member.instance not in tried and member.in_flight < limit]
    return sorted(free, key=lambda member: (not _fits(member, prompt_tokens), member.load, -member.status.pages_free))


def rank_prefills(prefills: Iterable[Member], decode: Member, tried: Collection[str] = ()) -> list[Member]:
    """Usable prefill nodes that can feed `decode`, best first; those that were tried already last."""
    able = [
        member for member in prefills if _can_prefill(member) and refuse_nodes(member.status, decode.status) is None
    ]
    able.sort(key=lambda member: (member.instance in tried, member.load, -member.status.pages_free))
    return able[:MAX_PREFILLS]


def address(prefill: Member) -> PrefillAddress:
    status = prefill.status
    return PrefillAddress(status.instance, status.name, status.control_address)


def _kinds(prefills: Iterable[Member]) -> list[Member]:
    """One usable prefill node for all that go with the same decode nodes."""
    able = [member for member in prefills if _can_prefill(member)]
    return list({(member.status.compatibility, member.status.context): member for member in able}.values())


def _exchange(prefill: Member, decode: Member) -> bool:
    roles = (prefill.status.role, decode.status.role)
    return roles == (Role.PREFILL, Role.DECODE) and not decode.status.local_prefill


def _can_prefill(member: Member) -> bool:
    return member.usable and bool(member.status.control_address)


def _fits(member: Member, prompt_tokens: int) -> bool:
    return member.status.pages_free * member.status.page_size >= prompt_tokens

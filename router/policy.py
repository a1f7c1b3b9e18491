"""Which nodes serve a request. Pure: members in, ranking out.

Only nodes of equal compatibility digest are paired. Among decode nodes the least loaded comes first, of equals the one
with most free pages; nodes that cannot hold the prompt now come last, for it may wait there.
"""

from collections.abc import Collection, Iterable

from protocol.messages import PrefillAddress
from router.membership import Member

MAX_PREFILLS = 8
"""A decode node asks at most so many, in order."""


def able_decodes(decodes: Iterable[Member], prefills: Iterable[Member]) -> list[Member]:
    """Usable decode nodes that can get a prompt's KV from somewhere."""
    fed = {member.status.compatibility for member in prefills if _can_prefill(member)}
    return [
        member
        for member in decodes
        if member.usable and (member.status.local_prefill or member.status.compatibility in fed)
    ]


def rank_decodes(able: Iterable[Member], prompt_tokens: int, limit: int, tried: Collection[str] = ()) -> list[Member]:
    """Of `able_decodes`, best first; none that was tried already or has `limit` requests of ours."""
    free = [member for member in able if member.instance not in tried and member.in_flight < limit]
    return sorted(free, key=lambda member: (not _fits(member, prompt_tokens), member.load, -member.status.pages_free))


def rank_prefills(prefills: Iterable[Member], decode: Member, tried: Collection[str] = ()) -> list[Member]:
    """Usable prefill nodes that can feed `decode`, best first; those that were tried already last."""
    able = [
        member
        for member in prefills
        if _can_prefill(member) and member.status.compatibility == decode.status.compatibility
    ]
    able.sort(key=lambda member: (member.instance in tried, member.load, -member.status.pages_free))
    return able[:MAX_PREFILLS]


def address(prefill: Member) -> PrefillAddress:
    status = prefill.status
    return PrefillAddress(status.instance, status.name, status.control_address)


def _can_prefill(member: Member) -> bool:
    return member.usable and bool(member.status.control_address)


def _fits(member: Member, prompt_tokens: int) -> bool:
    return member.status.pages_free * member.status.page_size >= prompt_tokens

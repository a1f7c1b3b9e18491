"""Which nodes serve a request. Pure: members in, ranking out.

Only nodes of equal compatibility digest are paired. Among decode nodes the least loaded comes first, of equals the one
with most free pages; nodes that cannot hold the prompt now come last, for it may wait there.
"""

from collections.abc import Collection, Iterable

from protocol.messages import PrefillAddress
from router.membership import Member

MAX_PREFILLS = 8
"""A decode node asks at most so many, in order."""


def rank_decodes(
    decodes: Iterable[Member],
    prefills: Collection[Member],
    prompt_tokens: int,
    limit: int,
    tried: Collection[str] = (),
) -> list[Member]:
    """Usable decode nodes that can get the prompt's KV from somewhere, best first; none that was tried already or has
    `limit` requests of ours."""
    able = [
        member
        for member in decodes
        if member.usable
        and member.instance not in tried
        and member.in_flight < limit
        and (member.status.local_prefill or rank_prefills(prefills, member))
    ]
    return sorted(able, key=lambda member: (not _fits(member, prompt_tokens), member.load, -member.status.pages_free))


def rank_prefills(prefills: Iterable[Member], decode: Member) -> list[Member]:
    """Usable prefill nodes that can feed `decode`, best first."""
    able = [
        member
        for member in prefills
        if member.usable
        and member.status.control_address
        and member.status.compatibility == decode.status.compatibility
    ]
    return sorted(able, key=lambda member: (member.load, -member.status.pages_free))[:MAX_PREFILLS]


def address(prefill: Member) -> PrefillAddress:
    status = prefill.status
    return PrefillAddress(status.instance, status.name, status.control_address)


def _fits(member: Member, prompt_tokens: int) -> bool:
    return member.status.pages_free * member.status.page_size >= prompt_tokens

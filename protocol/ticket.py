"""The transfer ticket: what a decode node hands to a prefill node so that it may write one prompt's KV and context."""

from typing import Annotated

import msgspec

from protocol.fields import MAX_RAILS, Immediate, Landing, RailNumber
from protocol.layout import MAX_GROUPS, MAX_RANKS

U64 = Annotated[int, msgspec.Meta(ge=0)]
"""MessagePack itself holds no integer above 2^64 - 1."""
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
BlockTable = Annotated[list[BlockId], msgspec.Meta(min_length=1, max_length=1 << 20)]


class TransferKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """Names one attempt at one transfer. `request` is minted once, by the router, and never parsed; `instance` is the
    decode process that opened the attempt."""

    request: str
    attempt: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    instance: str

    def __str__(self) -> str:
        return f"{self.request}#{self.attempt}"


class RankRegion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One decode rank's registered pool, as the fabric's remote region. `keys`: (rail, key), for each rail (NIC) of the
    decode node that reaches it."""

    keys: Annotated[list[tuple[RailNumber, U64]], msgspec.Meta(min_length=1, max_length=MAX_RAILS)]
    base: U64
    length: U64


class ContextSlot(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One slot of a decode engine's registered contexts."""

    region: RankRegion
    slot: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class TransferTicket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Used once. `landing` numbers the landing endpoint of the handshake: a fence opens a new one, and a ticket for an
    old one is refused. `first_page` is the first page that the decode side does not hold already. `immediate` is on
    every write. `blocks`: for each group of layers the destination's block ids from `first_page` on, the same on all
    ranks. `regions`: where they lie, by rank. `context`: where the prompt's context goes, if its layout has one."""

    key: TransferKey
    landing: Landing
    first_page: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    immediate: Immediate
    blocks: Annotated[list[BlockTable], msgspec.Meta(min_length=1, max_length=MAX_GROUPS)]
    regions: Annotated[list[RankRegion], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]
    context: ContextSlot | None = None

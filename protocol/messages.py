"""Every message between processes. Frozen, tagged by its class name, decoded only against the union of its channel.

router  <- node      NodeStatus, TokenDelta, TokenDeltas, ChoiceEnded, RequestEnded    (the node dials the router)
router  -> node      StatusAck, DecodeRequest, Abort
decode  -> prefill   Hello, Ping, PrefillRequest, AbortTransfer, RailFenced    (the decode node dials the prefill node)
decode  <- prefill   Welcome, HelloRefused, Pong, PrefillAccepted, PrefillRefused, TransferFinished, Stopped, RailLost
either               Nack: the answer to a frame that could not be read or is not handled here
"""

from enum import Enum
from typing import Annotated

import msgspec

from protocol.context import ContextLayout
from protocol.fields import MAX_RAILS, Count, Immediate, Landing, Name, RailNumber, Seconds
from protocol.layout import DType, KVLayout
from protocol.ledger import Ledger
from protocol.sampling import SamplingParams, TokenId
from protocol.ticket import TransferKey, TransferTicket

MAX_PROMPT_TOKENS = 1 << 20
MAX_CHECKSUM_BYTES = 8 << 20
MAX_CHOICES = 128
"""Sequences of one prompt, as OpenAI allows."""
MAX_DELTAS = 1024
MAX_IN_DOUBT = 4096
"""Transfers with one decode node, as many as it has slots."""

PublicId = Annotated[str, msgspec.Meta(max_length=512)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
ChoiceIndex = Annotated[int, msgspec.Meta(ge=0, lt=MAX_CHOICES)]
Prompt = Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=MAX_PROMPT_TOKENS)]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type", tag=True):
    """Base of all messages."""


class FailureCode(Enum):
    """Why something was refused or failed; the router alone turns it into an HTTP status."""

    INVALID = "invalid"
    """The request itself is wrong for this model. Not retryable."""
    TOO_LONG = "too_long"
    """Prompt (plus new tokens) exceeds what this cluster can ever hold. Not retryable."""
    OVERLOADED = "overloaded"
    """A bounded queue or the page pool is full now."""
    INCOMPATIBLE = "incompatible"
    """Model, layout or protocol differ between the two sides; or between a decode node and all of its prefill nodes."""
    STALE_PEER = "stale_peer"
    """Addressed to another instance or a fenced landing: handshake again."""
    NO_DECODE = "no_decode"
    """No decode node is ready: said by the router only."""
    NO_PREFILL = "no_prefill"
    """No prefill node accepted or finished the prompt."""
    TRANSFER_FAILED = "transfer_failed"
    """KV did not arrive whole."""
    NODE_LOST = "node_lost"
    """The node that served the request is gone."""
    DEADLINE = "deadline"
    """The request's own deadline passed."""
    DRAINING = "draining"
    """The node is stopping and takes nothing new."""
    CAPACITY = "capacity"
    """The request outgrew the whole cache while decoding."""
    UNSUPPORTED = "unsupported"
    """A message that this node does not handle, or could not decode."""
    INTERNAL = "internal"
    """Our bug."""


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    code: FailureCode
    message: Text


class Role(Enum):
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(Enum):
    STOP = "stop"
    """An end token was sampled (it is the last token of the output)."""
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


# ---- node and router ------------------------------------------------------------------------------------------------


class NodeStatus(Message, frozen=True):
    """Registration and heartbeat, every second and whenever readiness changes.

    instance: random per process. name: for people. control_address: where decode nodes dial (prefill role, else "").
    compatibility: digest of what must be equal on both sides of a pair: protocol, model and what its KV consists of,
    but not how that is cut into pages and over ranks. dtype, context: of its KV, and of the slots beside it. tokenizer:
    digest of the tokenizer files, checked against the router's. max_context: most tokens (prompt + new) one request may
    reach. waiting: accepted requests that hold no pages yet. local_prefill: serves alone, needs no prefill node.
    """

    protocol_version: Count
    role: Role
    instance: Name
    name: Name
    control_address: Annotated[str, msgspec.Meta(max_length=256)]
    status_address: Annotated[str, msgspec.Meta(max_length=256)]
    compatibility: Name
    dtype: DType
    context: ContextLayout
    tokenizer: Name
    model: Name
    provider: Name
    ready: bool
    draining: bool
    local_prefill: bool
    page_size: Count
    pages_total: Count
    pages_free: Count
    pages_quarantined: Count
    running: Count
    waiting: Count
    max_context: Count


class StatusAck(Message, frozen=True):
    """Answer to each NodeStatus. A change of `router_instance` ends all work of the old one. `refusal`: why the router
    will not use this node, or None."""

    router_instance: Name
    refusal: Text | None


class PrefillAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    instance: Name
    name: Name
    address: Name


class DecodeRequest(Message, frozen=True):
    """`request`: the key that names it on every node, minted once by the router. `public_id`: what the client called
    it, for logs only. `n`: choices, sequences of the one prompt, whose KV comes once; choice i draws from seed + i.
    `deadline_s`: seconds from receipt. `prefills`: best first; asked in this order. `attempts`: that were made for it
    before, on any node; the next ones are numbered from there on, so that a node that gets it again tells them apart.
    """

    request: Name
    public_id: PublicId
    prompt: Prompt
    sampling: SamplingParams
    deadline_s: Seconds
    prefills: Annotated[list[PrefillAddress], msgspec.Meta(max_length=64)]
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] = 1
    attempts: Count = 0


class Abort(Message, frozen=True):
    """Stop a request, or only one choice of it; unknown keys are ignored. One RequestEnded follows for a known one."""

    request: Name
    choice: ChoiceIndex | None = None


class TokenDelta(Message, frozen=True):
    """New tokens of one choice of a request, in order. `index` is the position of the first within the choice's output,
    from 0."""

    request: Name
    index: Count
    tokens: Annotated[list[TokenId], msgspec.Meta(min_length=1, max_length=1 << 16)]
    choice: ChoiceIndex = 0


class TokenDeltas(Message, frozen=True):
    """As one by one, in this order: what a node has to say at once, as after a step with many requests in it."""

    deltas: Annotated[list[TokenDelta], msgspec.Meta(min_length=1, max_length=MAX_DELTAS)]


class ChoiceEnded(Message, frozen=True):
    """One choice of several is over, after its last TokenDelta, and others go on. CANCELLED: an Abort named it. The
    last one's end is that of the request."""

    request: Name
    choice: ChoiceIndex
    reason: FinishReason


class RequestEnded(Message, frozen=True):
    """The one terminal message of a request, after its last TokenDelta. `reason`: of the choice that ended last, or of
    all that had not, where the request failed or was cancelled as a whole. `tokens`: how many were sent of all choices:
    a link that breaks may lose the last of them. `failure` with reason ERROR only."""

    request: Name
    reason: FinishReason
    tokens: Count
    failure: Failure | None
    ledger: Ledger


# ---- decode and prefill ---------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """Opens or renews a decode node's session. `expects`: the prefill instance it means to reach. `layout`: of the
    pools to write into. `landing_address`: the endpoint opened for that instance alone, numbered `landing` (a fence
    raises the number)."""

    instance: Name
    name: Name
    expects: Name
    compatibility: Name
    layout: KVLayout
    landing: Landing
    landing_address: Annotated[bytes, msgspec.Meta(min_length=1, max_length=4096)]


class Welcome(Message, frozen=True):
    """`layout`: of the pools that the writes will come from: what arrives is counted by it."""

    instance: Name
    landing: Landing
    layout: KVLayout


class HelloRefused(Message, frozen=True):
    instance: Name
    landing: Landing
    failure: Failure


class Ping(Message, frozen=True):
    instance: Name


class Pong(Message, frozen=True):
    instance: Name


class PrefillRequest(Message, frozen=True):
    """Run `tokens` (the prompt without its last token) and write its KV, and what was made of the last of them, as the
    ticket says. `checksums`: TransferFinished is to have them."""

    ticket: TransferTicket
    public_id: PublicId
    tokens: Prompt
    deadline_s: Seconds
    checksums: bool = False


class PrefillAccepted(Message, frozen=True):
    instance: Name
    key: TransferKey


class PrefillRefused(Message, frozen=True):
    """Nothing was or will be written for this key."""

    instance: Name
    key: TransferKey
    failure: Failure


class AbortTransfer(Message, frozen=True):
    """Write nothing more; answered by Stopped (or by the TransferFinished that crossed it)."""

    key: TransferKey


class PrefillTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """On the prefill node's clock. queue_s: from receipt to the first forward. prefill_s: first forward to end of last.
    early_writes / last_chunk_writes: see Ledger."""

    chunks: Count
    queue_s: Seconds
    prefill_s: Seconds
    early_writes: Count
    last_chunk_writes: Count


class TransferFinished(Message, frozen=True):
    """All `posted` writes completed locally. `checksums` (if wanted): CRC-32 of the tokens that belong into each page
    of the ticket; by the decode side's replica sets, layers, and pages in ticket order; then of each part of its
    context; little-endian u32."""

    instance: Name
    key: TransferKey
    posted: Count
    times: PrefillTimes
    checksums: Annotated[bytes, msgspec.Meta(max_length=MAX_CHECKSUM_BYTES)] | None


class Stopped(Message, frozen=True):
    """Nothing more will be posted for this key. `posted` is final; `completed` of them succeeded by now. May overtake
    the data of those writes. `failure` None: stopped because asked to, or never heard of."""

    instance: Name
    key: TransferKey
    posted: Count
    completed: Count
    failure: Failure | None


class WritesInDoubt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of the writes with `immediate` over a rail that was lost, `completed` have, and others may have landed or not."""

    immediate: Immediate
    completed: Count


class RailLost(Message, frozen=True):
    """One `rail` of the prefill node's failed with writes on their way to these rails of the landing, `remotes`, which
    no other rail has written to: they are to be fenced, which RailFenced answers. The landing's others go on."""

    instance: Name
    landing: Landing
    rail: RailNumber
    remotes: Annotated[list[RailNumber], msgspec.Meta(min_length=1, max_length=MAX_RAILS)]
    doubts: Annotated[list[WritesInDoubt], msgspec.Meta(min_length=1, max_length=MAX_IN_DOUBT)]


class RailFenced(Message, frozen=True):
    """Nothing lands there any more. Of the immediates that were in doubt those in `again` are not whole, and no write
    in doubt counts for them: each is to be written again over another rail. Those of all others must not be."""

    instance: Name
    landing: Landing
    rail: RailNumber
    again: Annotated[list[Immediate], msgspec.Meta(max_length=MAX_IN_DOUBT)]


class Nack(Message, frozen=True):
    """The frame just received could not be decoded or is of a type that this node does not handle."""

    failure: Failure


FromNode = NodeStatus | TokenDelta | TokenDeltas | ChoiceEnded | RequestEnded | Nack
ToNode = StatusAck | DecodeRequest | Abort | Nack
FromDecode = Hello | Ping | PrefillRequest | AbortTransfer | RailFenced | Nack
ToDecode = (
    Welcome | HelloRefused | Pong | PrefillAccepted | PrefillRefused | TransferFinished | Stopped | RailLost | Nack
)

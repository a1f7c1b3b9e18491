"""Where one request's time and bytes went, as its decode node tells the router when it ends."""

from typing import Annotated

import msgspec

from protocol.fields import Count, Name, Seconds


class Ledger(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Durations were each measured on one clock.

    queue_s: waiting for pages and for the prefill node's scheduler. prefill_s: from the prompt's first forward to the
    end of its last, or until all KV was there if that came first. exposed_transfer_s: the part of the wait for KV that
    neither of those covers (message hops included). first_step_s: from KV arrival to the first sampled token. writes /
    bytes: counted on arrival.
    early_writes / last_chunk_writes: of the last prefill chunk, posted before its forward ended, and all.
    prefill_node "" and provider "" where the prompt ran on the decode node itself.
    """

    decode_node: Name
    prefill_node: Annotated[str, msgspec.Meta(max_length=256)] = ""
    provider: Annotated[str, msgspec.Meta(max_length=64)] = ""
    attempts: Count = 0
    prefill_chunks: Count = 0
    queue_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    exposed_transfer_s: Seconds = 0.0
    first_step_s: Seconds = 0.0
    writes: Count = 0
    bytes: Count = 0
    early_writes: Count = 0
    last_chunk_writes: Count = 0

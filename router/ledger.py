"""Where a request's time went, as told to a client that asked with the header `X-Kvferry-Ledger: 1`."""

from typing import Any

import msgspec

from protocol.ledger import Ledger
from router.generation import TextEnded

HEADER = "x-kvferry-ledger"


def report(key: str, ended: TextEnded) -> dict[str, Any]:
    """The node's ledger (absent if it sent none in time) and the router's own durations, in seconds.

    ttft_s = router_queue_s + queue_s + prefill_s + exposed_transfer_s + first_step_s + other_s. router_queue_s: from
    receipt until the node was asked, tokenising included. tps: tokens per second after the first, of all choices.
    """
    times = ended.times
    ttft = max(0.0, times.first_token - times.received) if times.first_token else 0.0
    router_queue = max(0.0, times.sent - times.received)
    decoding = times.last_token - times.first_token
    report: dict[str, Any] = {"request": key, "ttft_s": ttft, "router_queue_s": router_queue}
    report["tps"] = (ended.completion_tokens - 1) / decoding if decoding > 0 else None
    if ended.ledger is not None:
        report |= msgspec.to_builtins(ended.ledger)
        report["other_s"] = ttft - router_queue - _on_nodes(ended.ledger)
    return {"kvferry": report}


def _on_nodes(ledger: Ledger) -> float:
    return ledger.queue_s + ledger.prefill_s + ledger.exposed_transfer_s + ledger.first_step_s

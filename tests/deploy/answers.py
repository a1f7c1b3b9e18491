"""Answers and ledgers for tests."""

from typing import Any

from deploy.asking import Answer, ServedLedger
from deploy.prompts import ask


def ledger(**changes: Any) -> ServedLedger:
    """One whose parts sum to its TTFT."""
    fields: dict[str, Any] = {
        "decode_node": "decode-1", "prefill_node": "prefill-0", "provider": "net", "attempts": 1, "prefill_chunks": 4,
        "router_queue_s": 0.001, "queue_s": 0.009, "prefill_s": 0.2, "exposed_transfer_s": 0.02, "first_step_s": 0.03,
        "other_s": 0.04, "ttft_s": 0.3, "tps": 20.0, "writes": 420, "bytes": 3 << 20, "early_writes": 29,
        "last_chunk_writes": 30,
    }  # fmt: skip
    return ServedLedger(**{**fields, **changes})


def answer(**changes: Any) -> Answer:
    """A whole one."""
    fields: dict[str, Any] = {
        "text": "Paris.", "finish_reason": "stop", "prompt_tokens": 40, "output_tokens": 3, "ledger": ledger(),
    }  # fmt: skip
    return Answer(ask("capital", "What is the capital of France?"), **{**fields, **changes})

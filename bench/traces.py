"""Public traces of requests, trimmed (see data/README.md)."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "data"
BLOCK = 512
"""Tokens that one id stands for."""
MOONCAKE = ("conversation", "synthetic")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`hash_ids`: one per BLOCK tokens of the prompt, the last block possibly cut short."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: Sequence[int]


def mooncake(name: str, requests: int | None = None) -> list[TraceRequest]:
    """The first `requests` of one of MOONCAKE, in order of arrival."""
    with gzip.open(FOLDER / f"mooncake_{name}_2000.jsonl.gz", "rt") as lines:
        rows = [TraceRequest(**json.loads(line)) for line in lines]
    return rows[:requests]

"""Counters as dataclasses of numbers, and their sums over several parts of a node."""

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Counts = TypeVar("Counts", bound="DataclassInstance")


def added(counts: Sequence[Counts]) -> Counts:
    """Of at least one part, field by field."""
    kind = type(counts[0])
    return kind(**{each.name: sum(getattr(one, each.name) for one in counts) for each in fields(kind)})

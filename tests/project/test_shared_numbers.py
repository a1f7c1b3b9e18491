"""Numbers that several packages and the C core must agree on, where none may ask another for them."""

import re

from fabric import _build, immediates, limits
from fabric.native import core
from protocol import fields, messages


def defined(name: str) -> int:
    """In the core's own header, which Python does not read."""
    header = (_build.ROOT / _build.CORE / "internal.h").read_text()
    (number,) = re.findall(rf"^#define {name} (\d+)$", header, re.MULTILINE)
    return int(number)


def test_as_many_rails_are_written_to_as_are_opened_and_named_in_messages() -> None:
    assert limits.MAX_RAILS == fields.MAX_RAILS == core().lib.KF_MAX_RAILS


def test_an_immediate_is_a_transfer_slot_and_its_generation_for_whoever_packs_and_whoever_counts_it() -> None:
    assert defined("KF_SLOTS") == immediates.SLOTS
    assert immediates.pack(1, 1) == 1 << defined("KF_GENERATION_BITS") | 1


def test_all_transfers_with_one_decode_node_may_be_in_doubt() -> None:
    assert messages.MAX_IN_DOUBT == immediates.SLOTS

"""A landing's address survives its way through a greeting, and what is none of ours is no address."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.landing_address import LandingAddress

ADDRESSES = st.builds(
    LandingAddress, st.lists(st.binary(max_size=300), max_size=5).map(tuple), same_host=st.binary(max_size=50)
)


@given(ADDRESSES)
def test_what_was_encoded_is_decoded(address: LandingAddress) -> None:
    assert LandingAddress.decode(address.encode()) == address


@given(ADDRESSES, st.data())
def test_one_that_was_cut_off_is_none_or_names_fewer_ways(address: LandingAddress, data: st.DataObject) -> None:
    whole = address.encode()
    cut = LandingAddress.decode(whole[: data.draw(st.integers(0, len(whole) - 1))])
    assert cut is None or (cut.rails == address.rails[: len(cut.rails)] and cut.same_host in (b"", address.same_host))


@given(st.binary(max_size=100).filter(lambda raw: not raw.startswith(b"KVF1")))
def test_other_bytes_are_none(raw: bytes) -> None:
    assert LandingAddress.decode(raw) is None


@pytest.mark.parametrize("kind", [0, 3, 255])
def test_kinds_of_a_later_version_are_skipped(kind: int) -> None:
    known = LandingAddress((b"first", b"second"), b"name")
    later = bytes([kind, 3, 0]) + b"new"
    assert LandingAddress.decode(known.encode() + later) == known

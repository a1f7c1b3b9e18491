"""The options by which a node joins a cluster: those that name NICs and cores."""

import argparse

import pytest

from protocol.membership_options import Membership, add_membership_options, membership_from

NEEDED = ["--router", "tcp://127.0.0.1:8001", "--cluster-key", "key"]


def parsed(*words: str) -> Membership:
    parser = argparse.ArgumentParser()
    add_membership_options(parser, default_name="node")
    return membership_from(parser.parse_args([*NEEDED, *words]))


def test_nothing_named_means_what_is_near() -> None:
    assert (parsed().nics, parsed().cores) == ((), None)


def test_nics_and_cores_are_lists() -> None:
    member = parsed("--nics", "mlx5_0,10.0.0.1", "--cores", "0-2,8")
    assert (member.nics, member.cores) == (("mlx5_0", "10.0.0.1"), frozenset({0, 1, 2, 8}))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "*"])
def test_an_address_that_peers_cannot_reach_is_refused_with_what_to_do(
    host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed("--host", host)
    assert f"{host} is no address that peers reach: give that of one interface" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1", "::1", "node-1.example"])
def test_the_address_of_one_interface_is_taken(host: str) -> None:
    assert parsed("--host", host).host == host


@pytest.mark.parametrize(
    "words",
    [("--nics", "a,,b"), ("--nics", ""), ("--cores", "0-"), ("--cores", "x"), ("--cores", ""), ("--cores", "5-3")],
)
def test_what_is_no_list_is_refused(words: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(*words)
    assert "is no list" in capsys.readouterr().err

"""What a node says of its data plane when it has opened it."""

import argparse
import logging
import os
from typing import Any

import pytest

from kv_messenger.data_plane import open_data_plane
from protocol.membership_options import add_membership_options, membership_from

NEEDED = ["--router", "tcp://127.0.0.1:8001", "--cluster-key", "key"]


def opened(caplog: pytest.LogCaptureFixture, *options: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_membership_options(parser, default_name="node")
    with caplog.at_level(logging.INFO):
        open_data_plane(membership_from(parser.parse_args([*NEEDED, *options])), []).fabric.close()
    (line,) = [record for record in caplog.records if record.getMessage() == "data plane opened"]
    said: dict[str, Any] = vars(line)["fields"]
    return said


def test_nics_and_cores_that_were_named_are_said(caplog: pytest.LogCaptureFixture) -> None:
    core = min(os.sched_getaffinity(0))
    said = opened(caplog, "--provider", "net", "--nics", "lo,127.0.0.1", "--cores", str(core), "--no-same-host")
    assert said == {
        "provider": "net",
        "nics": ["lo (127.0.0.1)", "127.0.0.1"],
        "same_host": False,
        "messenger_cores": [core],
    }


def test_without_a_network_there_are_no_nics(caplog: pytest.LogCaptureFixture) -> None:
    said = opened(caplog, "--provider", "same-host")
    assert (said["provider"], said["nics"], said["same_host"]) == ("same-host", [], True)

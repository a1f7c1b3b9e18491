"""Closing a landing destroys its queue pair: nothing of a writer in full flight lands afterwards.

For `verbs;ofi_rxm` the nodes wait for the writer's death first, as ofi_rxm crashed over TCP; if these tests pass there,
that caution can go.
"""

import subprocess
import sys

import pytest

from tests.fabric.child import ROOT
from tests.fabric.test_fence import MEMORY
from tests.rdma.conftest import Nic


@pytest.mark.parametrize("page", [4 << 10, 64 << 10, 1 << 20])
@pytest.mark.parametrize("cut", range(3))
def test_nothing_of_a_writer_at_full_speed_lands_after_its_queue_pair_is_gone(nic: Nic, page: int, cut: int) -> None:
    after = MEMORY // page + 1 + cut  # one pass over the memory, then into a batch of the next
    command = [sys.executable, "-m", "tests.rdma.fencing", nic.provider, nic.node, str(page), str(after)]
    fenced = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)
    assert fenced.returncode == 0, fenced.stderr

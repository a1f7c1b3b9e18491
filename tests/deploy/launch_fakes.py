"""`python -m tests.deploy.launch_fakes MODEL RUN_DIR`: what `kvferry up --foreground` is, with fake roles."""

import sys
from pathlib import Path

from deploy.cluster_spec import ClusterSpec
from deploy.console import say
from deploy.up import run_foreground
from tests.deploy.conftest import FAKE_PROGRAMS

if __name__ == "__main__":
    spec = ClusterSpec(model=Path(sys.argv[1]), decode=2, port=0)
    sys.exit(run_foreground(spec, Path(sys.argv[2]), say, FAKE_PROGRAMS))

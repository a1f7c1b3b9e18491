"""A model folder that passes for one, and the fake roles of fake_role.py."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.cluster_spec import ClusterSpec, Programs

FAKE = str(Path(__file__).with_name("fake_role.py"))
FAKE_PROGRAMS: Programs = {role: (sys.executable, FAKE, role) for role in ("router", "prefill", "decode")}

Faulty = Callable[..., ClusterSpec]


def small_cluster(model: Path, **faults: str) -> ClusterSpec:
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "faults.json").write_text(json.dumps({name.replace("_", "-"): fault for name, fault in faults.items()}))
    return ClusterSpec(model=model, decode=2, port=0)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def faulty(tmp_path: Path) -> Faulty:
    """A small cluster's spec; keywords name a process's fault, e.g. prefill_0="die"."""

    return lambda **faults: small_cluster(tmp_path / "model", **faults)


@pytest.fixture
def spec(faulty: Faulty) -> ClusterSpec:
    """A small cluster without faults."""
    return faulty()

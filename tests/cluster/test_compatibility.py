"""Nodes that do not fit together, and models that cannot be served: refused with a reason, and nobody falls."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.harness import ProcessCluster
from tests.cluster.node_process import NodeProcess, Role
from tests.cluster.oracle import Oracle

PROMPT = "a prompt of several pages, whatever the size of a page may be"


def test_nodes_of_different_models_are_never_paired(
    cluster: ProcessCluster, oracle: Oracle, endless_model: Path, tmp_path: Path
) -> None:
    """P31: the only prefill node serves another model than both decode nodes. Then comes one that fits them, though its
    pages are wider."""
    other = Path(shutil.copytree(endless_model, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 1234.0}))
    cluster.nodes["prefill-0"].process.kill()
    cluster.add("prefill", "prefill-other", "--model", str(other))
    cluster.wait_ready("prefill-other")
    cluster.wait_forgotten("prefill-0")
    pids = cluster.pids()
    for stream in (False, True):
        with cluster.ask(PROMPT, 8, stream) as refused:
            assert refused.status == 503
            error = refused.json()["error"]
        assert error["code"] == "no_capacity"
        assert "goes with no prefill node" in error["message"]
    assert cluster.http.get("/ready").status_code == 503
    cluster.add("prefill", "prefill-wide", "--page-size", "32")
    cluster.wait_ready("prefill-wide")
    with cluster.ask(PROMPT, 8) as asked:
        assert asked.text() == oracle.completion(PROMPT, 8).text
    assert pids.items() <= cluster.pids().items()


def no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()


def other_shape(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))


BROKEN: dict[str, tuple[Callable[[Path], None], Role, str]] = {
    "no weights": (no_weights, "decode", "lacks model.safetensors"),
    "missing layers": (other_shape, "decode", "weights lack"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_model_that_cannot_be_served_ends_the_process_with_one_line(
    cluster: ProcessCluster, endless_model: Path, tmp_path: Path, case: str
) -> None:
    damage, role, reason = BROKEN[case]
    model = Path(shutil.copytree(endless_model, tmp_path / "model"))
    damage(model)
    arguments = ["--model", str(model), "--name", "broken", "--threads", "1"]
    arguments += ["--router", cluster.nodes_address, "--cluster-key", str(cluster.key)]
    process = NodeProcess(role, arguments, tmp_path / "log")
    assert process.wait() == 1
    *logged, line = process.log.read_text().splitlines()
    assert {json.loads(event)["level"] for event in logged} <= {"info"}
    assert line.startswith(f"kvferry {role}: ") and reason in line
    assert "broken" not in {event.get("node") for event in cluster.events("router")}

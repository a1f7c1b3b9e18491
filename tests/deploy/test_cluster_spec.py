import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from deploy.cluster_spec import ClusterSpec, Division, SpecError, environment, node_command, router_command, threads


def test_a_folder_without_a_config_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="make setup"):
        ClusterSpec(model=tmp_path).check()


def test_a_cluster_that_could_serve_nothing_is_refused(spec: ClusterSpec) -> None:
    with pytest.raises(SpecError, match="decode node"):
        dataclasses.replace(spec, decode=0).check()
    with pytest.raises(SpecError, match="--local-prefill"):
        dataclasses.replace(spec, prefill=0).check()


def test_no_prefill_node_is_fine_where_decode_nodes_prefill(spec: ClusterSpec) -> None:
    dataclasses.replace(spec, prefill=0, local_prefill=True).check()


def test_the_router_is_told_where_clients_and_nodes_connect(spec: ClusterSpec) -> None:
    command = router_command(spec, Path("key"))
    assert command[1:3] == ["-m", "router"]
    assert command[command.index("--port") + 1] == "0"
    assert command[command.index("--node-port") + 1] == "0"
    assert command[command.index("--cluster-key") + 1] == "key"


def test_a_node_dials_the_address_that_the_router_announced(spec: ClusterSpec) -> None:
    command = node_command(spec, "decode", "decode-1", "tcp://127.0.0.1:5", Path("key"))
    assert command[1:3] == ["-m", "decode_node"]
    assert command[command.index("--router") + 1] == "tcp://127.0.0.1:5"
    assert command[command.index("--name") + 1] == "decode-1"


def test_settings_are_passed_on_only_where_they_were_given(spec: ClusterSpec) -> None:
    plain = node_command(spec, "prefill", "prefill-0", "tcp://r", Path("key"))
    set_ = node_command(
        dataclasses.replace(spec, provider="net", same_host=False, page_size=16, context="hidden", debug_pages=True),
        "prefill",
        "prefill-0",
        "tcp://r",
        Path("key"),
    )
    assert "--provider" not in plain and "--no-same-host" not in plain
    assert "--page-size" not in plain and "--context" not in plain and "--debug-pages" not in plain
    assert set_[set_.index("--context") + 1] == "hidden" and "--debug-pages" in set_
    assert set_[set_.index("--provider") + 1] == "net" and "--no-same-host" in set_
    assert set_[set_.index("--page-size") + 1] == "16"


def test_local_prefill_concerns_decode_nodes_alone(spec: ClusterSpec) -> None:
    local = dataclasses.replace(spec, local_prefill=True)
    assert "--local-prefill" in node_command(local, "decode", "d", "tcp://r", Path("key"))
    assert "--local-prefill" not in node_command(local, "prefill", "p", "tcp://r", Path("key"))


def test_each_role_divides_its_devices_in_its_own_way(spec: ClusterSpec) -> None:
    divided = dataclasses.replace(spec, prefill_division=Division(tp=2), decode_division=Division(tp=4, dp=3))
    prefill, decode = (node_command(divided, role, "n", "tcp://x", Path("key")) for role in ("prefill", "decode"))
    assert prefill[prefill.index("--tp") + 1] == "2" and "--dp" not in prefill
    assert decode[decode.index("--tp") + 1] == "4" and decode[decode.index("--dp") + 1] == "3"
    assert decode[decode.index("--threads") + 1] == "1"


@pytest.mark.parametrize("division", [Division(tp=0), Division(dp=-1)])
def test_a_role_without_devices_is_refused(spec: ClusterSpec, division: Division) -> None:
    with pytest.raises(SpecError, match=r"--decode-.p must be at least 1"):
        dataclasses.replace(spec, decode_division=division).check()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"port": 99999}, "--port 99999 is none: 0 to 65535"),
        ({"port": -1}, "--port -1"),
        ({"page_size": 0}, "--page-size 0: must be a whole number from 4"),
        ({"num_blocks": 0}, "--num-blocks 0: must be a whole number from 1"),
        ({"context": "hidden,states"}, "--context: 'states'"),
    ],
)
def test_a_number_or_name_that_a_process_would_refuse_is_refused_before_it_is_started(
    spec: ClusterSpec, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        dataclasses.replace(spec, **change).check()


def test_a_division_that_the_model_does_not_allow_is_refused_before_anything_starts(spec: ClusterSpec) -> None:
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "hidden_size": 576}
    (spec.model / "config.json").write_text(json.dumps({"model_type": "llama", **heads}))
    dataclasses.replace(spec, decode_division=Division(tp=3)).check()
    with pytest.raises(SpecError, match=r"3 KV heads .* among 2 devices: choose --decode-tp 1, 3"):
        dataclasses.replace(spec, decode_division=Division(tp=2)).check()


def test_every_node_gets_a_thread_and_idle_ones_do_not_spin(spec: ClusterSpec) -> None:
    assert threads(dataclasses.replace(spec, decode=1000), "decode") == 1
    assert threads(spec, "prefill") >= threads(spec, "decode")
    assert environment()["OMP_WAIT_POLICY"] == "passive"

"""A node's rails and cores follow from its devices, or from what its options name."""

from pathlib import Path

import pytest

from fabric.errors import FabricUnavailable
from fabric.placement import Placement, Wishes, check_addresses, find_placement, interface_addresses, place
from fabric.rails import Rail
from fabric.sysfs import Machine
from tests.fabric.machines import Tree, dgx_h100, p5_48xlarge

ADDRESSES = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "ibp24s0": "10.1.0.1", "ibp64s0": "10.1.0.3"}
FAR = "10.0.0.1"


def placed(machine: Machine, wishes: Wishes, *devices: str, allowed: int = 224) -> Placement:
    return place(machine, wishes, devices, range(allowed), ADDRESSES)


@pytest.fixture(scope="module")
def dgx(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return dgx_h100(tmp_path_factory.mktemp("dgx")).machine()


def test_a_gpus_nearest_nics_are_its_rails_by_the_addresses_of_their_interfaces(dgx: Machine) -> None:
    found = placed(dgx, Wishes(FAR), "0000:1b:00.0")
    assert (found.rails, found.nics) == ((), (Rail("10.1.0.1", "mlx5_0"),))
    assert found.cores == frozenset([*range(14), *range(112, 126)])


def test_several_gpus_bring_their_nics_together(dgx: Machine) -> None:
    found = placed(dgx, Wishes(FAR), "0000:1b:00.0", "0000:43:00.0")
    assert [rail.domain for rail in found.nics] == ["mlx5_0", "mlx5_3"]
    assert found.cores is not None and len(found.cores) == 56


def test_of_nics_of_which_some_have_an_address_the_others_are_left_out(dgx: Machine) -> None:
    found = placed(dgx, Wishes(FAR), "0000:1b:00.0", "0000:52:00.0")
    assert [rail.domain for rail in found.nics] == ["mlx5_0"]


def test_efa_devices_need_no_address(tmp_path: Path) -> None:
    found = placed(p5_48xlarge(tmp_path).machine(), Wishes(FAR), "0000:53:00.0", allowed=192)
    assert found.nics == tuple(Rail(FAR, f"rdmap{bus}s0") for bus in (79, 80, 81, 82))


def test_a_node_on_the_loopback_interface_looks_for_no_nics(dgx: Machine) -> None:
    assert placed(dgx, Wishes("127.0.0.1"), "0000:1b:00.0").nics == ()


def test_nics_are_named_by_device_interface_or_address(dgx: Machine) -> None:
    found = placed(dgx, Wishes(FAR, ("mlx5_0", "eth0", "192.0.2.7", "mlx5_11")), "0000:43:00.0")
    assert found.nics == ()
    assert found.rails == (
        Rail("10.1.0.1", "mlx5_0"),
        Rail("10.0.0.1", "eth0"),
        Rail("192.0.2.7"),
        Rail(FAR, "mlx5_11"),
    )


def test_names_of_nothing_are_refused_with_what_there_is(dgx: Machine) -> None:
    with pytest.raises(FabricUnavailable, match=r"mlx9.*mlx5_0"):
        placed(dgx, Wishes(FAR, ("mlx9",)))
    with pytest.raises(FabricUnavailable, match=r"\[500\]"):
        placed(dgx, Wishes(FAR, cores=frozenset({0, 500})))


def test_an_interface_that_has_a_name_twice_is_listed_once(tmp_path: Path) -> None:
    laptop = Tree(tmp_path)
    laptop.interface("eth0", laptop.device("00/00:03.0", "0x020000", -1))
    with pytest.raises(FabricUnavailable, match="called mlx5_0; there are: ") as refused:
        placed(laptop.machine(), Wishes(FAR, ("mlx5_0", "eth0")))
    assert str(refused.value).count("eth0") == 1


HELD = {"127.0.0.1": "lo", "10.0.0.1": "eth0", "10.0.0.2": "eth0", "fe80::1": "eth0"}


@pytest.mark.parametrize("wished", [(), ("eth0",), ("10.0.0.2",), ("fe80:0::1", "127.0.0.1")])
def test_any_address_of_an_interface_is_one(wished: tuple[str, ...]) -> None:
    check_addresses(wished, HELD)


def test_an_address_that_no_interface_has_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        FabricUnavailable, match=r"address 10\.1\.2\.3; there are: 127\.0\.0\.1 \(lo\), 10\.0\.0\.1 \(eth0\)"
    ):
        check_addresses(("eth0", "10.1.2.3"), HELD)
    with pytest.raises(FabricUnavailable, match=r"203\.0\.113\.9; there are: .*127\.0\.0\.1 \(lo\)"):
        find_placement(Wishes("127.0.0.1", ("203.0.113.9",)), [])


def test_cores_that_are_named_are_taken_as_they_are(dgx: Machine) -> None:
    assert placed(dgx, Wishes(FAR, cores=frozenset({3})), "0000:1b:00.0").cores == frozenset({3})


def test_a_gpu_that_the_machine_does_not_show_is_placed_as_the_host(dgx: Machine) -> None:
    found = placed(dgx, Wishes(FAR), "0000:77:00.0")
    assert [rail.domain for rail in found.nics] == ["mlx5_0", "mlx5_3"] and found.cores is None


def test_on_a_laptop_nothing_is_pinned(tmp_path: Path) -> None:
    laptop = Tree(tmp_path)
    laptop.write("devices/system/node/node0/cpulist", "0-1")
    laptop.interface("eth0", laptop.device("00/00:03.0", "0x020000", -1))
    assert placed(laptop.machine(), Wishes(FAR), allowed=2) == Placement((), (), None)


def test_this_machine_places_a_node() -> None:
    assert interface_addresses()["lo"] == "127.0.0.1"
    assert find_placement(Wishes("127.0.0.1", ("127.0.0.1", "lo")), []).rails == (
        Rail("127.0.0.1"),
        Rail("127.0.0.1", "lo"),
    )

"""Each device gets the NICs and cores that are nearest, fairly, on machines as they are published and on odd ones."""

from pathlib import Path

import pytest

from fabric.sysfs import Machine, cpu_list, read_machine
from fabric.topology import Distance, Level, candidates, distance, gpu_slices, host_slice, pinnable
from tests.fabric.machines import DGX_H100, Tree, dgx_h100, p4d_24xlarge, p5_48xlarge


@pytest.fixture(scope="module")
def dgx(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return dgx_h100(tmp_path_factory.mktemp("dgx")).machine()


@pytest.fixture(scope="module")
def p5(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return p5_48xlarge(tmp_path_factory.mktemp("p5")).machine()


def named(machine: Machine) -> dict[str, list[str]]:
    """GPU's bus -> names of its NICs."""
    slices = gpu_slices(machine, candidates(machine))
    return {address.split(":")[1]: [nic.name for nic in share.nics] for address, share in slices.items()}


def test_eight_gpus_with_eight_nics_have_one_each_and_leave_the_storage_cards_alone(dgx: Machine) -> None:
    assert named(dgx) == {gpu: [name] for gpu, (_, name) in DGX_H100.items()}


def test_32_efa_devices_are_four_for_each_gpu(p5: Machine) -> None:
    shares = named(p5)
    assert shares["53"] == ["rdmap79s0", "rdmap80s0", "rdmap81s0", "rdmap82s0"]
    assert shares["64"] == ["rdmap96s0", "rdmap97s0", "rdmap98s0", "rdmap99s0"]
    assert list(shares) == ["53", "64", "75", "86", "97", "a8", "b9", "ca"]
    assert len({name for share in shares.values() for name in share}) == 32


def test_a_machine_that_hides_its_switches_is_shared_out_alike_by_numa_node(tmp_path: Path, p5: Machine) -> None:
    flat = p5_48xlarge(tmp_path, bridges=False).machine()
    assert named(flat) == named(p5)
    levels = {share.distance for share in gpu_slices(flat, candidates(flat)).values()}
    assert levels == {Distance(Level.NUMA)}


def test_two_gpus_on_a_root_share_its_one_nic(tmp_path: Path) -> None:
    machine = p4d_24xlarge(tmp_path).machine()
    assert named(machine) == {"10": ["rdmap16s27"], "20": ["rdmap32s27"], "90": ["rdmap144s27"], "a0": ["rdmap160s27"]}
    assert len(machine.gpus) == 8


def test_distances_are_what_two_devices_have_in_common(dgx: Machine) -> None:
    gpu = dgx.gpus[0].device
    by_name = {nic.name: distance(dgx, gpu, nic.device) for nic in dgx.nics}
    assert by_name["mlx5_0"] == Distance(Level.SWITCH, 4)
    assert by_name["mlx5_3"] == by_name["mlx5_1"] == Distance(Level.NUMA)
    assert by_name["mlx5_11"] == Distance(Level.SYSTEM)
    assert distance(dgx, gpu, gpu) < by_name["mlx5_0"] < by_name["mlx5_3"] < by_name["mlx5_11"]


def test_every_gpu_has_its_share_of_whole_cores_on_its_own_socket(dgx: Machine) -> None:
    slices = list(gpu_slices(dgx, candidates(dgx)).values())
    assert slices[0].cores == (*range(14), *range(112, 126))
    assert slices[7].cores == (*range(98, 112), *range(210, 224))
    assert sorted(cpu for share in slices for cpu in share.cores) == list(range(224))


def test_a_gpu_whose_nic_has_no_link_takes_one_that_is_nobodys(tmp_path: Path) -> None:
    tree = dgx_h100(tmp_path)
    tree.write("class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    shares = named(tree.machine())
    assert shares["1b"] == ["mlx5_1", "mlx5_2"]
    assert shares["43"] == ["mlx5_3"]


def test_a_gpu_without_a_free_nic_shares_the_nearest(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu("10/10:01.0/11:00.0/12:00.0/13:00.0", 0)
    tree.rdma("mlx5_0", "10/10:01.0/11:00.0/12:01.0/14:00.0", 0)
    tree.gpu("20/20:01.0/21:00.0", 0)
    assert named(tree.machine()) == {"13": ["mlx5_0"], "21": ["mlx5_0"]}


def test_two_nics_are_enough_for_eight_gpus(dgx: Machine) -> None:
    slices = gpu_slices(dgx, [nic for nic in candidates(dgx) if nic.name in ("mlx5_1", "mlx5_2")])
    assert {tuple(nic.name for nic in share.nics) for share in slices.values()} == {("mlx5_1",), ("mlx5_2",)}


@pytest.mark.parametrize("numa", [-1, None])
def test_a_numa_node_that_is_not_told_is_the_only_one_there_is(tmp_path: Path, numa: int | None) -> None:
    tree = Tree(tmp_path)
    tree.gpu("10/10:00.0", numa)
    tree.rdma("mlx5_0", "20/20:00.0", numa)
    machine = tree.machine()
    assert machine.gpus[0].device.numa is None
    assert distance(machine, machine.gpus[0].device, machine.nics[0].device) == Distance(Level.SYSTEM)
    tree.numa(0, range(8), siblings_at=8)
    machine = tree.machine()
    assert distance(machine, machine.gpus[0].device, machine.nics[0].device) == Distance(Level.NUMA)
    assert gpu_slices(machine, machine.nics)["0000:10:00.0"].cores == tuple(range(16))


def test_virtual_functions_count_only_without_their_parent(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "host")
    parent = tree.rdma("mlx5_0", "10/10:00.0", 0)
    tree.rdma("mlx5_1", "10/10:00.1", 0)
    tree.link("bus/pci/devices/0000:10:00.1/physfn", parent)
    assert [nic.name for nic in tree.machine().nics] == ["mlx5_0"]
    guest = Tree(tmp_path / "guest")
    guest.rdma("mlx5_1", "10/10:00.1", None)
    assert [nic.name for nic in guest.machine().nics] == ["mlx5_1"]


def test_an_rdma_device_and_its_interface_are_one_nic(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.rdma("mlx5_0", "10/10:00.0", 0, net="ens1")
    tree.interface("eth0", tree.device("20/20:00.0", "0x020000", 0))
    machine = tree.machine()
    assert [(nic.name, nic.interfaces, nic.rdma) for nic in machine.nics] == [
        ("mlx5_0", ("ens1",), True),
        ("eth0", ("eth0",), False),
    ]
    assert [nic.name for nic in candidates(machine)] == ["mlx5_0"]
    tree.write("class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    assert [nic.name for nic in candidates(tree.machine())] == ["eth0"]


def test_an_interface_of_a_virtual_machine_belongs_to_the_pci_device_behind_it(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    (device := tree.device("00/00:03.0", "0x020000", -1) / "virtio2").mkdir()
    tree.interface("eth0", device)
    (nic,) = tree.machine().nics
    assert (nic.name, nic.device.address) == ("eth0", "0000:00:03.0")


def test_interfaces_without_a_device_and_devices_that_are_no_nics_are_left_out(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.device("10/10:00.0", "0x010802", 0)
    tree.device("11/11:00.0", "0x030200", 0, vendor="0x8086")
    tree.write("class/net/lo/operstate", "unknown")
    machine = tree.machine()
    assert (machine.gpus, machine.nics) == ((), ())


def test_a_machine_without_sysfs_is_one_of_which_nothing_is_known(tmp_path: Path) -> None:
    machine = read_machine(tmp_path / "nothing")
    assert (machine.gpus, machine.nics, machine.numa_nodes) == ((), (), ())
    share = host_slice(machine, candidates(machine), range(4))
    assert (share.nics, share.distance, share.cores) == ((), None, ())
    assert pinnable(machine, share.cores, range(4)) is None


def test_gpus_without_any_nic_still_have_cores(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.gpu("10/10:00.0", 0)
    tree.numa(0, range(8), siblings_at=8)
    share = gpu_slices(tree.machine(), [])["0000:10:00.0"]
    assert (share.nics, share.distance, len(share.cores)) == ((), None, 16)


def test_the_host_takes_the_nics_of_the_numa_nodes_it_runs_on(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.rdma("mlx5_0", "10/10:00.0", 0)
    tree.rdma("mlx5_1", "90/90:00.0", 1)
    for number in range(3):
        tree.numa(number, range(number * 4, number * 4 + 4), siblings_at=12)
    machine = tree.machine()
    nics = candidates(machine)
    assert [nic.name for nic in host_slice(machine, nics, {1, 13}).nics] == ["mlx5_0"]
    assert [nic.name for nic in host_slice(machine, nics, range(24)).nics] == ["mlx5_0", "mlx5_1"]
    far = host_slice(machine, nics, {8})
    assert ([nic.name for nic in far.nics], far.distance) == (["mlx5_0", "mlx5_1"], Distance(Level.SYSTEM))
    assert far.cores == (8, 9, 10, 11, 20, 21, 22, 23)


def test_a_thread_is_pinned_to_a_share_of_several_cores_or_not_at_all(tmp_path: Path, dgx: Machine) -> None:
    allowed = range(224)
    share = gpu_slices(dgx, candidates(dgx))["0000:1b:00.0"]
    assert pinnable(dgx, share.cores, allowed) == set(share.cores)
    assert pinnable(dgx, share.cores, range(3)) is None
    assert pinnable(dgx, share.cores, share.cores) is None
    laptop = Tree(tmp_path)
    laptop.write("devices/system/node/node0/cpulist", "0-1")
    alone = laptop.machine()
    assert pinnable(alone, host_slice(alone, [], range(2)).cores, range(2)) is None


def test_cpu_lists_are_read_as_the_kernel_writes_them() -> None:
    assert cpu_list("0-2,8,10-11\n") == [0, 1, 2, 8, 10, 11]
    assert cpu_list("") == []
    with pytest.raises(ValueError, match="x"):
        cpu_list("0-x")


def test_this_machine_is_read_whole() -> None:
    machine = read_machine()
    assert gpu_slices(machine, candidates(machine)).keys() == {gpu.device.address for gpu in machine.gpus}

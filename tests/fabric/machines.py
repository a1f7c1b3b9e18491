"""sysfs trees after published topologies.

DGX H100: 8 GPUs, each with one ConnectX-7 on its PCIe switch, four to a socket, and two dual-port cards for storage on
root complexes of their own (NVIDIA's user guide, table of network modules: mlx5_0 for GPU 0, mlx5_3 for GPU 1, ...).
p5.48xlarge: 8 GPUs, each with four EFA devices on its switch (the topology file that Amazon's NCCL plugin brings).
p4d.24xlarge: two GPUs and one EFA device on a switch.
"""

from dataclasses import dataclass
from pathlib import Path

from fabric.sysfs import Machine, read_machine

GPU, NETWORK, BRIDGE = "0x030200", "0x020000", "0x060400"


@dataclass(frozen=True)
class Tree:
    """Of files and links as Linux lays them out under `root`."""

    root: Path

    def machine(self) -> Machine:
        return read_machine(self.root)

    def write(self, path: str, text: str | int) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def link(self, path: str, target: Path) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)

    def device(self, path: str, kind: str, numa: int | None, vendor: str = "0x15b3") -> Path:
        """`path`: short addresses below the root complex, e.g. "15/15:01.0/16:00.0"."""
        complex_, *below = path.split("/")
        folder = self.root / "devices" / f"pci0000:{complex_}" / "/".join(f"0000:{part}" for part in below)
        folder.mkdir(parents=True)
        (folder / "class").write_text(kind + "\n")
        (folder / "vendor").write_text(vendor + "\n")
        if numa is not None:
            (folder / "numa_node").write_text(f"{numa}\n")
        self.link(f"bus/pci/devices/{folder.name}", folder)
        return folder

    def gpu(self, path: str, numa: int | None) -> Path:
        return self.device(path, GPU, numa, vendor="0x10de")

    def rdma(self, name: str, path: str, numa: int | None, state: str = "4: ACTIVE", net: str = "") -> Path:
        folder = self.device(path, NETWORK, numa)
        self.write(f"class/infiniband/{name}/ports/1/state", state)
        self.link(f"class/infiniband/{name}/device", folder)
        if net:
            self.interface(net, folder)
        return folder

    def interface(self, name: str, device: Path, state: str = "up") -> None:
        (device / "net" / name).mkdir(parents=True)
        (device / "net" / name / "operstate").write_text(state + "\n")
        (device / "net" / name / "device").symlink_to(device)
        self.link(f"class/net/{name}", device / "net" / name)

    def numa(self, number: int, cores: range, siblings_at: int) -> None:
        """`cores`: the first thread of each; the second one is `siblings_at` further."""
        last = cores.stop - 1
        self.write(
            f"devices/system/node/node{number}/cpulist",
            f"{cores.start}-{last},{cores.start + siblings_at}-{last + siblings_at}",
        )
        for cpu in cores:
            for thread in (cpu, cpu + siblings_at):
                siblings = f"devices/system/cpu/cpu{thread}/topology/thread_siblings_list"
                self.write(siblings, f"{cpu},{cpu + siblings_at}")


DGX_H100 = {  # GPU's bus: (its NIC's bus, name)
    "1b": ("18", "mlx5_0"),
    "43": ("40", "mlx5_3"),
    "52": ("4f", "mlx5_4"),
    "61": ("5e", "mlx5_5"),
    "9d": ("9a", "mlx5_6"),
    "c3": ("c0", "mlx5_9"),
    "d1": ("ce", "mlx5_10"),
    "df": ("dc", "mlx5_11"),
}


def dgx_h100(root: Path) -> Tree:
    tree = Tree(root)
    for index, (gpu, (nic, name)) in enumerate(DGX_H100.items()):
        base = int(nic, 16) - 3
        switch = f"{base:02x}/{base:02x}:01.0/{base + 1:02x}:00.0"
        tree.rdma(name, f"{switch}/{base + 2:02x}:00.0/{nic}:00.0", index // 4, net=f"ibp{int(nic, 16)}s0")
        tree.gpu(f"{switch}/{base + 2:02x}:02.0/{gpu}:00.0", index // 4)
    for numa, bus, first in ((0, "29", 1), (1, "aa", 7)):
        for port in range(2):
            root_bus = f"{int(bus, 16) - 1:02x}"
            tree.rdma(f"mlx5_{first + port}", f"{root_bus}/{root_bus}:01.0/{bus}:00.{port}", numa)
    for number in range(2):
        tree.numa(number, range(number * 56, number * 56 + 56), siblings_at=112)
    return tree


P5_SWITCHES = [0x45 + 17 * index for index in range(8)]


def p5_48xlarge(root: Path, bridges: bool = True) -> Tree:
    """Without `bridges`: as a virtual machine that does not show the switches, each device on a root of its own."""
    tree = Tree(root)
    for index, switch in enumerate(P5_SWITCHES):
        first = switch + 10
        under = f"{switch - 1:02x}/{switch - 1:02x}:01.0/{switch:02x}:00.0/" if bridges else ""
        for bus in range(first, first + 4):
            port = f"{switch + 1:02x}:{bus - first:02x}.0/" if bridges else f"{bus:02x}/"
            tree.rdma(f"rdmap{bus}s0", f"{under}{port}{bus:02x}:00.0", index // 4)
        port = f"{switch + 1:02x}:04.0/" if bridges else f"{first + 4:02x}/"
        tree.gpu(f"{under}{port}{first + 4:02x}:00.0", index // 4)
    for number in range(2):
        tree.numa(number, range(number * 48, number * 48 + 48), siblings_at=96)
    return tree


def p4d_24xlarge(root: Path) -> Tree:
    """As its virtual machine shows it: two GPUs and an EFA device on each root bus."""
    tree = Tree(root)
    for index, bus in enumerate(("10", "20", "90", "a0")):
        numa = index // 2
        tree.rdma(f"rdmap{int(bus, 16)}s27", f"{bus}/{bus}:1b.0", numa)
        tree.gpu(f"{bus}/{bus}:1c.0", numa)
        tree.gpu(f"{bus}/{bus}:1d.0", numa)
    for number in range(2):
        tree.numa(number, range(number * 24, number * 24 + 24), siblings_at=48)
    return tree

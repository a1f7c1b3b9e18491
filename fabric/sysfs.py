"""What Linux tells about a machine's PCI devices, NICs and cores: a pure reader of a sysfs tree, given by its root.

Nothing here is measured or opened, and what a tree lacks (containers and virtual machines hide much) is left out of
the records: a NUMA node that is not known is None, a NIC whose state is not told counts as one that works.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SYSFS = Path("/sys")

_NVIDIA = 0x10DE
_DISPLAY_CLASS = 0x03


@dataclass(frozen=True, slots=True)
class PciDevice:
    """`address`: domain:bus:device.function. `path`: its ancestors from the root complex down, and itself, as sysfs
    names them: ("pci0000:16", "0000:16:01.0", "0000:17:00.0"). `parent_function`: of a virtual function, the device
    that it is part of."""

    address: str
    path: tuple[str, ...]
    numa: int | None
    parent_function: str | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA device, by PCI address: ordinals depend on CUDA_VISIBLE_DEVICES."""

    device: PciDevice


@dataclass(frozen=True, slots=True)
class Nic:
    """`name`: the RDMA device's ("mlx5_0", "rdmap79s0"), from which libfabric makes its domain names, or that of a
    plain interface ("eth0"). `interfaces`: its network interfaces. `active`: a port of it has a link."""

    name: str
    device: PciDevice
    rdma: bool
    interfaces: tuple[str, ...]
    active: bool


@dataclass(frozen=True, slots=True)
class NumaNode:
    """`cores`: physical ones, each with the CPU numbers of its threads."""

    number: int
    cores: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Machine:
    """In order of PCI address; `nics` without those that only repeat another: a virtual function beside its parent, an
    interface of an RDMA device."""

    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    numa_nodes: tuple[NumaNode, ...]

    @cached_property
    def numa_of(self) -> dict[int, NumaNode]:
        return {node.number: node for node in self.numa_nodes}

    def numa(self, device: PciDevice) -> int | None:
        """Of the device; where there is one NUMA node only, that one."""
        if device.numa is None and len(self.numa_nodes) == 1:
            return self.numa_nodes[0].number
        return device.numa


def read_machine(root: Path = SYSFS) -> Machine:
    devices = sorted(_pci_devices(root), key=lambda device: device.address)
    gpus = [Gpu(device) for device in devices if _is_gpu(root / "bus/pci/devices" / device.address)]
    by_address = {device.address: device for device in devices}
    nics = _without_copies([*_rdma_nics(root, by_address), *_plain_nics(root, by_address)])
    in_order = sorted(nics, key=lambda nic: (nic.device.address, nic.name))
    return Machine(tuple(gpus), tuple(in_order), tuple(_numa_nodes(root)))


def cpu_list(text: str) -> list[int]:
    """ "0-2,8" as the kernel writes it: [0, 1, 2, 8]. Raises ValueError for what is none."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return sorted(numbers)


def _read(path: Path) -> str:
    """A file's text, "" where there is none or it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path, base: int = 10) -> int | None:
    try:
        return int(_read(path), base)
    except ValueError:
        return None


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


# ---- PCI ----


def _pci_devices(root: Path) -> Iterator[PciDevice]:
    for entry in _entries(root / "bus/pci/devices"):
        numa = _number(entry / "numa_node")
        parent = (entry / "physfn").resolve().name if (entry / "physfn").exists() else None
        known = numa is not None and numa >= 0
        yield PciDevice(entry.name, _pci_path(entry), numa if known else None, parent)


def _pci_path(entry: Path) -> tuple[str, ...]:
    parts = entry.resolve().parts
    roots = [index for index, part in enumerate(parts) if part.startswith("pci")]
    return parts[roots[-1] :] if roots else (entry.name,)


def _is_gpu(entry: Path) -> bool:
    kind = _number(entry / "class", 16)
    return kind is not None and kind >> 16 == _DISPLAY_CLASS and _number(entry / "vendor", 16) == _NVIDIA


# ---- NICs ----


def _behind(entry: Path, devices: dict[str, PciDevice]) -> PciDevice | None:
    """The PCI device that a class entry belongs to, maybe through others (virtio). None: it has none (veth)."""
    if not (entry / "device").exists():
        return None
    parts = reversed((entry / "device").resolve().parts)
    return next((devices[part] for part in parts if part in devices), None)


def _rdma_nics(root: Path, devices: dict[str, PciDevice]) -> Iterator[Nic]:
    for entry in _entries(root / "class/infiniband"):
        device = _behind(entry, devices)
        if device is not None:
            states = [_read(port / "state") for port in _entries(entry / "ports")]
            active = not any(states) or any("ACTIVE" in state for state in states)
            yield Nic(entry.name, device, True, tuple(_interfaces(root, device)), active)


def _plain_nics(root: Path, devices: dict[str, PciDevice]) -> Iterator[Nic]:
    for entry in _entries(root / "class/net"):
        device = _behind(entry, devices)
        if device is not None:
            yield Nic(entry.name, device, False, (entry.name,), _read(entry / "operstate") != "down")


def _interfaces(root: Path, device: PciDevice) -> list[str]:
    return [entry.name for entry in _entries(root / "bus/pci/devices" / device.address / "net")]


def _without_copies(nics: list[Nic]) -> list[Nic]:
    rdma = {nic.device.address for nic in nics if nic.rdma}
    present = {nic.device.address for nic in nics}
    return [
        nic
        for nic in nics
        if (nic.rdma or nic.device.address not in rdma) and nic.device.parent_function not in present
    ]


# ---- cores ----


def _numa_nodes(root: Path) -> Iterator[NumaNode]:
    entries = [entry for entry in _entries(root / "devices/system/node") if entry.name.removeprefix("node").isdigit()]
    nodes = {int(entry.name.removeprefix("node")): cpu_list(_read(entry / "cpulist")) for entry in entries}
    for number, cpus in sorted(nodes.items()):
        yield NumaNode(number, tuple(_cores(root, cpus)))


def _cores(root: Path, cpus: list[int]) -> list[tuple[int, ...]]:
    """Physical cores, by the threads that share one."""
    cores = set()
    for cpu in cpus:
        siblings = cpu_list(_read(root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        cores.add(tuple(siblings) or (cpu,))
    return sorted(cores)

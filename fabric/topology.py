"""Which NICs and which cores are nearest to each device. Pure: a machine's records in, slices out.

            root complex pci0000:16                root complex pci0000:3e
                    |                                      |
              root port 16:01.0                       root port 3e:01.0        GPU 0, mlx5_0   SWITCH
                    |                                      |                   GPU 0, mlx5_1   ROOT
         .------ switch ------.                         mlx5_2                 GPU 0, mlx5_2   NUMA, or SYSTEM where
       GPU 0               mlx5_0    (16:02.0: mlx5_1)                                         the sockets differ

A device takes the NICs at its own smallest distance. Those that are as near to several devices are dealt out among
them, in order of PCI address, so that eight GPUs with eight NICs have one each, and 32 NICs are four for each.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

from fabric.sysfs import Gpu, Machine, Nic, PciDevice

T = TypeVar("T")
_FEWEST_CORES = 4
"""A thread is confined to no fewer physical cores: others run there too."""


class Level(IntEnum):
    """What two devices have in common, nearest first."""

    SWITCH = 0
    ROOT = 1
    NUMA = 2
    SYSTEM = 3

    def __str__(self) -> str:
        return ("same PCIe switch", "same root complex", "same NUMA node", "across the system")[self]


@dataclass(frozen=True, slots=True, order=True)
class Distance:
    """`hops`: PCI links between the two, where they have a root complex in common."""

    level: Level
    hops: int = 0


@dataclass(frozen=True, slots=True)
class Slice:
    """A device's share of the machine. `nics`: nearest first in equal distance, by PCI address; empty: the machine has
    none. `cores`: CPU numbers near it, empty where none are known."""

    nics: tuple[Nic, ...]
    distance: Distance | None
    cores: tuple[int, ...]


def distance(machine: Machine, a: PciDevice, b: PciDevice) -> Distance:
    shared = 0
    for one, other in zip(a.path, b.path, strict=False):
        if one != other:
            break
        shared += 1
    hops = len(a.path) + len(b.path) - 2 * shared
    if shared:
        return Distance(Level.SWITCH if shared > 1 else Level.ROOT, hops)
    numa = machine.numa(a)
    return Distance(Level.NUMA if numa is not None and numa == machine.numa(b) else Level.SYSTEM)


def candidates(machine: Machine) -> list[Nic]:
    """The NICs that may carry pages: RDMA devices with a link, or if there are none plain interfaces with one."""
    active = [nic for nic in machine.nics if nic.active]
    return [nic for nic in active if nic.rdma] or active


def gpu_slices(machine: Machine, nics: Sequence[Nic]) -> dict[str, Slice]:
    """By PCI address, for every GPU of the machine: which of them this process uses does not matter, so that several
    processes divide NICs and cores alike."""
    nearest = _nearest(machine, nics)
    cores = _core_shares(machine)
    slices = {}
    for gpu in machine.gpus:
        address = gpu.device.address
        taken = nearest[address]
        least = min((distance(machine, gpu.device, nic.device) for nic in taken), default=None)
        slices[address] = Slice(tuple(taken), least, cores[address])
    return slices


def host_slice(machine: Machine, nics: Sequence[Nic], allowed: Collection[int]) -> Slice:
    """For memory of the host, by NUMA node: the nodes that the allowed CPUs are on, and their NICs; all NICs, where
    these nodes have none or NUMA nodes are not known."""
    nodes = [node for node in machine.numa_nodes if not set(allowed).isdisjoint(_threads(node.cores))]
    numbers = {node.number for node in nodes}
    near = tuple(nic for nic in nics if machine.numa(nic.device) in numbers)
    level = Distance(Level.NUMA) if near else Distance(Level.SYSTEM)
    cores = tuple(cpu for node in nodes for cpu in _threads(node.cores))
    return Slice(near or tuple(nics), level if nics else None, cores)


def pinnable(machine: Machine, cores: Sequence[int], allowed: Collection[int]) -> set[int] | None:
    """The CPUs that a slice's messenger thread is confined to, or None to leave it alone.

    The thread is kept near its NICs, on a share of several cores, never on one: nodes that share a machine without
    knowing of each other (a local cluster on a laptop) must not meet on one core. Where the share is small, or is all
    that the process may use anyway, the kernel knows better.
    """
    usable = set(cores) & set(allowed)
    whole = [core for node in machine.numa_nodes for core in node.cores if usable & set(core)]
    return usable if len(whole) >= _FEWEST_CORES and usable != set(allowed) else None


def _nearest(machine: Machine, nics: Sequence[Nic]) -> dict[str, list[Nic]]:
    """Each GPU's NICs: at its smallest distance, without those that another GPU is nearer to unless all are."""
    wanted = {gpu.device.address: _wanted(machine, gpu, nics) for gpu in machine.gpus}
    groups: dict[tuple[Nic, ...], list[str]] = {}
    for address, near in wanted.items():
        groups.setdefault(near, []).append(address)
    return {address: part for near, sharers in groups.items() for address, part in _deal(near, sharers)}


def _wanted(machine: Machine, gpu: Gpu, nics: Sequence[Nic]) -> tuple[Nic, ...]:
    distances = {nic: distance(machine, gpu.device, nic.device) for nic in nics}
    least = min(distances.values(), default=None)
    nearest = [nic for nic in nics if distances[nic] == least]
    others = [other for other in machine.gpus if other is not gpu]
    free = [nic for nic in nearest if not any(distance(machine, o.device, nic.device) < distances[nic] for o in others)]
    return tuple(free or nearest)


def _core_shares(machine: Machine) -> dict[str, tuple[int, ...]]:
    """The cores of each NUMA node, shared out among its GPUs; those of the machine where the node is not known."""
    shares: dict[str, tuple[int, ...]] = {}
    for numa in {machine.numa(gpu.device) for gpu in machine.gpus}:
        sharers = [gpu.device.address for gpu in machine.gpus if machine.numa(gpu.device) == numa]
        nodes = [machine.numa_of[numa]] if numa in machine.numa_of else machine.numa_nodes
        cores = [core for node in nodes for core in node.cores]
        shares |= {address: tuple(_threads(part)) for address, part in _deal(cores, sharers)}
    return shares


def _threads(cores: Sequence[tuple[int, ...]]) -> list[int]:
    return sorted(cpu for core in cores for cpu in core)


def _deal(items: Sequence[T], sharers: Sequence[str]) -> list[tuple[str, list[T]]]:
    """Consecutive shares that differ by one item at most; fewer items than sharers: neighbours have the same one."""
    n, k = len(items), len(sharers)
    shares = []
    for index, sharer in enumerate(sharers):
        first, end = index * n // k, (index + 1) * n // k
        shares.append((sharer, list(items[first : max(end, first + 1)])))
    return shares

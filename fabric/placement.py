"""Where a node's data plane runs: the NICs that carry its pages, and the cores of its messenger thread.

Chosen from the machine's topology for the devices whose memory is moved, or as the node's options say.
"""

import ipaddress
import os
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from fabric.errors import FabricUnavailable
from fabric.rails import Rail
from fabric.sysfs import Machine, Nic, read_machine
from fabric.topology import Slice, candidates, gpu_slices, host_slice, pinnable


@dataclass(frozen=True, slots=True)
class Placement:
    """`rails`: asked for by name, for any provider. `nics`: those found near, for providers that drive NICs; one of the
    two is empty. `cores`: for the messenger's thread; None: wherever the kernel puts it."""

    rails: tuple[Rail, ...]
    nics: tuple[Rail, ...]
    cores: frozenset[int] | None


@dataclass(frozen=True, slots=True)
class Wishes:
    """A node's options. `host`: its interface's address. `nics`: names of NICs, or addresses of interfaces; empty: what
    is near. `cores`: None: what is near, if it is a proper share."""

    host: str
    nics: tuple[str, ...] = ()
    cores: frozenset[int] | None = None


def find_placement(wishes: Wishes, devices: Sequence[str]) -> Placement:
    """On this machine. `devices`: PCI addresses of the GPUs whose memory is moved; none: the host's is. Raises
    FabricUnavailable for NICs, addresses and cores that there are none of."""
    check_addresses(wishes.nics, all_addresses())
    return place(read_machine(), wishes, devices, os.sched_getaffinity(0), interface_addresses())


def interface_addresses() -> dict[str, str]:
    """The first IPv4 address of each interface that has one."""
    found = psutil.net_if_addrs().items()
    listed = {name: [a.address for a in addresses if a.family == socket.AF_INET] for name, addresses in found}
    return {name: addresses[0] for name, addresses in listed.items() if addresses}


def all_addresses() -> dict[str, str]:
    """The interface of each address of this machine, of either family."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = psutil.net_if_addrs().items()
    return {a.address.partition("%")[0]: name for name, addresses in found for a in addresses if a.family in families}


def check_addresses(wished: Iterable[str], held: Mapping[str, str]) -> None:
    """`held`: interfaces by their addresses. Raises FabricUnavailable for an address that none of them has."""
    known = {ipaddress.ip_address(address) for address in held}
    for name in wished:
        if _is_address(name) and ipaddress.ip_address(name) not in known:
            have = ", ".join(f"{address} ({interface})" for address, interface in held.items()) or "none"
            raise FabricUnavailable(f"--nics: no interface has the address {name}; there are: {have}")


def place(
    machine: Machine, wishes: Wishes, devices: Sequence[str], allowed: Collection[int], addresses: Mapping[str, str]
) -> Placement:
    """`allowed`: CPUs that the process may run on. `addresses`: of interfaces. Raises as `find_placement` does."""
    named = [name for name in wishes.nics if not _is_address(name)]
    known = {nic.name: nic for nic in machine.nics}
    if unknown := [name for name in named if name not in known and name not in addresses]:
        have = ", ".join(dict.fromkeys([*known, *addresses])) or "none"
        raise FabricUnavailable(f"--nics: no NIC or interface is called {unknown[0]}; there are: {have}")
    rails = tuple(_named_rail(name, known.get(name), wishes.host, addresses) for name in wishes.nics)
    slices = _slices(machine, candidates(machine), devices, allowed)
    near: dict[Nic, None] = dict.fromkeys(nic for share in slices for nic in share.nics if nic.rdma)
    local = _is_address(wishes.host) and ipaddress.ip_address(wishes.host).is_loopback
    nics = [] if rails or local else _reachable(list(near), addresses)
    found = tuple(_rail(nic, wishes.host, addresses) for nic in nics)
    return Placement(rails, found, _cores(machine, wishes, slices, allowed))


def _reachable(nics: Sequence[Nic], addresses: Mapping[str, str]) -> Sequence[Nic]:
    """Those with an address, which verbs needs; where none has one (EFA needs none), all."""
    return [nic for nic in nics if any(interface in addresses for interface in nic.interfaces)] or nics


def _slices(machine: Machine, nics: Sequence[Nic], devices: Sequence[str], allowed: Collection[int]) -> list[Slice]:
    """Of the devices that the machine shows; without any, the host's."""
    of_gpus = gpu_slices(machine, nics)
    return [of_gpus[device] for device in devices if device in of_gpus] or [host_slice(machine, nics, allowed)]


def _cores(
    machine: Machine, wishes: Wishes, slices: Sequence[Slice], allowed: Collection[int]
) -> frozenset[int] | None:
    if wishes.cores is not None:
        if not wishes.cores <= set(allowed):
            extra = sorted(wishes.cores - set(allowed))
            raise FabricUnavailable(f"--cores: this process may not run on {extra}, only on {sorted(allowed)}")
        return wishes.cores
    near = pinnable(machine, [cpu for share in slices for cpu in share.cores], allowed)
    return frozenset(near) if near else None


def _named_rail(name: str, nic: Nic | None, host: str, addresses: Mapping[str, str]) -> Rail:
    if nic is not None:
        return _rail(nic, host, addresses)
    return Rail(name) if _is_address(name) else Rail(addresses[name], name)


def _rail(nic: Nic, host: str, addresses: Mapping[str, str]) -> Rail:
    """By the address of its interface; a NIC without one (EFA) needs none."""
    own = [addresses[interface] for interface in nic.interfaces if interface in addresses]
    return Rail(own[0] if own else host, nic.name)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True

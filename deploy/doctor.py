"""`kvferry doctor`: can this machine run a node? One line per finding, each with its remedy."""

import os
import resource
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path

import psutil

from deploy.console import say
from fabric.errors import FabricError
from fabric.sysfs import Machine, read_machine
from fabric.topology import Level as Nearness
from fabric.topology import Slice, candidates, gpu_slices, host_slice

MIB = 1 << 20
WANTED_LIBFABRIC = (1, 19)
WANTED_FILES = 4096
WANTED_MEMORY = 2048 * MIB
WANTED_SHM = 64 * MIB
LOCKING_PROVIDERS = ("efa", "verbs")
"""Providers whose NIC pins registered memory, so that the limit on locked memory counts."""


class Level(Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy`: what to do, "" where nothing is wrong."""

    level: Level
    subject: str
    fact: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.level.value:<5}{self.subject:<11}{self.fact}"
        return f"{line}\n{'':<16}-> {self.remedy}" if self.remedy else line


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Finding:
    fact = "{}.{}".format(*version)
    if version < (3, 11):
        return Finding(Level.FAIL, "python", fact, "install Python 3.11 or newer and make the environment anew")
    return Finding(Level.OK, "python", fact)


def check_torch() -> Finding:
    try:
        return Finding(Level.OK, "torch", installed_version("torch"))
    except PackageNotFoundError:
        return Finding(Level.FAIL, "torch", "not installed", "nodes need it: pip install '.[node]' in the checkout")


def check_fabric(memlock: int) -> list[Finding]:
    """The C core, libfabric's version, its providers on the loopback interface, and what they may lock."""
    try:
        from fabric.libfabric import providers, version

        names = providers()
        return [check_libfabric(version()), check_providers(names), check_memlock(memlock, names)]
    except (FabricError, ImportError) as error:
        remedy = (
            "nodes need it (a router does not): install libfabric's headers and gcc (Debian: apt-get install "
            "libfabric-dev gcc), then `python -m fabric._build` in the checkout, or reinstall kvferry"
        )
        return [Finding(Level.FAIL, "libfabric", f"cannot be used: {error}", remedy)]


def check_libfabric(version: str) -> Finding:
    if tuple(int(part) for part in version.split(".")[:2]) >= WANTED_LIBFABRIC:
        return Finding(Level.OK, "libfabric", version)
    remedy = (
        "good for TCP; EFA and ConnectX want 1.19 or newer, e.g. from the NIC vendor's installer: "
        "name it through CFLAGS and LDFLAGS and run `make fabric`"
    )
    return Finding(Level.WARN, "libfabric", version, remedy)


def check_providers(names: Sequence[str]) -> Finding:
    if not names:
        return Finding(Level.FAIL, "providers", "none", "see `fi_info`; the packages of libfabric bring tcp at least")
    fact = ", ".join(names) + " (best first)"
    if names[0].startswith(LOCKING_PROVIDERS):
        return Finding(Level.OK, "providers", fact)
    return Finding(Level.WARN, "providers", fact, "no RDMA device is visible: KV crosses TCP sockets")


def check_memlock(limit: int, providers: Sequence[str]) -> Finding:
    """`limit` in bytes, -1 for none. Fatal only where a NIC must pin the pool."""
    if limit == resource.RLIM_INFINITY:
        return Finding(Level.OK, "memlock", "unlimited")
    fact = f"{limit // MIB} MiB"
    if not any(name.startswith(LOCKING_PROVIDERS) for name in providers):
        return Finding(Level.OK, "memlock", f"{fact} (TCP providers pin nothing)")
    return Finding(Level.FAIL, "memlock", fact, "`ulimit -l unlimited`, LimitMEMLOCK=infinity, or --ulimit memlock=-1")


def check_open_files(limit: int) -> Finding:
    if limit == resource.RLIM_INFINITY or limit >= WANTED_FILES:
        return Finding(Level.OK, "open files", str(limit))
    return Finding(Level.WARN, "open files", str(limit), "`ulimit -n 65536` before a busy router or many peers")


def check_cores(cores: int) -> Finding:
    if cores >= 2:
        return Finding(Level.OK, "cores", str(cores))
    return Finding(Level.WARN, "cores", str(cores), "engine and KV messenger share one core: give a node two or more")


def check_memory(available: int) -> Finding:
    fact = f"{available // MIB} MiB available"
    if available >= WANTED_MEMORY:
        return Finding(Level.OK, "memory", fact)
    return Finding(Level.WARN, "memory", fact, "a demo node takes 1.5 GiB: start fewer nodes")


def check_shm(folder: Path = Path("/dev/shm")) -> Finding:
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        return Finding(Level.FAIL, "shm", f"{folder} is missing or read-only", f"mount a tmpfs on {folder}")
    free = shutil.disk_usage(folder).free
    if free < WANTED_SHM:
        return Finding(Level.WARN, "shm", f"{free // MIB} MiB free", "in a container: --shm-size=1g")
    return Finding(Level.OK, "shm", f"{free // MIB} MiB free in {folder}")


def check_topology(machine: Machine, allowed: Collection[int]) -> list[Finding]:
    """Which NICs and cores a node's devices would use: a line for each GPU, or one for the host's memory."""
    nics = candidates(machine)
    if not machine.gpus:
        return [check_slice("nics", "host memory", host_slice(machine, nics, allowed))]
    slices = gpu_slices(machine, nics).items()
    return [check_slice(f"gpu {index}", address, share) for index, (address, share) in enumerate(slices)]


def check_slice(subject: str, device: str, share: Slice) -> Finding:
    fact = f"{device}: {', '.join(nic.name for nic in share.nics) or 'no NIC'}"
    if share.distance is not None:
        fact += f" ({share.distance.level})"
    if share.cores:
        fact += f", cores {in_runs(share.cores)}"
    if share.distance is None or share.distance.level is not Nearness.SYSTEM:
        return Finding(Level.OK, subject, fact)
    remedy = "no NIC is known to be near: start the node where there is one, or name others with --nics"
    return Finding(Level.WARN, subject, fact, remedy)


def in_runs(numbers: Sequence[int]) -> str:
    """Ascending ones, as the kernel writes them: "0-13,112-125"."""
    firsts = [number for number in numbers if number - 1 not in numbers]
    lasts = [number for number in numbers if number + 1 not in numbers]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))


def examine(router_only: bool) -> Iterable[Finding]:
    """All findings, cheap ones first. `router_only` leaves out what only a node needs."""
    yield check_python()
    yield check_cores(len(os.sched_getaffinity(0)))
    yield check_memory(psutil.virtual_memory().available)
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if router_only:
        return
    yield check_shm()
    yield check_torch()
    yield from check_fabric(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    yield from check_topology(read_machine(), os.sched_getaffinity(0))


def main(router_only: bool, examine: Callable[[bool], Iterable[Finding]] = examine) -> int:
    """0 if nothing failed; warnings are for the reader to judge."""
    findings = list(examine(router_only))
    for finding in findings:
        say(str(finding))
    return 1 if any(finding.level is Level.FAIL for finding in findings) else 0

"""How much memory a device has left, now. Ask after the model is loaded."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def available_memory(device: torch.device) -> int:
    """Bytes that this process may still take without anybody swapping or being killed."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return min([psutil.virtual_memory().available, *cgroup_headrooms()])


def cgroup_headrooms(own: Path = _OWN_CGROUPS, mount: Path = _CGROUPS) -> list[int]:
    """What the limits of this process's control groups, each within its parent, leave; of both versions. Inside a
    container the group's own folder is often not there, but the mount point is then the group."""
    if not own.is_file():
        return []
    found = []
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found += [_headroom_v2(folder) for folder in _up(mount, path)]
        elif "memory" in controllers.split(","):
            found += [_headroom_v1(folder) for folder in _up(mount / "memory", path)]
    return [headroom for headroom in found if headroom is not None]


def _up(mount: Path, path: str) -> Iterator[Path]:
    """From the group's folder to the mount point."""
    folder = mount / path.lstrip("/")
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


def _headroom_v2(folder: Path) -> int | None:
    return _headroom(folder / "memory.max", folder / "memory.current", folder / "memory.stat", "inactive_file")


def _headroom_v1(folder: Path) -> int | None:
    usage = folder / "memory.usage_in_bytes"
    return _headroom(folder / "memory.limit_in_bytes", usage, folder / "memory.stat", "total_inactive_file")


def _headroom(limit: Path, usage: Path, stat: Path, reclaimable: str) -> int | None:
    """None without a limit. File pages that nobody used lately give way, so they do not count as used."""
    if not (limit.is_file() and usage.is_file() and stat.is_file()):
        return None
    most = limit.read_text().strip()
    if most == "max":
        return None
    counts = dict(line.split() for line in stat.read_text().splitlines())
    used = int(usage.read_text()) - int(counts.get(reclaimable, 0))
    return max(0, int(most) - used)

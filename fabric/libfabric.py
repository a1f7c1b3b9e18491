"""Opening a transfer engine over libfabric.

A provider is chosen once, when the engine is opened: the first of `PREFERENCE` that opens on the interface, or
exactly the one that was named. The data plane of the tcp-like providers is not authenticated: it is bound to one
interface, and a peer needs a random 64-bit key to write.

Beside the provider an engine may have the same-host path (see `fabric.same_host`): a landing waits for its peer on
both ways, and `connect` takes the shared one where the peer is on this host and all of our memory is shared.
"""

from collections.abc import Sequence
from typing import Any

from fabric.errors import FabricUnavailable
from fabric.limits import MAX_RAILS, Limits
from fabric.native import core, describe
from fabric.native_engine import LibfabricEngine
from fabric.rails import Rail
from fabric.same_host import SAME_HOST

__all__ = ["NIC_PROVIDERS", "PREFERENCE", "LibfabricEngine", "open_engine", "providers", "version"]

NIC_PROVIDERS = ("efa", "verbs;ofi_rxm")
"""Those that drive a NIC themselves."""

PREFERENCE = ("efa", "verbs;ofi_rxm", "tcp", "net", "tcp;ofi_rxm")
"""Best first. NICs before sockets; native reliable-datagram endpoints before the layered ones."""


def version() -> str:
    """libfabric's version, e.g. "1.17". Raises FabricUnavailable."""
    number = core().lib.kf_libfabric_version()
    return f"{number >> 16}.{number & 0xFFFF}"


def providers(node: str = "127.0.0.1") -> list[str]:
    """The providers that can serve us on the interface that has `node`, best first. Raises FabricUnavailable."""
    ffi, lib = core()
    names = ffi.new("char[]", 4096)
    found = lib.kf_providers(node.encode(), names, 4096)
    listed = ffi.string(names).decode().split() if found > 0 else []
    return [name for name in PREFERENCE if name in listed]


def open_engine(
    provider: str | None = None,
    node: str = "127.0.0.1",
    limits: Limits | None = None,
    device_memory: bool = False,
    same_host: bool = False,
    rails: Sequence[Rail] = (),
    nics: Sequence[Rail] = (),
) -> LibfabricEngine:
    """The best provider that opens on every one of `rails`, or exactly `provider`; without rails, on `nics` where it
    drives NICs itself, else on `node`. `device_memory`: one that also takes memory of CUDA devices (FI_HMEM).
    `same_host`: beside it, shared memory for peers on this host; SAME_HOST as the provider is that alone. Raises
    FabricUnavailable with the reasons."""
    if provider == SAME_HOST:
        device_memory, same_host = False, True
    if max(len(rails), len(nics)) > MAX_RAILS:
        raise FabricUnavailable(f"more NICs than the {MAX_RAILS} that work together: name fewer with --nics")
    reasons, asked, bounds = [], rails or [Rail(node)], limits or Limits()
    for name in [provider] if provider else PREFERENCE:
        near = [nics] if nics and not rails and name in NIC_PROVIDERS else []
        for used in [[]] if name == SAME_HOST else [*near, asked]:
            raw, reason = _open_core(name, used, bounds, device_memory)
            if raw is not None:
                return LibfabricEngine(raw, name, same_host, [str(rail) for rail in used], bounds)
            reasons.append(f"{name} on {', '.join(map(str, used)) or 'this host'}: {reason}")
    lacking = "provider that takes memory of CUDA devices" if device_memory else "usable provider"
    others = f"; usable there: {', '.join(providers(asked[0].node)) or 'none'}" if provider else ""
    raise FabricUnavailable(
        f"libfabric {version()} offers no {lacking} on {', '.join(map(str, asked))} ({'; '.join(reasons)}){others}"
    )


def _open_core(provider: str, rails: Sequence[Rail], limits: Limits, device_memory: bool) -> tuple[Any, str]:
    ffi, lib = core()
    name = ffi.NULL if provider == SAME_HOST else ffi.new("char[]", provider.encode())
    names = ffi.new("kf_rail_name[]", len(rails))
    kept = []  # the core copies before the call returns
    for rail, of_rail in zip(rails, names, strict=True):
        kept.append((ffi.new("char[]", rail.node.encode()), ffi.new("char[]", (rail.domain or "").encode())))
        of_rail.node, of_rail.domain = kept[-1][0], kept[-1][1] if rail.domain else ffi.NULL
    options = ffi.new("kf_options *")
    options.provider, options.rails, options.rail_count = name, names, len(rails)
    options.endpoint_cap, options.domain_cap = limits.endpoint_writes, limits.domain_writes
    options.device_memory = device_memory
    options.connect_timeout_ns = int(limits.connect_seconds * 1e9)
    error = ffi.new("kf_error *")
    raw = lib.kf_open(options, error)
    return (raw, "") if raw != ffi.NULL else (None, describe(error))

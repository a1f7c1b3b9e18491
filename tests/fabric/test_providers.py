"""Choosing a provider: the best that opens, or exactly the one that was named, or the reason."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fabric import native
from fabric.errors import FabricError, FabricUnavailable, FabricUsageError, OperationError, RegistrationFailed
from fabric.libfabric import PREFERENCE, open_engine, providers, version


def test_the_version_and_the_providers_are_known() -> None:
    major, minor = map(int, version().split("."))
    assert (major, minor) >= (1, 15)
    found = providers()
    assert {"net", "tcp;ofi_rxm"} <= set(found) or "tcp" in found
    assert found == [name for name in PREFERENCE if name in found]


def test_the_best_provider_is_taken_when_none_is_named() -> None:
    engine = open_engine()
    assert engine.provider == providers()[0]
    engine.close()


def test_a_named_provider_is_taken_exactly(provider: str) -> None:
    engine = open_engine(provider)
    assert engine.provider == provider
    assert engine.delivery_complete
    assert engine.fence_needs_dead_peer(engine.open_landing("peer")) == (provider == "tcp;ofi_rxm")
    engine.close()


@pytest.mark.parametrize("name", ["nonsense", "efa", "verbs"])
def test_a_named_provider_that_is_missing_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(FabricUnavailable, match=rf"{name}.*usable there: .*{providers()[0]}"):
        open_engine(name)


def test_an_interface_that_does_not_exist_is_refused() -> None:
    with pytest.raises(FabricUnavailable, match=r"203\.0\.113\.9"):
        open_engine("net", node="203.0.113.9")


def test_where_every_provider_failed_none_is_called_usable() -> None:
    with pytest.raises(FabricUnavailable, match=r"203\.0\.113\.9") as refused:
        open_engine(node="203.0.113.9")
    assert "usable there" not in str(refused.value)


def test_endpoints_are_bound_to_the_interface(provider: str) -> None:
    engine = open_engine(provider, node="127.0.0.1")
    address = engine.open_landing("peer").address
    assert bytes([127, 0, 0, 1]) in address
    engine.close()


def test_keys_are_random(provider: str) -> None:
    engine = open_engine(provider)
    data = bytearray(4096)
    ffi = native.core().ffi
    at = int(ffi.cast("uintptr_t", ffi.from_buffer(data)))
    keys = {engine.register(at, 4096).remote.keys[0].key for _ in range(8)}
    assert len(keys) == 8 and max(keys) > 1 << 32
    engine.close()


ASK_ALL = """
from fabric.errors import FabricUnavailable
from fabric.libfabric import open_engine, providers, version
for call in (version, providers, open_engine):
    try:
        call()
    except FabricUnavailable as error:
        print(error)
"""


def test_without_the_extension_the_remedy_is_named(tmp_path: Path) -> None:
    """Another Python, with a copy of the package in which nothing was compiled, and nothing installed (-S)."""
    not_compiled = shutil.ignore_patterns("_core*", "core", "__pycache__")
    shutil.copytree(Path(native.__file__).parent, tmp_path / "fabric", ignore=not_compiled)
    command = [sys.executable, "-S", "-c", ASK_ALL]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    asked = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert asked.returncode == 0, asked.stderr
    assert [line.count("libfabric-dev") for line in asked.stdout.splitlines()] == [1, 1, 1]


def test_errors_are_one_tree_and_operation_errors_say_all_they_know() -> None:
    for kind in (FabricUnavailable, FabricUsageError, RegistrationFailed):
        assert issubclass(kind, FabricError)
    error = OperationError("fi_cq_read", 104, "Connection reset by peer", "", "decode-1")
    assert str(error) == "fi_cq_read to decode-1: Connection reset by peer [104]"
    assert "why" in str(OperationError("fi_cq_read", 5, "I/O", "why", "p"))

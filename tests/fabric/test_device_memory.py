"""Registration of CUDA memory: which forms are tried, in which order, with which words it is refused.

No provider here takes such memory, so the core is compiled with a scripted one; and with headers as those of libfabric
1.20 and later, which know dmabuf, where the installed ones are older.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from fabric import _build
from fabric.errors import FabricUnavailable, FabricUsageError
from fabric.libfabric import open_engine
from tests.fabric.conftest import Fabric
from tests.fabric.party import Party

HERE = Path(__file__).parent
HEADERS = Path("/usr/include/rdma")
DMABUF = """\
#define FI_MR_DMABUF (1ULL << 40)
struct fi_mr_dmabuf { int fd; uint64_t offset; size_t len; void *base_addr; };
struct fi_mr_attr {
    union { const struct iovec *mr_iov; const struct fi_mr_dmabuf *dmabuf; };
"""
ASKED = "0x200000 5000 cuda=1 device=3 key=0x2345 remote=1"
BY_ADDRESS, BY_DMABUF = f"address {ASKED}", f"dmabuf {ASKED}"

Run = Callable[..., list[str]]


def knows_dmabuf() -> bool:
    return "FI_MR_DMABUF" in (HEADERS / "fi_domain.h").read_text()


def with_dmabuf(folder: Path) -> Path:
    """The installed headers, or copies of them in which the newer registration is declared."""
    if knows_dmabuf():
        return HEADERS.parent
    shutil.copytree(HEADERS, folder / "rdma")
    declared = (folder / "rdma" / "fi_domain.h").read_text()
    old = "struct fi_mr_attr {\n\tconst struct iovec\t*mr_iov;\n"
    assert old in declared
    (folder / "rdma" / "fi_domain.h").write_text(declared.replace(old, DMABUF))
    return folder


def compiled(folder: Path, headers: Path) -> Run:
    """The core with the script; a run of it is told where the fake driver is, or that there is none."""
    core = _build.ROOT / _build.CORE
    sources = [HERE / "scripted_registration.c", *(core / f"{name}.c" for name in _build.SOURCES)]
    flags = ["-O0", "-std=gnu11", f"-I{core}", f"-I{headers}", *shlex.split(os.environ.get("CFLAGS", ""))]
    libraries = [*shlex.split(os.environ.get("LDFLAGS", "")), "-lfabric", "-ldl", "-lpthread"]
    program, driver = folder / "scripted", folder / "driver"
    driver.mkdir()
    subprocess.run(["cc", *flags, *map(str, sources), "-o", str(program), *libraries], check=True, timeout=60)
    fake = ["-shared", "-fPIC", str(HERE / "fake_cuda_driver.c"), "-o", str(driver / "libcuda.so.1")]
    subprocess.run(["cc", *fake], check=True, timeout=60)

    def run(*arguments: str, has_driver: bool = True) -> list[str]:
        environment = {**os.environ, "LD_LIBRARY_PATH": str(driver if has_driver else folder)}
        done = subprocess.run(
            [program, *arguments], env=environment, capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout.splitlines()

    return run


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("newer")
    return compiled(folder, with_dmabuf(folder))


def test_device_memory_goes_to_the_nic_by_dmabuf_and_the_descriptor_is_closed(newer: Run) -> None:
    assert newer() == [BY_DMABUF, "registered key=77 base=0x200000 dmabuf=1"]


def test_a_provider_that_refuses_the_dmabuf_is_given_the_address(newer: Run) -> None:
    assert newer("refuse-dmabuf") == [BY_DMABUF, BY_ADDRESS, "registered key=77 base=0x200000 dmabuf=0"]


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a driver")
def test_without_a_driver_that_exports_pages_the_address_is_given(newer: Run) -> None:
    assert newer(has_driver=False) == [BY_ADDRESS, "registered key=77 base=0x200000 dmabuf=0"]


def test_a_provider_that_refuses_both_refuses_the_memory(newer: Run) -> None:
    assert newer("refuse-dmabuf", "refuse-address") == [BY_DMABUF, BY_ADDRESS, "refused fi_mr_regattr 95"]


def test_a_libfabric_without_dmabuf_is_given_the_address(tmp_path: Path) -> None:
    if knows_dmabuf():
        pytest.skip("the installed libfabric knows dmabuf")
    run = compiled(tmp_path, HEADERS.parent)
    assert run() == [BY_ADDRESS, "registered key=77 base=0x200000 dmabuf=0"]


def test_an_engine_that_was_not_opened_for_it_refuses_device_memory(fabric: Fabric) -> None:
    engine = fabric.party().engine
    with pytest.raises(FabricUsageError, match=r"CUDA devices|memories of the host"):
        engine.register(1 << 21, 4096, device=0)
    assert engine.gauges().regions == 0


def test_memory_of_the_host_is_given_by_address(provider: str) -> None:
    with closing(open_engine(provider)) as engine:
        _, region = Party(engine).memory(4096)
        assert not engine.device_memory and not engine.is_dmabuf(region)
        engine.deregister(region)
        with pytest.raises(FabricUsageError, match="not registered here"):
            engine.is_dmabuf(region)


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there may be a provider that takes it")
@pytest.mark.parametrize("name", [None, "net"])
def test_without_a_provider_that_takes_device_memory_none_is_opened(name: str | None) -> None:
    with pytest.raises(
        FabricUnavailable, match=r"no provider that takes memory of CUDA devices.*net on .*: fi_getinfo\(FI_HMEM"
    ):
        open_engine(name, device_memory=True)

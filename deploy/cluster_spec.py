"""What a local cluster consists of, and the command line of each of its processes."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from protocol.context import context_names

Programs = Mapping[str, Sequence[str]]

PROGRAMS: Programs = {
    "router": (sys.executable, "-m", "router"),
    "prefill": (sys.executable, "-m", "prefill_node"),
    "decode": (sys.executable, "-m", "decode_node"),
}


START_TIMEOUT_S = 180.0
"""Weights are read from a cold disk by several nodes at once."""
GRACE_S = 5
"""For requests that still run when the cluster is told to stop: whoever types `down` means soon."""


class SpecError(ValueError):
    """Such a cluster cannot be started; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Division:
    """How a role's nodes use their devices: `dp` engines, the model of each divided among `tp` devices."""

    tp: int = 1
    dp: int = 1

    @property
    def devices(self) -> int:
        return self.tp * self.dp


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """`port`: the router's, 0 takes any. `provider`: libfabric's name, None for the best there is. `same_host`: nodes
    move KV through shared memory. `local_prefill`: decode nodes compute prompts themselves. `context`, `debug_pages`:
    of the nodes. `start_timeout_s`: for the router, and then for all nodes, to be ready. The last three are None where
    the node's own default is wanted."""

    model: Path
    prefill: int = 1
    decode: int = 3
    host: str = "127.0.0.1"
    port: int = 8000
    provider: str | None = None
    same_host: bool = True
    local_prefill: bool = False
    prefill_division: Division = Division()
    decode_division: Division = Division()
    context: str | None = None
    debug_pages: bool = False
    start_timeout_s: float = START_TIMEOUT_S
    page_size: int | None = None
    num_blocks: int | None = None
    max_batch_tokens: int | None = None

    def check(self) -> None:
        """Raises SpecError."""
        if not (self.model / "config.json").is_file():
            raise SpecError(
                f"{self.model} is no Hugging Face model folder (config.json is missing): "
                "give one with --model, or fetch the demo model with `make setup`"
            )
        if self.decode < 1:
            raise SpecError("a cluster needs at least one decode node")
        if self.prefill < 1 and not self.local_prefill:
            raise SpecError("without a prefill node the decode nodes need --local-prefill")
        for role in PROGRAMS.keys() - {"router"}:
            for option, count in asdict(self.division(role)).items():
                if count < 1:
                    raise SpecError(f"--{role}-{option} must be at least 1, not {count}")
            check_division(self.model, self.division(role).tp, f"--{role}-tp")
        self._check_numbers()

    def _check_numbers(self) -> None:
        """As the processes would, but at once and in the words of this command."""
        if not 0 <= self.port < 1 << 16:
            raise SpecError(f"--port {self.port} is none: 0 to 65535, 0 takes any free one")
        settings = {"page_size": self.page_size, "num_blocks": self.num_blocks}
        check_settings({name: value for name, value in settings.items() if value is not None})
        try:
            context_names(self.context or "")
        except ValueError as error:
            raise SpecError(f"--context: {error}") from error

    def division(self, role: str) -> Division:
        return self.prefill_division if role == "prefill" else self.decode_division

    @property
    def nodes(self) -> list[tuple[str, str]]:
        """(role, name) of every node, in starting order."""
        prefills = [("prefill", f"prefill-{index}") for index in range(self.prefill)]
        return prefills + [("decode", f"decode-{index}") for index in range(self.decode)]


def check_division(model: Path, tp: int, option: str) -> None:
    """Raises SpecError where the model cannot be divided so. What its config.json leaves to defaults, nodes judge."""
    from engine.errors import UnsupportedModel  # not before it is needed: other commands do without an engine
    from engine.tensor_parallel import check_divisible

    try:
        check_divisible(SimpleNamespace(**json.loads((model / "config.json").read_bytes())), tp, option)
    except UnsupportedModel as error:
        raise SpecError(str(error)) from error
    except (AttributeError, TypeError, ValueError):
        return


def check_settings(settings: Mapping[str, Any]) -> None:
    """Of engines. Raises SpecError."""
    from engine.config import ContinuousBatchingConfig  # as above

    try:
        ContinuousBatchingConfig(**settings)
    except ValueError as error:
        option, said = str(error).split(" ", 1)
        raise SpecError(f"--{option.replace('_', '-')} {said}") from error


def router_command(spec: ClusterSpec, key: Path, programs: Programs = PROGRAMS) -> list[str]:
    places = ["--host", spec.host, "--port", str(spec.port), "--node-host", spec.host, "--node-port", "0"]
    places += ["--grace", str(GRACE_S)]
    return [*programs["router"], "--model", str(spec.model), "--cluster-key", str(key), *places]


def node_command(
    spec: ClusterSpec, role: str, name: str, nodes_address: str, key: Path, programs: Programs = PROGRAMS
) -> list[str]:
    command = [*programs[role], "--model", str(spec.model), "--router", nodes_address]
    command += ["--cluster-key", str(key), "--name", name, "--host", spec.host, "--threads", str(threads(spec, role))]
    command += ["--drain", str(GRACE_S)]
    if not spec.same_host:
        command.append("--no-same-host")
    if spec.debug_pages:
        command.append("--debug-pages")
    if role == "decode" and spec.local_prefill:
        command.append("--local-prefill")
    for option, count in asdict(spec.division(role)).items():
        if count > 1:
            command += [f"--{option}", str(count)]
    settings = {
        "--provider": spec.provider,
        "--context": spec.context,
        "--page-size": spec.page_size,
        "--num-blocks": spec.num_blocks,
        "--max-batch-tokens": spec.max_batch_tokens,
    }
    for option, value in settings.items():
        if value is not None:
            command += [option, str(value)]
    return command


def threads(spec: ClusterSpec, role: str) -> int:
    """Compute threads per device. Prefill is compute-bound and gets all cores; decode nodes share them evenly."""
    cores = len(os.sched_getaffinity(0))
    nodes = spec.prefill if role == "prefill" else spec.decode
    return max(1, cores // (nodes * spec.division(role).devices))


def environment() -> dict[str, str]:
    """For every process. Idle OpenMP threads that spin would take the cores from the other nodes on this machine."""
    return {"OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}

"""The record of a running cluster, so that `down` stops exactly the processes that `up` started."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deploy.process import ProcessId

FILE = "cluster.json"


class StateError(ValueError):
    """The record of the running cluster cannot be read; the message names the file."""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """`launcher` supervises `members` (name -> process). `endpoint` is "" until every node is ready."""

    launcher: ProcessId
    members: dict[str, ProcessId]
    endpoint: str
    model: str

    @property
    def ready(self) -> bool:
        return self.endpoint != ""


def write_state(run_dir: Path, state: ClusterState) -> None:
    """Whole or not at all: a reader never sees half a file."""
    run_dir.mkdir(parents=True, exist_ok=True)
    descriptor, scratch = tempfile.mkstemp(dir=run_dir, prefix=FILE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(state))
    os.replace(scratch, run_dir / FILE)


def read_state(run_dir: Path) -> ClusterState | None:
    """None where no cluster is recorded. Raises StateError on a file that is not ours."""
    try:
        return msgspec.json.decode((run_dir / FILE).read_bytes(), type=ClusterState)
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, OSError) as error:
        raise StateError(f"{run_dir / FILE} does not record a cluster ({error}): remove it") from error


def remove_state(run_dir: Path) -> None:
    (run_dir / FILE).unlink(missing_ok=True)

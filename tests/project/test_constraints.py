"""What `make setup` installs is pinned, whole."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return {normal(name): version for name, version in (line.split("==") for line in lines)}


def required(*extras: str) -> set[str]:
    """Names of what the base and these extras require, extras of our own followed."""
    names: set[str] = set()
    for requirement in [*PROJECT["dependencies"], *(r for e in extras for r in PROJECT["optional-dependencies"][e])]:
        own = re.match(r"kvferry\[(.*)\]", requirement)
        names |= required(*own[1].split(",")) if own else {normal(re.split(r"[<>=\[ ]", requirement)[0])}
    return names


def test_everything_the_tests_and_the_demo_require_is_pinned() -> None:
    assert required("dev") <= set(pins())


def test_torch_is_pinned_without_a_local_version_so_that_any_index_serves_it() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", pins()["torch"])

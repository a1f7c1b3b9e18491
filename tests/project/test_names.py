"""Bare import names are shared with all of PyPI (its SSH tool is called fabric, too): ours must be ours."""

import importlib.metadata
import importlib.util
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PROJECT["tool"]["setuptools"]["packages"]
NAMES = sorted({package.partition(".")[0] for package in PACKAGES})


@pytest.mark.parametrize("name", NAMES)
def test_an_import_name_belongs_to_kvferry_alone(name: str) -> None:
    assert set(importlib.metadata.packages_distributions()[name]) == {"kvferry"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_imported_from_this_checkout(package: str) -> None:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin == str(ROOT / package.replace(".", "/") / "__init__.py")


@pytest.mark.parametrize("name", NAMES)
def test_every_folder_of_modules_is_listed(name: str) -> None:
    folders = {path.parent.relative_to(ROOT).as_posix().replace("/", ".") for path in (ROOT / name).rglob("*.py")}
    assert folders <= set(PACKAGES)

"""Who may import whom: the one table, held against every import statement in the tree."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NODE = {"protocol", "engine", "kv_messenger", "fabric"}
ALLOWED: dict[str, set[str]] = {
    "protocol": set(),
    "fabric": set(),
    "engine": {"protocol"},
    "kv_messenger": {"protocol", "fabric"},
    "router": {"protocol"},
    "prefill_node": NODE,
    "decode_node": NODE,
}
EVERYONE = {*ALLOWED, "deploy", "bench"}
WITHOUT_TORCH = {"protocol", "fabric", "kv_messenger", "router"}


def imports(package: str) -> Iterator[tuple[str, str]]:
    """(where, imported top-level name) of every import, also of those inside functions."""
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""] if node.level == 0 else [package]
            else:
                continue
            yield from ((f"{path.relative_to(ROOT)}:{node.lineno}", name.partition(".")[0]) for name in names)


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_imports_only_the_layers_below_it(package: str) -> None:
    ours = [(where, name) for where, name in imports(package) if name in EVERYONE | {"tests"}]
    assert [(where, name) for where, name in ours if name not in ALLOWED[package] | {package}] == []


@pytest.mark.parametrize("package", sorted(WITHOUT_TORCH))
def test_these_know_no_torch(package: str) -> None:
    assert [where for where, name in imports(package) if name == "torch"] == []
    assert ALLOWED[package] <= WITHOUT_TORCH, "nor may anything that they import"


@pytest.mark.parametrize("package", sorted({*ALLOWED, "deploy"}))
def test_each_package_says_what_it_is_and_the_table_misses_none(package: str) -> None:
    assert ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text()))
    assert list(imports(package)), "nothing was looked at"

"""The scheduled fabric passes the conformance suite of the fabrics that it stands for: every test there that takes a
fabric, over this folder's fixtures."""

from collections.abc import Callable, Iterator
from inspect import signature
from types import ModuleType

from tests.fabric import test_cancel, test_expectations, test_fence, test_triggered, test_writes

SUITE = (test_cancel, test_expectations, test_fence, test_triggered, test_writes)
ASKED = {"fabric", "link"}


def _tests(module: ModuleType) -> Iterator[tuple[str, Callable[..., None]]]:
    for name, test in vars(module).items():
        if name.startswith("test_") and not ASKED.isdisjoint(signature(test).parameters):
            yield name, test


for module in SUITE:
    globals().update(_tests(module))

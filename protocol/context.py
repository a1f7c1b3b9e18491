"""What may cross beside a prompt's KV: its context, which is what the model made of the position before the prompt's
last token. A draft model or an MTP head goes on from there.

It lies in one slot of memory, its parts side by side:

    slot 0   | hidden ....... | logits ............................. |
    slot 1   | hidden ....... | logits ............................. |
"""

from collections.abc import Sequence
from typing import Annotated, Literal, get_args

import msgspec

ContextName = Literal["hidden", "logits"]
"""hidden: what the model's head is given, the final norm applied. logits: what the head makes of it."""
CONTEXT_NAMES: tuple[ContextName, ...] = get_args(ContextName)


class ContextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: ContextName
    bytes: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class ContextLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One slot, its parts in this order. On a prefill node: what it computes for every prompt; on a decode node: what
    it wants of that. Without parts there are no slots."""

    parts: Annotated[tuple[ContextPart, ...], msgspec.Meta(max_length=len(CONTEXT_NAMES))] = ()

    def problem(self) -> str | None:
        """Why there can be no such slots, or None."""
        return None if len(set(self.names)) == len(self.parts) else "a context has each of its parts once"

    @property
    def names(self) -> list[ContextName]:
        return [part.name for part in self.parts]

    @property
    def slot_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def size(self, name: ContextName) -> int | None:
        """In bytes; None if it is no part."""
        return next((part.bytes for part in self.parts if part.name == name), None)

    def offset(self, name: ContextName) -> int:
        """Of a part, in its slot, in bytes."""
        return sum(part.bytes for part in self.parts[: self.names.index(name)])


NO_CONTEXT = ContextLayout()


def refuse_context(source: ContextLayout, target: ContextLayout) -> str | None:
    """Why a prefill side that computes `source` cannot give what `target` wants, or None if it can."""
    for part in target.parts:
        offered = source.size(part.name)
        if offered is None:
            names = [name for name in CONTEXT_NAMES if name in (*source.names, *target.names)]
            return (
                f"the decode side wants the {part.name} of the position before a prompt's last token, which the prefill"
                f" side does not compute: start it with --context {','.join(names)}"
            )
        if offered != part.bytes:
            return f"a context's {part.name}: {offered} bytes on the prefill side, {part.bytes} on the decode side"
    return None


def context_names(text: str) -> tuple[ContextName, ...]:
    """Of `hidden,logits`, without repetitions and in the order of CONTEXT_NAMES. Raises ValueError."""
    asked: Sequence[str] = text.split(",") if text else ()
    unknown = [name for name in asked if name not in CONTEXT_NAMES]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no part of a context: choose from {', '.join(CONTEXT_NAMES)}")
    return tuple(name for name in CONTEXT_NAMES if name in asked)

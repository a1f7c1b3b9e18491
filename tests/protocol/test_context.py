"""What a context consists of, and where its parts lie in a slot."""

import pytest

from protocol.context import NO_CONTEXT, ContextLayout, ContextPart, context_names
from protocol.layout import full_layout

HIDDEN, LOGITS = ContextPart("hidden", 24), ContextPart("logits", 40)


def test_parts_lie_side_by_side_in_their_order() -> None:
    both = ContextLayout((LOGITS, HIDDEN))
    assert (both.slot_bytes, both.offset("logits"), both.offset("hidden")) == (64, 0, 40)
    assert (both.size("hidden"), ContextLayout((LOGITS,)).size("hidden")) == (24, None)


def test_without_parts_there_is_nothing() -> None:
    assert (NO_CONTEXT.slot_bytes, NO_CONTEXT.names, NO_CONTEXT.problem()) == (0, [], None)
    assert full_layout(layers=1, kv_heads=1, page_size=4, head_dim=8, dtype="float32").context == NO_CONTEXT


def test_a_part_that_is_there_twice_is_no_context() -> None:
    assert "once" in (ContextLayout((HIDDEN, HIDDEN)).problem() or "")


@pytest.mark.parametrize(
    ("text", "names"),
    [("", ()), ("logits", ("logits",)), ("logits,hidden", ("hidden", "logits")), ("hidden,hidden", ("hidden",))],
)
def test_names_are_read_in_any_order(text: str, names: tuple[str, ...]) -> None:
    assert context_names(text) == names


@pytest.mark.parametrize("text", ["hiden", "hidden,", "hidden logits"])
def test_what_is_no_part_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="choose from hidden, logits"):
        context_names(text)

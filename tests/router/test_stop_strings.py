"""Stop strings: what is shown does not depend on how the text is cut, against a brute-force oracle."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.stop_strings import StopMatcher

LETTERS = "abc"
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4)


def oracle(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Character by character: the first position at which any stop string is complete; the longest there."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def run(pieces: Sequence[str], stops: Sequence[str]) -> tuple[list[str], bool]:
    matcher, shown = StopMatcher(stops), []
    for piece in pieces:
        text, stopped = matcher.feed(piece)
        shown.append(text)
        if stopped:
            return shown, True
    return [*shown, matcher.finish()], False


@given(st.lists(st.text(LETTERS, max_size=5), max_size=12), STOPS)
def test_the_text_shown_is_the_oracles_however_it_is_cut(pieces: list[str], stops: list[str]) -> None:
    shown, stopped = run(pieces, stops)
    assert ("".join(shown), stopped) == oracle("".join(pieces), stops)


@given(st.lists(st.text(LETTERS, max_size=5), max_size=12), STOPS)
def test_no_prefix_of_what_was_shown_has_to_be_taken_back(pieces: list[str], stops: list[str]) -> None:
    shown, _ = run(pieces, stops)
    final, _ = oracle("".join(pieces), stops)
    for count in range(len(shown) + 1):
        assert final.startswith("".join(shown[:count]))


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stopped"),
    [
        (["hello wor", "ld"], ["world"], "hello ", True),
        (["a", "b", "c", "d"], ["bcd"], "a", True),
        (["xxSTOPyy"], ["STOP"], "xx", True),
        (["ab"], ["abc"], "ab", False),
        (["ab", "d"], ["abc"], "abd", False),
        (["abcd"], ["abcd", "bc"], "a", True),
        (["a🙂", "b"], ["🙂b"], "a", True),
        (["aab"], ["ab"], "a", True),
        (["text"], [], "text", False),
    ],
)
def test_examples(pieces: list[str], stops: list[str], text: str, stopped: bool) -> None:
    shown, ended = run(pieces, stops)
    assert ("".join(shown), ended) == (text, stopped)


def test_text_that_begins_no_stop_string_is_shown_at_once() -> None:
    assert StopMatcher(["zzz"]).feed("hello") == ("hello", False)


def test_only_the_possible_beginning_is_held_back() -> None:
    matcher = StopMatcher(["world"])
    assert matcher.feed("hello wo") == ("hello ", False)
    assert matcher.feed("w") == ("wo", False)
    assert matcher.finish() == "w"

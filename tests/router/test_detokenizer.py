"""Pieces of text join to the decoding of the whole, against the tokenizers library as oracle."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from router.detokenizer import Detokenizer
from router.model_errors import UnsupportedTokenizer
from router.pieces import piece_decoder
from router.tokenizer import Tokenizer
from tests.router.model_folder import byte_level_tokenizer, sentencepiece_tokenizer

BYTE_LEVEL = byte_level_tokenizer()
SENTENCEPIECE = sentencepiece_tokenizer()
HIDDEN = frozenset(range(3))
UNICODE = st.text(st.characters(codec="utf-8"), max_size=40)
EMOJI = st.text(st.sampled_from("🙂👩‍🚀🏳️‍🌈é€中文\u0301 a"), max_size=40)


def wrap(backend: Backend) -> Tokenizer:
    decoder = json.loads(backend.to_str())["decoder"]
    return Tokenizer(backend, piece_decoder(decoder), HIDDEN, None)


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return wrap(BYTE_LEVEL)


def pieces(detokenizer: Detokenizer, tokens: list[int]) -> list[str]:
    return [*(detokenizer.feed(token) for token in tokens), detokenizer.finish()]


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 5), max_size=60))
def test_any_tokens_join_to_the_decoding_of_all(tokens: list[int]) -> None:
    """Bytes that are no UTF-8 included: the same number of U+FFFD in the same places."""
    shown = "".join(pieces(wrap(BYTE_LEVEL).detokenizer(), tokens))
    assert shown == BYTE_LEVEL.decode(tokens, skip_special_tokens=True)


@given(UNICODE | EMOJI)
def test_text_comes_back_whole_and_never_in_half_characters(text: str) -> None:
    tokenizer = wrap(BYTE_LEVEL)
    shown = pieces(tokenizer.detokenizer(), BYTE_LEVEL.encode(text).ids)
    assert "".join(shown) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in shown)


@given(st.text("abcdefghi é.,!中🙂the a", max_size=40))
def test_sentencepiece_text_with_bytes_joins_to_the_decoding_of_all(text: str) -> None:
    tokens = SENTENCEPIECE.encode(text.replace(" ", "\u2581")).ids
    shown = pieces(wrap(SENTENCEPIECE).detokenizer(), tokens)
    assert "".join(shown) == SENTENCEPIECE.decode(tokens)
    assert not any("\ufffd" in piece for piece in shown)


def test_a_character_is_shown_with_its_last_byte(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("é")
    detokenizer = byte_level.detokenizer()
    assert [detokenizer.feed(token) for token in tokens] == ["", "é"]


def test_an_output_that_ends_inside_a_character_says_so(byte_level: Tokenizer) -> None:
    detokenizer = byte_level.detokenizer()
    assert detokenizer.feed(byte_level.encode("é")[0]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_show_nothing_and_added_words_show_as_written(byte_level: Tokenizer) -> None:
    tokens = byte_level.encode("<|im_end|>[a b]x<|im_start|>")
    assert "".join(pieces(byte_level.detokenizer(), tokens)) == "[a b]x"


def test_a_long_run_of_broken_bytes_costs_no_more_per_token_at_its_end(byte_level: Tokenizer) -> None:
    """No window grows: what is held back is at most one character's bytes."""
    broken = BYTE_LEVEL.encode("é").ids[1]  # a continuation byte
    detokenizer = byte_level.detokenizer()
    assert all(detokenizer.feed(broken) == "\ufffd" for _ in range(1000))


def test_an_unknown_kind_of_decoder_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedTokenizer, match="WordPiece"):
        piece_decoder({"type": "WordPiece", "prefix": "##", "cleanup": True})

"""One line of an offline batch: what it may say, and how it is refused."""

import logging
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch_file import ParsedLine, PromptLine, read_line, refused_line
from engine.batch_results import OrderedLines
from engine.errors import InvalidRequest
from engine.model_tokenizer import ModelTokenizer
from protocol.messages import FinishReason
from protocol.sampling import SamplingParams
from tests.tiny_model import byte_tokenizer

TOKENIZER = ModelTokenizer(byte_tokenizer())
DEFAULTS = {"max_new_tokens": 7, "temperature": 0.5}


def read(raw: bytes) -> ParsedLine:
    return read_line(1, raw, DEFAULTS, TOKENIZER)


def test_a_line_says_its_prompt_and_whatever_differs_from_the_defaults() -> None:
    raw = b'{"id": "x", "prompt": "hi", "temperature": 0, "stop_token_ids": [3], "n": 2, "priority": -1}'
    wanted = read(raw).wanted
    assert (wanted.request_id, wanted.n, wanted.priority) == ("x", 2, -1)
    assert TOKENIZER.decode(wanted.prompt_ids) == "hi"
    assert wanted.sampling == SamplingParams(max_new_tokens=7, temperature=0.0, stop_token_ids=(3,))


def test_a_line_without_an_id_is_called_by_its_number() -> None:
    parsed = read_line(12, b'{"prompt_token_ids": [5, 6]}', DEFAULTS, TOKENIZER)
    assert parsed.id == parsed.wanted.request_id == "line-12"


def test_null_stands_for_the_default() -> None:
    names = [*PromptLine.__struct_fields__, *SamplingParams.__struct_fields__]
    nothing = dict.fromkeys(set(names) - {"prompt"})
    assert read(msgspec.json.encode({"prompt": "hi", **nothing})) == read(b'{"prompt": "hi"}')


def test_an_id_may_be_a_number_and_stays_one() -> None:
    parsed = read(b'{"prompt": "hi", "id": 5}')
    assert (parsed.id, parsed.wanted.request_id) == (5, "5")
    assert refused_line(1, b'{"id": 5, "prompt": 5}', "why").id == 5


def test_biases_may_come_in_openais_form() -> None:
    biased = read(b'{"prompt": "hi", "logit_bias": {"7": -100, "9": 2.5}}').wanted.sampling.logit_bias
    assert biased == ((7, -100.0), (9, 2.5))
    assert read(b'{"prompt": "hi", "logit_bias": [[7, -100], [9, 2.5]]}').wanted.sampling.logit_bias == biased


def test_a_text_longer_than_the_models_context_is_the_engines_to_refuse(caplog: pytest.LogCaptureFixture) -> None:
    """transformers would warn of it, once per tokenizer."""
    tokenizer: Any = byte_tokenizer()
    tokenizer.model_max_length = 4
    logger = logging.getLogger("transformers.tokenization_utils_base")
    logger.addHandler(caplog.handler)
    try:
        ModelTokenizer(tokenizer).encode("longer")
        ModelTokenizer(tokenizer).encode_chat([{"role": "user", "content": "longer"}])
        assert not caplog.records
        tokenizer("longer")
        assert caplog.records
    finally:
        logger.removeHandler(caplog.handler)


def test_messages_go_through_the_chat_template() -> None:
    raw = b'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}'
    ids = read(raw).wanted.prompt_ids
    assert byte_tokenizer().decode(ids) == "<|user|>hi<|end|><|assistant|>ho<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"[1]", "object"),
        (b"nonsense", "malformed"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b"{}", "exactly one"),
        (b'{"prompt": "a", "messages": []}', "exactly one"),
        (b'{"prompt": 5}', "prompt"),
        (b'{"prompt_token_ids": ["a"]}', "prompt_token_ids"),
        (b'{"messages": []}', "empty"),
        (b'{"messages": [{"role": "user"}]}', "content"),
        (b'{"prompt": "a", "id": ""}', "id"),
        (b'{"prompt": "a", "n": 0}', "n"),
        (b'{"prompt": "a", "id": 1.5}', "id"),
        (b'{"prompt": "a", "id": true}', "id"),
        (
            b'{"prompt": "a", "temprature": 1}',
            r"no field 'temprature': did you mean temperature\? Known are id, prompt, ",
        ),
        (b'{"prompt": "a", "max_tokens": 1}', r"did you mean max_new_tokens\?"),
        (b'{"prompt": "a", "stop": ["x"]}', "stop_token_ids are"),
        (b'{"prompt": "a", "qqq": 1}', r"no field 'qqq'\. Known"),
        (b'{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias"),
        (b'{"prompt": "a", "logit_bias": {"5": 101}}', "logit_bias"),
        (b'{"prompt": "a", "logit_bias": {"-5": 1}}', "logit_bias"),
        (b'{"prompt": "a", "top_p": 2}', "top_p"),
        (b'{"prompt": "a", "max_new_tokens": "many"}', "max_new_tokens"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(raw: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        read(raw)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
values = scalars | st.lists(scalars, max_size=2) | st.just([{"role": "user", "content": "x"}])
names = st.sampled_from(
    ["id", "prompt", "prompt_token_ids", "messages", "n", "seed", "top_k", "temperature", "logit_bias"]
)


@given(st.binary(max_size=40) | st.dictionaries(names, values, max_size=4).map(msgspec.json.encode))
def test_any_line_is_a_request_or_a_refusal(raw: bytes) -> None:
    try:
        parsed = read(raw)
        assert parsed.wanted.request_id == str(parsed.id)
    except InvalidRequest as error:
        line = refused_line(1, raw, str(error))
        assert line.finish_reason is FinishReason.ERROR
        assert line.id != "" and line.error


def test_a_refused_line_keeps_its_id_where_it_can_be_read() -> None:
    assert refused_line(3, b'{"id": "x", "prompt": 5}', "why").id == "x"
    assert refused_line(3, b"nonsense", "why").id == "line-3"


@given(st.permutations(range(6)))
def test_lines_are_written_in_order_whatever_the_order_in_which_they_come(order: list[int]) -> None:
    written: list[Any] = []
    lines = OrderedLines(lambda line: written.append(msgspec.json.decode(line)["line"]))
    for slot in order[:-1]:
        lines.put(slot, refused_line(slot, b"", ""))
        assert written == list(range(len(written)))
    lines.write_early()
    assert written == sorted(order[:-1])


@given(st.permutations(range(4)))
def test_lines_may_also_be_written_as_they_come(order: list[int]) -> None:
    written: list[Any] = []
    lines = OrderedLines(lambda line: written.append(msgspec.json.decode(line)["line"]), in_order=False)
    for slot in order:
        lines.put(slot, refused_line(slot, b"", ""))
    assert written == order

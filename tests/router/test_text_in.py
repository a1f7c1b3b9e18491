"""What comes in as text: chat templates, request ids, API keys."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api_keys import BadKeyFile, read_api_keys
from router.chat_template import ChatTemplate, TemplateRefused, read_chat_template, special_tokens
from router.model_errors import BadTemplate
from router.openai.errors import ApiError
from router.openai.json_body import parse_object
from router.request_id import MAX_CHARACTERS, sanitised

USER = [{"role": "user", "content": "Hi"}]


def test_a_template_gets_the_messages_and_the_special_tokens() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0]['content'] }}", {"bos_token": "<s>"})
    assert template.render(USER) == "<s>Hi"


def test_a_template_may_refuse() -> None:
    with pytest.raises(TemplateRefused, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(USER)


@pytest.mark.parametrize("source", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(TemplateRefused):
        ChatTemplate(source, {}).render(USER)


def test_a_broken_template_is_refused_at_start() -> None:
    with pytest.raises(BadTemplate):
        ChatTemplate("{% if %}", {})


def test_the_template_is_found_beside_or_inside_the_tokenizer_config(tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "named"}]
    for config, rendered in (({"chat_template": "inline"}, "inline"), ({"chat_template": named}, "named")):
        found = read_chat_template(tmp_path, json.loads(json.dumps(config)))
        assert found is not None and found.render(USER) == rendered
    assert read_chat_template(tmp_path, {}) is None
    (tmp_path / "chat_template.jinja").write_text("file")
    found = read_chat_template(tmp_path, {"chat_template": "inline"})
    assert found is not None and found.render(USER) == "file"


def test_special_tokens_are_read_in_both_spellings() -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None, "add_bos_token": True}
    assert special_tokens(config) == {"bos_token": "<s>", "eos_token": "</s>"}


@given(st.binary(max_size=600))
def test_a_request_id_is_printable_short_and_never_empty(raw: bytes) -> None:
    clean = sanitised(raw)
    assert clean.isprintable() and 0 < len(clean) <= MAX_CHARACTERS


@pytest.mark.parametrize("name", ["my-request-1", "x" * 200, "äöü-🙂"])
def test_an_ordinary_request_id_is_kept(name: str) -> None:
    assert sanitised(name.encode()) == name


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_a_client_error(body: bytes) -> None:
    try:
        assert isinstance(parse_object(body), dict)
    except ApiError as error:
        assert error.status == 400


def test_api_keys_are_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\n\n  two \n")
    assert read_api_keys(path) == [b"one", b"two"]
    path.write_text("\n")
    with pytest.raises(BadKeyFile, match="no key"):
        read_api_keys(path)
    with pytest.raises(BadKeyFile, match="cannot read"):
        read_api_keys(tmp_path / "missing")

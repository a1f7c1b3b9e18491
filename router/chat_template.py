"""The model's own chat template, rendered in a sandbox as transformers does."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.model_errors import BadTemplate


class TemplateRefused(ValueError):
    """The template does not take these messages (roles in the wrong order, for one)."""


class ChatTemplate:
    """`special_tokens`: bos_token, eos_token and the like, as the template knows them."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises BadTemplate."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise BadTemplate(f"chat template: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text up to where the assistant speaks. Raises TemplateRefused."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, documents=None, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise TemplateRefused(f"The model's chat template refuses these messages: {error}") from error


def read_chat_template(model: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
    """From chat_template.jinja, else from tokenizer_config.json; None for a model without. Raises BadTemplate."""
    file = model / "chat_template.jinja"
    source = file.read_text() if file.is_file() else _inline(tokenizer_config.get("chat_template"))
    if source is None:
        return None
    return ChatTemplate(source, special_tokens(tokenizer_config))


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Every `*_token` entry, whether written as a string or as an object."""
    named = {name: value for name, value in tokenizer_config.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _inline(template: object) -> str | None:
    if isinstance(template, list):  # several, by name
        return next((one["template"] for one in template if one.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)

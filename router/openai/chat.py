"""POST /v1/chat/completions: the body as a record."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.openai import errors, fields
from router.openai.generation_fields import IGNORED, SHARED, GenerationFields, read_generation

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""The client's role -> the template's."""
LATER_ROLES = frozenset({"tool", "function"})
_UNUSED_IN_MESSAGE = ("tool_calls", "function_call", "refusal", "audio", "annotations", "tool_call_id")
_MESSAGE_FIELDS = frozenset({"role", "content", "name", *_UNUSED_IN_MESSAGE})
_LATER: dict[str, tuple[list[Any], str]] = {
    "tools": ([[]], "the model cannot call tools."),
    "tool_choice": (["none", "auto"], "the model cannot call tools."),
    "functions": ([[]], "the model cannot call functions."),
    "function_call": (["none", "auto"], "the model cannot call functions."),
    "response_format": ([{"type": "text"}], "only text is returned."),
    "modalities": ([["text"]], "only text is returned."),
    "top_logprobs": ([0], "log probabilities are not returned."),
    "audio": ([], "only text is returned."),
    "prediction": ([], "outputs cannot be predicted."),
    "reasoning_effort": ([], "the model does not reason on request."),
}
_KNOWN = SHARED | IGNORED | _LATER.keys() | {"messages", "max_completion_tokens", "parallel_tool_calls"}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """`messages`: role and content, as the chat template wants them."""

    model: str
    messages: list[dict[str, str]]
    generation: GenerationFields


def parse_chat(body: Mapping[str, Any]) -> ChatRequest:
    """Raises ApiError."""
    model = fields.required_string(body, "model")
    messages = _messages(body)
    fields.refuse_unknown(body, _KNOWN)
    for name, (harmless, why) in _LATER.items():
        fields.refuse_unless(body, name, harmless, why)
    param = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    return ChatRequest(model, messages, read_generation(body, param))


def _messages(body: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = body.get("messages")
    if messages is None:
        raise errors.missing("messages")
    if not isinstance(messages, list):
        raise errors.wrong_type("messages", "an array of objects", messages)
    if not messages:
        raise errors.invalid("Invalid 'messages': empty array.", "messages", "empty_array")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: object, path: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise errors.wrong_type(path, "an object", message)
    for name, value in message.items():
        if name not in _MESSAGE_FIELDS:
            raise errors.invalid(f"Unknown field in a message: {name[:100]}", path, "unknown_parameter")
        if name in _UNUSED_IN_MESSAGE and value not in (None, []):
            raise errors.unsupported(f"{path}.{name}", f"'{name}' in a message is not supported yet.")
    return {"role": _role(message, path), "content": _content(message.get("content"), f"{path}.content")}


def _role(message: Mapping[str, Any], path: str) -> str:
    role = message.get("role")
    if role is None:
        raise errors.missing(f"{path}.role")
    if not isinstance(role, str):
        raise errors.wrong_type(f"{path}.role", "a string", role)
    if role in LATER_ROLES:
        raise errors.unsupported(f"{path}.role", f"The role '{role}' is not supported yet.")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise errors.invalid(f"Invalid role '{role[:100]}': one of {known}.", f"{path}.role", "invalid_value")
    return ROLES[role]


def _content(content: object, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise errors.wrong_type(path, "a string or an array of text parts", content)
    if not content:
        raise errors.invalid(f"Invalid '{path}': empty array.", path, "empty_array")
    return "".join(_part(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise errors.wrong_type(path, "an object", part)
    if part.get("type") != "text":
        raise errors.unsupported(f"{path}.type", "Only parts of type 'text' are supported.")
    text = part.get("text")
    if not isinstance(text, str):
        raise errors.wrong_type(f"{path}.text", "a string", text)
    return text

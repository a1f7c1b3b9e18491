"""The model folder's own tokenizer, through transformers."""

from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer

from engine.errors import IncompleteModel, InvalidRequest


class ModelTokenizer:
    """`tokenizer`: of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """With the special tokens that the model expects around a text. Raises InvalidRequest."""
        try:
            return list(self._tokenizer(text)["input_ids"])
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the text cannot be tokenized: {error}") from error

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """By the model's chat template, up to where the assistant speaks. Raises InvalidRequest."""
        try:
            return list(self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}") from error

    def decode(self, token_ids: list[int]) -> str:
        """Without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def load_tokenizer(directory: Path) -> ModelTokenizer:
    """Raises IncompleteModel."""
    loader: Any = AutoTokenizer
    try:
        return ModelTokenizer(loader.from_pretrained(directory, local_files_only=True))
    except (OSError, ValueError) as error:
        raise IncompleteModel(
            f"{directory} has no tokenizer that can be loaded: {str(error).splitlines()[0]}"
        ) from error

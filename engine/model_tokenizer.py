"""The model folder's own tokenizer, through transformers."""

from os import PathLike
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer

from engine.errors import IncompleteModel, InvalidRequest
from engine.models.loading import check_folder

_QUIET = {"verbose": False}
"""No warning of texts longer than the model's context: the engine refuses them."""


class ModelTokenizer:
    """`tokenizer`: of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """With the special tokens that the model expects around a text. Raises InvalidRequest."""
        try:
            return list(self._tokenizer(text, **_QUIET)["input_ids"])
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"the text cannot be tokenized: {error}") from error

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """By the model's chat template, up to where the assistant speaks. Raises InvalidRequest."""
        try:
            ids = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False, tokenizer_kwargs=_QUIET
            )
            return list(ids)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}") from error

    def decode(self, token_ids: list[int]) -> str:
        """Without special tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def load_tokenizer(directory: str | PathLike[str]) -> ModelTokenizer:
    """Raises IncompleteModel."""
    check_folder(Path(directory))
    loader: Any = AutoTokenizer
    try:
        return ModelTokenizer(loader.from_pretrained(directory, local_files_only=True))
    except (OSError, ValueError) as error:
        raise IncompleteModel(
            f"{directory} has no tokenizer that can be loaded: {str(error).splitlines()[0]}"
        ) from error

"""What the router reads from a model folder, and how it says what is wrong with one."""

from pathlib import Path

import pytest

from router.model_errors import BadModelFolder, UnsupportedTokenizer
from router.model_folder import ModelFolder
from tests.router.model_folder import END, MAX_CONTEXT, write_model_folder


def test_a_folder_without_a_fast_tokenizer_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTokenizer, match="fast tokenizer"):
        ModelFolder(tmp_path)


def test_a_model_folder_knows_its_context_and_end_tokens(tmp_path: Path) -> None:
    folder = ModelFolder(write_model_folder(tmp_path / "tiny"))
    assert folder.max_context == MAX_CONTEXT
    tokenizer = folder.tokenizer()
    assert [tokenizer.piece(token) for token in tokenizer.encode(END)] == [b""]
    assert folder.tokenizer().has_chat_template


def test_an_end_token_is_hidden_though_it_is_not_special(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "tiny")
    letter = ModelFolder(folder).tokenizer().encode("x")[0]
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": [{letter}]}}')
    tokenizer = ModelFolder(folder).tokenizer()
    assert tokenizer.piece(letter) == b"" and tokenizer.piece(tokenizer.encode("y")[0]) == b"y"


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("tokenizer.json", "{", "tokenizer.json"),
        ("tokenizer.json", '{"decoder": {"type": "ByteLevel"}}', "tokenizer.json"),
        ("tokenizer_config.json", "[]", "no JSON object"),
        ("config.json", "{}", "max_position_embeddings"),
        ("chat_template.jinja", "{% if %}", "chat template"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, file: str, content: str, reason: str) -> None:
    folder = write_model_folder(tmp_path / "tiny")
    (folder / file).write_text(content)
    with pytest.raises(BadModelFolder, match=reason):
        model = ModelFolder(folder)
        assert model.tokenizer() and model.max_context


def test_a_model_without_a_template_has_none(tmp_path: Path) -> None:
    assert not ModelFolder(write_model_folder(tmp_path / "tiny", template=None)).tokenizer().has_chat_template

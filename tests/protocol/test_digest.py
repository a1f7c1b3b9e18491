"""Which facts two processes must share before one may read what the other wrote: each alone changes the digest."""

from pathlib import Path

import msgspec
import pytest

from protocol import PROTOCOL_VERSION, digest
from protocol.context import ContextLayout, ContextPart
from protocol.digest import compatibility_digest, model_digest, served_model, tokenizer_digest
from protocol.layout import GroupLayout, KVLayout, full_layout

LAYOUT = full_layout(layers=3, kv_heads=4, page_size=16, head_dim=8, dtype="float32")
FILES = {
    "config.json": '{"layers": 3}',
    "model-1.safetensors": "weights, first half",
    "model-2.safetensors": "weights, second half",
    "tokenizer.json": '{"a": 1}',
    "tokenizer_config.json": "{}",
    "special_tokens_map.json": "{}",
    "chat_template.jinja": "{{ messages }}",
}
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for name, text in FILES.items():
        (made / name).write_text(text)
    return made


@pytest.mark.parametrize(
    "change",
    [
        {"groups": (GroupLayout(layers=(0, 1)),)},
        {"groups": (GroupLayout(layers=(0, 1, 2), window=9),)},
        {"groups": (GroupLayout(layers=(0, 1)), GroupLayout(layers=(2,)))},
        {"kv_heads": 2},
        {"parts": 1},
        {"head_dim": 16},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_each_fact_of_the_kv_changes_compatibility(change: dict[str, object]) -> None:
    other = msgspec.structs.replace(LAYOUT, **change)
    assert compatibility_digest("model", other) != compatibility_digest("model", LAYOUT)


@pytest.mark.parametrize(
    "change",
    [{"page_size": 32}, {"tensor_parallel": 2}, {"context": ContextLayout((ContextPart("hidden", 64),))}],
    ids=str,
)
def test_how_the_kv_is_cut_and_what_comes_with_it_does_not(change: dict[str, object]) -> None:
    """The handshake judges it."""
    other = msgspec.structs.replace(LAYOUT, **change)
    assert compatibility_digest("model", other) == compatibility_digest("model", LAYOUT)


def test_the_tables_name_every_fact_of_a_layout() -> None:
    named = {"groups", "kv_heads", "parts", "head_dim", "dtype", "page_size", "tensor_parallel", "context"}
    assert set(KVLayout.__struct_fields__) == named


def test_another_model_and_another_protocol_version_change_compatibility(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = compatibility_digest("model", LAYOUT)
    assert compatibility_digest("another", LAYOUT) != ours
    monkeypatch.setattr(digest, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    assert compatibility_digest("model", LAYOUT) != ours


def test_swapped_sizes_are_not_taken_for_each_other() -> None:
    swapped = msgspec.structs.replace(LAYOUT, head_dim=LAYOUT.kv_heads, kv_heads=LAYOUT.head_dim)
    assert compatibility_digest("model", swapped) != compatibility_digest("model", LAYOUT)


@pytest.mark.parametrize("name", FILES)
def test_each_file_changes_the_models_digest_and_the_tokenizers_its_own(folder: Path, name: str) -> None:
    model, tokenizer = model_digest(folder), tokenizer_digest(folder)
    (folder / name).write_text(FILES[name][::-1] + ".")
    assert model_digest(folder) != model
    assert (tokenizer_digest(folder) != tokenizer) == (name in TOKENIZER)


@pytest.mark.parametrize("name", [name for name in FILES if name != "config.json"])
def test_a_file_that_is_missing_changes_it_too(folder: Path, name: str) -> None:
    model = model_digest(folder)
    (folder / name).unlink()
    assert model_digest(folder) != model


def test_bytes_that_moved_from_one_file_to_the_next_are_a_difference(folder: Path) -> None:
    model = model_digest(folder)
    (folder / "model-1.safetensors").write_text("weights, first halfweights, ")
    (folder / "model-2.safetensors").write_text("second half")
    assert model_digest(folder) != model


def test_neither_the_folders_name_nor_other_files_matter(folder: Path) -> None:
    before = served_model(folder)
    (folder / "README.md").write_text("a note")
    after = served_model(folder.rename(folder.parent / "copy"))
    assert (after.digest, after.tokenizer) == (before.digest, before.tokenizer)
    assert (before.name, after.name) == ("model", "copy")

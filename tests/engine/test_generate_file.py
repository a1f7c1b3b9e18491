"""`kvferry generate` from a file to a file, beside transformers' `generate`."""

import codecs
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from engine.__main__ import main
from tests.oracle import Oracle
from tests.tiny_model import save_tiny_model, save_weights

DEADLINE_S = 200.0
ROOT = Path(__file__).resolve().parents[2]
GOOD: list[dict[str, Any]] = [
    {"prompt": "The ferry", "max_new_tokens": 12},
    {"id": "chat", "messages": [{"role": "user", "content": "Hi"}]},
    {"prompt_token_ids": [40, 41, 42]},
]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(autouse=True)
def one_thread_again() -> Any:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def command(model: Path, source: Path | str, target: Path | str, *more: str) -> list[str]:
    named = ["--model", str(model), "--input", str(source), "--output", str(target)]
    return [*named, "--max-new-tokens", "8", "--threads", "1", *more]


def written(folder: Path, *lines: object) -> Path:
    """A file of these lines; bytes as they are, others as JSON."""
    file = folder / "prompts.jsonl"
    file.write_bytes(b"".join(_raw(line) + b"\n" for line in lines))
    return file


def _raw(line: object) -> bytes:
    return line if isinstance(line, bytes) else msgspec.json.encode(line)


def records(raw: bytes) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in raw.splitlines()]


def expected(model: Path) -> list[tuple[list[int], str]]:
    """Tokens and text of GOOD."""
    loader: Any = AutoTokenizer
    tokenizer = loader.from_pretrained(model)
    chat = tokenizer.apply_chat_template(GOOD[1]["messages"], add_generation_prompt=True, return_dict=False)
    oracle = Oracle(model)
    prompts = [(tokenizer("The ferry")["input_ids"], 12), (chat, 8), ([40, 41, 42], 8)]
    tokens = [oracle.greedy(prompt, count) for prompt, count in prompts]
    return [(ids, tokenizer.decode(ids, skip_special_tokens=True)) for ids in tokens]


def check_good(model: Path, found: list[dict[str, Any]]) -> None:
    assert [record["id"] for record in found] == ["line-1", "chat", found[2]["id"]]
    assert [(record["token_ids"], record["text"]) for record in found] == expected(model)
    assert {record["finish_reason"] for record in found} <= {"length", "stop"}
    assert [record["error"] for record in found] == [None] * 3


def test_a_file_of_prompts_becomes_a_file_of_results(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.jsonl"
    assert main(command(tiny_model, written(tmp_path, *GOOD), target)) == 0
    check_good(tiny_model, records(target.read_bytes()))
    totals = capsys.readouterr().err
    assert "3 prompts, 0 failed; 17 prompt tokens, 28 new ones" in totals


@pytest.mark.timeout(300)
def test_python_m_engine_gives_bad_lines_their_errors_and_loses_none(tiny_model: Path, tmp_path: Path) -> None:
    """The real process, its standard output."""
    bad = [b"no JSON", {"prompt": "x", "temprature": 1}, {"id": "chat", "prompt": "again"}, {"prompt": ""}]
    source = written(tmp_path, GOOD[0], bad[0], GOOD[1], bad[1], bad[2], b"", bad[3], GOOD[2])
    process = subprocess.run(
        [sys.executable, "-m", "engine", *command(tiny_model, source, "-", "--quiet")],
        cwd=ROOT,
        capture_output=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert process.returncode == 1
    assert process.stderr == b""
    found = records(process.stdout)
    assert [record["line"] for record in found] == [1, 2, 3, 4, 5, 7, 8]
    check_good(tiny_model, [found[0], found[2], found[6]])
    for record, reason in [
        (found[1], "malformed"),
        (found[3], "temprature"),
        (found[4], "earlier"),
        (found[5], "empty"),
    ]:
        assert record["finish_reason"] == "error" and record["token_ids"] == []
        assert record["error"].startswith(f"line {record['line']}: ") and reason in record["error"]


def test_standard_input_is_read_and_each_sequence_has_its_line(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"id": "x", "prompt": "abc", "n": 3, "temperature": 1.0, "seed": 5, "logprobs": True}
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(msgspec.json.encode(line))))
    target = tmp_path / "out.jsonl"
    assert main(command(tiny_model, "-", target, "--quiet")) == 0
    found = records(target.read_bytes())
    assert [(record["id"], record["index"]) for record in found] == [("x__child#1", 1), ("x__child#2", 2), ("x", 0)]
    assert len({tuple(record["token_ids"]) for record in found}) == 3
    assert all(len(record["logprobs"]) == len(record["token_ids"]) for record in found)


def test_more_lines_than_are_under_way_at_once(tiny_model: Path, tmp_path: Path) -> None:
    source = written(tmp_path, *[{"prompt_token_ids": [40 + i], "max_new_tokens": 1 + i % 5} for i in range(40)])
    target = tmp_path / "out.jsonl"
    assert main(command(tiny_model, source, target, "--quiet", "--max-requests", "3", "--async-batching")) == 0
    found = records(target.read_bytes())
    assert [record["line"] for record in found] == list(range(1, 41))
    oracle = Oracle(tiny_model)
    assert [found[i]["token_ids"] for i in range(8)] == [oracle.greedy([40 + i], 1 + i % 5) for i in range(8)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_after_an_interruption_what_is_finished_is_there(
    tiny_model: Path, tmp_path: Path, number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines 1 and 3 end long before line 2 could."""
    endless = {"prompt": "b", "max_new_tokens": 3500, "ignore_eos": True}
    source = written(tmp_path, {"prompt": "a", "max_new_tokens": 20, "ignore_eos": True}, endless, {"prompt": "c"})
    pipe = tmp_path / "out"
    os.mkfifo(pipe)
    found: list[bytes] = []

    def interrupt_after_the_first() -> None:
        with pipe.open("rb") as lines:
            found.append(lines.readline())
            signal.pthread_kill(threading.main_thread().ident or 0, number)
            found.extend(lines)

    reader = threading.Thread(target=interrupt_after_the_first)
    reader.start()
    before = signal.getsignal(number)
    assert main(command(tiny_model, source, pipe, "--quiet")) == code
    reader.join(DEADLINE_S)
    assert [record["line"] for record in records(b"".join(found))] == [1, 3]
    assert signal.getsignal(number) is before
    assert capsys.readouterr().err == "kvferry generate: interrupted: 2 of 3 lines written\n"


def test_what_cannot_even_start_is_one_line_and_leaves_the_output_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = save_weights(tmp_path / "weights")
    source, target = written(tmp_path, *GOOD), tmp_path / "out.jsonl"
    target.write_text("kept")
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    for arguments, reason in (
        (command(weights, source, target), f"{weights} has no tokenizer"),
        (command(weights, tmp_path / "missing", target), f"{tmp_path}/missing: cannot be read: no such file"),
        (command(weights, tmp_path, target), f"{tmp_path}: cannot be read: it is a folder"),
        (command(weights, source, tmp_path / "no" / "x"), f"{tmp_path}/no/x: cannot be written: no such folder"),
        (command(weights, source, tmp_path), f"{tmp_path}: cannot be written: it is a folder"),
        (command(Path("HuggingFaceTB/SmolLM2"), source, target), "HuggingFaceTB/SmolLM2: no such folder"),
        (command(tmp_path / "empty", source, target), f"{tmp_path}/empty lacks config.json"),
    ):
        assert main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"kvferry generate: {reason}")
    assert target.read_text() == "kept"


def test_an_error_of_transformers_is_one_line_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = save_weights(tmp_path / "weights")
    capsys.readouterr()
    for config in ("{", "{}", '{"model_type": "unheard_of"}', '{"model_type": "llama", "hidden_size": "x"}'):
        (weights / "config.json").write_text(config)
        assert main(command(weights, written(tmp_path, *GOOD), "-")) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{weights}/config.json cannot be used: " in line


def test_results_that_cannot_be_written_end_the_run(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(command(tiny_model, written(tmp_path, *GOOD), "/dev/full", "--quiet")) == 1
    assert capsys.readouterr().err == "kvferry generate: /dev/full: cannot be written: no space left on device\n"


def test_generation_ends_with_the_models_context(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """However much is asked for; a prompt that is longer than it is refused, by us alone."""
    context = AutoConfig.from_pretrained(tiny_model).max_position_embeddings
    nearly = {"prompt_token_ids": [40] * (context - 5), "max_new_tokens": 1000000, "ignore_eos": True}
    source, target = written(tmp_path, nearly, {"prompt": "x" * 2 * context}), tmp_path / "out.jsonl"
    capfd.readouterr()
    assert main(command(tiny_model, source, target, "--quiet", "--num-blocks", "200")) == 1
    ended, refused = records(target.read_bytes())
    assert (len(ended["token_ids"]), ended["finish_reason"]) == (5, "length")
    assert f"can never fit: the model's context holds {context}" in refused["error"]
    assert capfd.readouterr().err == ""


def test_an_id_comes_back_as_it_was_and_is_taken_once(tiny_model: Path, tmp_path: Path) -> None:
    lines = [{"id": 5, "prompt": "a"}, {"id": "x__child#1", "prompt": "b"}, {"id": "x", "prompt": "c", "n": 2}]
    source, target = written(tmp_path, *lines, {"id": "x", "prompt": "d"}), tmp_path / "out.jsonl"
    source.write_bytes(codecs.BOM_UTF8 + source.read_bytes())
    assert main(command(tiny_model, source, target, "--quiet")) == 1
    found = records(target.read_bytes())
    assert [record["id"] for record in found] == [5, "x__child#1", "x", "x"]
    errors = [record["error"] for record in found]
    assert errors == [None, None, errors[2], None]
    assert "the id 'x__child#1', of a further sequence of 'x', belongs to an earlier line" in errors[2]


@pytest.mark.parametrize(
    ("options", "reason"), [(["--temperature", "-1"], "temperature"), (["--page-size", "1"], "page_size")]
)
def test_impossible_options_are_usage_errors(
    tmp_path: Path, options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(command(tmp_path, "a", "b", *options))
    assert exit_.value.code == 2
    assert reason in capsys.readouterr().err


def test_writing_over_the_input_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(command(tmp_path, tmp_path / "a", tmp_path / "x" / ".." / "a"))
    assert "same file" in capsys.readouterr().err

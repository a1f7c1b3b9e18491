"""The engine's settings on a command line."""

import argparse
from pathlib import Path

import pytest

from engine.options import EngineOptions, add_engine_options, engine_options_from


def parse(*arguments: str) -> EngineOptions:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    return engine_options_from(parser, parser.parse_args(["--model", "some/dir", *arguments]))


def test_the_settings_arrive_where_they_belong() -> None:
    options = parse("--page-size", "16", "--num-blocks", "9", "--max-batch-tokens", "32", "--threads", "2")
    assert (options.model, options.threads) == (Path("some/dir"), 2)
    batching = options.batching
    assert (batching.page_size, batching.num_blocks, batching.max_batch_tokens) == (16, 9, 32)
    assert not batching.debug_pages


@pytest.mark.parametrize("wrong", [("--page-size", "3"), ("--num-blocks", "0"), ("--threads", "0")])
def test_impossible_values_exit_with_the_reason(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*wrong)
    assert wrong[0].strip("-").replace("-", "_") in capsys.readouterr().err.replace("-", "_")

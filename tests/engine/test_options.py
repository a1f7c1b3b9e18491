"""The engine's settings on a command line."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from engine.config import ContinuousBatchingConfig
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


def test_contexts_are_kept_where_they_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse().context == ()
    assert parse("--context", "logits,hidden").context == ("hidden", "logits")
    with pytest.raises(SystemExit):
        parse("--context", "states")
    assert "choose from hidden, logits" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [("--page-size", "3"), ("--num-blocks", "0"), ("--threads", "0"), ("--tp", "0"), ("--dp", "0")]
)
def test_impossible_values_exit_with_the_reason(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*wrong)
    assert wrong[0].strip("-").replace("-", "_") in capsys.readouterr().err.replace("-", "_")


def test_asynchronous_batching_needs_engines_of_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--tp", "2", "--async-batching")
    assert "leave out --tp" in capsys.readouterr().err
    with pytest.raises(ValueError, match="leave out --tp"):
        EngineOptions(Path("some/dir"), ContinuousBatchingConfig(use_async_batching=True), None, tp=2)


def test_a_model_may_be_named_by_a_string() -> None:
    name: Any = "some/dir"
    assert EngineOptions(name, ContinuousBatchingConfig(), None).model == Path("some/dir")


def test_help_speaks_of_nodes_only_where_there_are_some() -> None:
    for alone in (True, False):
        parser = argparse.ArgumentParser()
        add_engine_options(parser, alone)
        assert ("node" in parser.format_help(), "checksum" in parser.format_help()) == (not alone, not alone)


def test_the_caches_settings_arrive_too() -> None:
    batching = parse("--num-blocks", "auto", "--no-block-sharing", "--cpu-offload-space", "0.5").batching
    assert (batching.num_blocks, batching.allow_block_sharing, batching.cpu_offload_space) == (None, False, 0.5)
    assert (batching.scheduler_type, batching.margin, batching.use_async_batching) == ("fifo", 0.15, None)
    batching = parse("--scheduler", "prefill_first", "--eviction-policy", "lru", "--async-batching").batching
    assert (batching.scheduler_type, batching.margin, batching.eviction_policy) == ("prefill_first", 0.0, "lru")
    assert batching.use_async_batching


def test_the_device_can_be_named_on_nodes_too() -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    words = ["--model", "DIR", "--device", "cuda", "--dtype", "bfloat16"]
    options = engine_options_from(parser, parser.parse_args(words))
    assert (options.device, options.dtype) == ("cuda", "bfloat16")

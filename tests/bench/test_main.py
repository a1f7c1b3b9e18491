"""The benchmarks' one command."""

import pytest

from bench.__main__ import BENCHMARKS, main


def test_help_lists_the_benchmarks_one_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(BENCHMARKS)


@pytest.mark.parametrize("arguments", [[], ["nothing"]])
def test_what_is_no_benchmark_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("usage: python -m bench NAME")

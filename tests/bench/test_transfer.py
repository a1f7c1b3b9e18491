"""The benchmark runs, and reports what it moved; how fast is not a test's business."""

import json

import pytest

from bench.__main__ import main


def test_a_small_run_reports_every_page_size_beside_its_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["transfer", "--mib", "2", "--rounds", "1"]) == 0
    report, _, table = capsys.readouterr().out.partition("\n\n")
    rows = json.loads(report)["rows"]
    assert [(row["page"] >> 10, row["writes"]) for row in rows] == [(16, 128), (64, 32), (256, 8), (1024, 2)]
    assert all(row["fabric_gb_s"] > 0 and row["socket_gb_s"] > 0 for row in rows)
    assert len(table.splitlines()) == 1 + len(rows)


def test_an_unknown_benchmark_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    assert "transfer" in capsys.readouterr().err

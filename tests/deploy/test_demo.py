from pathlib import Path

import pytest

from deploy import demo
from deploy.cluster_spec import ClusterSpec
from deploy.prompts import ask
from tests.deploy.conftest import FAKE_PROGRAMS, Faulty

QUESTIONS = (ask("first", "One?"), ask("second", "Two?"))


def run(spec: ClusterSpec, run_dir: Path) -> tuple[int, str]:
    said: list[str] = []
    code = demo.run(spec, run_dir, QUESTIONS, said.append, FAKE_PROGRAMS)
    return code, "\n".join(said)


def test_a_sound_cluster_passes(spec: ClusterSpec, run_dir: Path) -> None:
    code, text = run(spec, run_dir)
    assert code == 0, text
    assert text.count("A: Answer") == 2
    assert text.endswith("every answer came, every page was returned, nothing was left behind")


@pytest.mark.parametrize(
    ("fault", "problem"), [("error", "first: HTTP 503"), ("cut", "second: the stream ended before the answer did")]
)
def test_a_missing_answer_fails_it(faulty: Faulty, run_dir: Path, fault: str, problem: str) -> None:
    code, text = run(faulty(router=fault), run_dir)
    assert code == 1
    assert problem in text.partition("FAILED\n")[2]


def test_a_cluster_that_does_not_come_up_fails_it(faulty: Faulty, run_dir: Path) -> None:
    code, text = run(faulty(decode_0="die"), run_dir)
    assert code == 1
    assert "decode-0 ended with code 3" in text

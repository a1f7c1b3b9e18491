from deploy.prompts import DEMO_QUESTIONS, ask
from deploy.report import table, transcript
from tests.deploy.answers import answer, ledger


def test_every_part_of_the_ttft_is_a_column_in_ms() -> None:
    heading, _, row, *_ = table([answer()]).splitlines()
    assert heading.split()[:3] == ["request", "in", "out"]
    assert row.split() == [
        "capital", "40", "3", "4", "prefill-0", "decode-1", "300", "10", "200", "20", "30", "40", "20.0", "420", "3.0",
        "29/30", "net",
    ]  # fmt: skip


def test_columns_line_up_whatever_is_in_them() -> None:
    lines = table([answer(), answer(ledger=ledger(ttft_s=123.4, decode_node="a-long-name"))]).splitlines()[:4]
    assert len({line.rindex("  ") for line in lines}) == 1


def test_an_answer_without_a_ledger_has_no_row() -> None:
    assert len(table([answer(ledger=None)]).splitlines()) == len(table([]).splitlines())


def test_a_local_prefill_shows_no_prefill_node() -> None:
    row = table([answer(ledger=ledger(prefill_node="", provider="", writes=0, bytes=0))]).splitlines()[2]
    assert row.split()[4] == "-"
    assert row.endswith("-")


def test_a_transcript_shows_question_and_answer() -> None:
    assert transcript(answer()) == "Q: What is the capital of France?\nA: Paris."


def test_a_long_question_is_shortened_and_keeps_its_end() -> None:
    long = answer()
    long.question = ask("long", "word " * 500 + "and what then?")
    shown = transcript(long).splitlines()[0]
    assert len(shown) < 100
    assert shown.endswith("and what then?")


def test_a_failed_question_says_why() -> None:
    assert "FAILED: HTTP 503" in transcript(answer(failure="HTTP 503"))


def test_the_demo_asks_several_and_one_is_long() -> None:
    lengths = sorted(len(question.messages[-1]["content"]) for question in DEMO_QUESTIONS)
    assert len(lengths) >= 5
    assert lengths[-1] > 3000 > lengths[-2]

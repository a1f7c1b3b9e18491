from deploy.asking import Answer
from deploy.prompts import DEMO_QUESTIONS, ask
from deploy.report import tables, transcript
from tests.deploy.answers import answer, ledger


def halves(*answers: Answer) -> tuple[list[str], list[str]]:
    """The lines of the table of times and of the table of what moved."""
    times, moved, _ = tables(answers).split("\n\n")
    return times.splitlines(), moved.splitlines()


def test_the_ttft_and_its_parts_are_shown_in_ms() -> None:
    times, _ = halves(answer())
    assert times[2].split() == ["capital", "300", "10", "200", "20", "30", "40"]


def test_tokens_nodes_and_bytes_are_shown() -> None:
    _, moved = halves(answer())
    assert moved[2].split() == [
        "capital", "40", "3", "20.0", "4", "prefill-0", "decode-1", "420", "3.0", "29/30", "net",
    ]  # fmt: skip


def test_columns_line_up_whatever_is_in_them() -> None:
    times, moved = halves(answer(), answer(ledger=ledger(ttft_s=12345.6, decode_node="a-node-with-a-long-name")))
    assert len({len(line) for line in times}) == 1
    assert len({line.rindex("  ") for line in moved}) == 1


def test_an_answer_without_a_ledger_has_no_row() -> None:
    assert tables([answer(ledger=None)]) == tables([])


def test_one_token_has_no_rate() -> None:
    _, moved = halves(answer(output_tokens=1, ledger=ledger(tps=None)))
    assert moved[2].split()[3] == "-"


def test_a_prompt_prefilled_where_it_is_decoded_names_no_prefill_node() -> None:
    _, moved = halves(answer(ledger=ledger(prefill_node="", provider="", writes=0, bytes=0)))
    assert moved[2].split()[5] == "-"
    assert moved[2].endswith("-")


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


def test_an_answer_that_reached_its_limit_says_so() -> None:
    cut = answer()
    cut.finish_reason = "length"
    assert transcript(cut).endswith(f"[cut at {cut.question.max_tokens} tokens]")

"""The demo's tables: where each request's time to first token went, and what moved between which nodes."""

from collections.abc import Sequence
from textwrap import shorten

from deploy.asking import Answer, ServedLedger

Row = tuple[str, ...]

TIME_HEADINGS: Row = ("ms", "TTFT", "= queue", "+ prefill", "+ exposed KV", "+ 1st step", "+ other")
MOVED_HEADINGS: Row = (
    "request", "in", "out", "tok/s", "chunks", "prefilled on", "decoded on", "writes", "MiB", "early", "provider",
)  # fmt: skip
LEGEND = """\
in, out: tokens. chunks: forward passes that its prompt took part in. exposed KV: the part of the wait for the transfer
that no computing hid. early: of the last prefill chunk's writes, those posted before its forward pass ended."""
TEXT = frozenset({"ms", "request", "prefilled on", "decoded on", "provider"})
"""Headings of left-aligned columns; the rest are numbers."""


def tables(answers: Sequence[Answer]) -> str:
    """A row in both tables for every answer that has a ledger."""
    served = [(answer, answer.ledger) for answer in answers if answer.ledger is not None]
    times = _table(TIME_HEADINGS, [_time_row(answer, ledger) for answer, ledger in served])
    moved = _table(MOVED_HEADINGS, [_moved_row(answer, ledger) for answer, ledger in served])
    return f"{times}\n\n{moved}\n\n{LEGEND}"


def _table(headings: Row, rows: Sequence[Row]) -> str:
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(_line(row, widths, headings) for row in [headings, rule, *rows])


def _line(row: Row, widths: Sequence[int], headings: Row) -> str:
    cells = (
        cell.ljust(width) if heading in TEXT else cell.rjust(width)
        for cell, width, heading in zip(row, widths, headings, strict=True)
    )
    return "  ".join(cells).rstrip()


def _time_row(answer: Answer, ledger: ServedLedger) -> Row:
    return (answer.question.title, *(str(round(seconds * 1e3)) for seconds in (ledger.ttft_s, *ledger.parts)))


def _moved_row(answer: Answer, ledger: ServedLedger) -> Row:
    return (
        answer.question.title,
        str(answer.prompt_tokens),
        str(answer.output_tokens),
        "-" if ledger.tps is None else f"{ledger.tps:.1f}",
        str(ledger.prefill_chunks),
        ledger.prefill_node or "-",
        ledger.decode_node,
        str(ledger.writes),
        f"{ledger.bytes / (1 << 20):.1f}",
        f"{ledger.early_writes}/{ledger.last_chunk_writes}",
        ledger.provider or "-",
    )


def transcript(answer: Answer) -> str:
    """The last question (shortened) and what came back."""
    asked = " ".join(answer.question.messages[-1]["content"].split())
    shown = asked if len(asked) <= 90 else f"{shorten(asked, 45, placeholder='')} [...] {_last_words(asked, 45)}"
    said = f"FAILED: {answer.failure}" if answer.failure is not None else answer.text.strip().replace("\n", "\n   ")
    cut = f" [cut at {answer.question.max_tokens} tokens]" if answer.finish_reason == "length" else ""
    return f"Q: {shown}\nA: {said}{cut}"


def _last_words(text: str, width: int) -> str:
    """Whole words from the end of the text, at most `width` characters."""
    return text[-width - 1 :].partition(" ")[2]

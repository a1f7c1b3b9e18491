"""The demo's table: for each request its tokens, its nodes, the parts of its time to first token, and its bytes."""

from collections.abc import Sequence

from deploy.asking import Answer

HEADINGS = (
    "request", "in", "out", "chunks", "prefill", "decode", "TTFT ms", "queue", "prefill", "exposed KV", "1st step",
    "other", "tok/s", "writes", "MiB", "early", "provider",
)  # fmt: skip
LEGEND = """\
TTFT = queue + prefill + exposed KV + first decode step + other, in ms. exposed KV: the part of the wait for the
transfer that no computing hid. early: of the last prefill chunk's writes, those posted before its pass ended."""
LEFT_ALIGNED = {0, 4, 5, 16}


def table(answers: Sequence[Answer]) -> str:
    """All answers that have a ledger, a row each, columns as wide as their widest cell."""
    rows = [HEADINGS, *(_row(answer) for answer in answers if answer.ledger is not None)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [_line(row, widths) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, "", LEGEND])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (
        cell.ljust(width) if column in LEFT_ALIGNED else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join(cells).rstrip()


def _row(answer: Answer) -> tuple[str, ...]:
    ledger = answer.ledger
    assert ledger is not None
    return (
        answer.question.title,
        str(answer.prompt_tokens),
        str(answer.output_tokens),
        str(ledger.prefill_chunks),
        ledger.prefill_node or "-",
        ledger.decode_node,
        _ms(ledger.ttft_s),
        *(_ms(part) for part in ledger.parts),
        "-" if ledger.tps is None else f"{ledger.tps:.1f}",
        str(ledger.writes),
        f"{ledger.bytes / (1 << 20):.1f}",
        f"{ledger.early_writes}/{ledger.last_chunk_writes}",
        ledger.provider or "-",
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


def transcript(answer: Answer) -> str:
    """The last question (shortened) and what came back."""
    asked = " ".join(answer.question.messages[-1]["content"].split())
    shown = asked if len(asked) <= 90 else f"{asked[:40]} [...] {asked[-45:]}"
    said = f"FAILED: {answer.failure}" if answer.failure is not None else answer.text.strip().replace("\n", "\n   ")
    return f"Q: {shown}\nA: {said}"

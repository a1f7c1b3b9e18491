"""The checks after the demo: did every answer come, do the times add up, is every page back? Pure."""

from collections.abc import Iterable, Sequence

from deploy.asking import Answer
from deploy.cluster_api import NodeView

ROUNDING_S = 1e-6
"""The processes of one machine read the same clock, and each part lies within the one around it: only the arithmetic of
floats is forgiven."""


def answer_problems(answers: Sequence[Answer]) -> list[str]:
    """Of each request: no whole answer, or a ledger that does not add up."""
    return [f"{answer.question.title}: {problem}" for answer in answers for problem in _problems(answer)]


def _problems(answer: Answer) -> Iterable[str]:
    if answer.failure is not None:
        yield answer.failure
        return
    ledger = answer.ledger
    assert ledger is not None
    if answer.output_tokens < 1 or not answer.text.strip():
        yield "the answer is empty"
    if abs(sum(ledger.parts) - ledger.ttft_s) > ROUNDING_S:
        yield f"the parts of its TTFT sum to {sum(ledger.parts):.6f} s, not to {ledger.ttft_s:.6f} s"
    if min(ledger.parts) < -ROUNDING_S:
        yield f"a part of its TTFT is negative: {ledger.parts}"
    if ledger.prefill_node and not (ledger.writes and ledger.bytes and ledger.provider):
        yield f"{ledger.prefill_node} computed its prompt, but no KV was counted on arrival"


def page_problems(nodes: Sequence[NodeView], expected: Iterable[str]) -> list[str]:
    """Of each node: not there any more, or pages that are neither free nor accounted for."""
    missing = set(expected) - {node.name for node in nodes}
    problems = [f"{name} is gone" for name in sorted(missing)]
    for node in nodes:
        if not node.all_pages_back:
            problems.append(
                f"{node.name}: {node.pages_free} of {node.pages_total} pages free, {node.pages_quarantined} quarantined"
            )
    return problems

"""KV that gave a request logits that were not finite is nobody else's beginning."""

import pytest

from engine.runner import ForwardResult, SampledToken
from protocol.messages import FailureCode
from tests.engine.traces import FakeForward, Harness


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_prompt_whose_logits_were_not_finite_is_computed_anew(asynchronous: bool) -> None:
    h = Harness(sharing=True, asynchronous=asynchronous)
    launch = h.runner.launch

    def not_finite(batch: object) -> FakeForward:
        result = launch(batch).result()  # type: ignore[arg-type]
        tokens: list[SampledToken | str] = ["the model's output was not finite"] * len(result.tokens)
        return FakeForward(ForwardResult(tokens, result.started_ns, result.ended_ns))

    h.runner.launch = not_finite  # type: ignore[method-assign]
    h.add("A", 10, 3)
    h.run()
    failure = h.gathered.ended["A"].failure
    assert failure is not None and failure.code is FailureCode.INTERNAL
    assert h.engine.pages_cached == 0
    h.runner.launch = launch  # type: ignore[method-assign]
    h.add("B", 10, 3)
    assert h.step() == "B10@0"
    h.run()
    h.assert_at_rest()

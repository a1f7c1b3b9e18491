"""The loads count the tokens that they are to count, on an engine whose every step is scripted."""

import pytest

from bench.peers.lines import Arrival, Prompt
from bench.peers.stepping import FILL_NEW, HEAD_START, Progress, SteppedPeer


class ScriptedEngine:
    """A token for each request in every step; a prompt's first number says how many steps it waits before."""

    def __init__(self) -> None:
        self.live: dict[str, list[int]] = {}
        self.steps = 0
        self.most_live = 0

    def submit(self, request: str, prompt: Prompt, new: int) -> None:
        self.live[request] = [-prompt[0], new]
        self.most_live = max(self.most_live, len(self.live))

    def progress(self) -> list[Progress]:
        self.steps += 1
        came = []
        for request, state in list(self.live.items()):
            state[0] += 1
            if state[0] > 0:
                came.append(Progress(request, state[0]))
            if state[0] == state[1]:
                del self.live[request]
        return came

    def close(self) -> None: ...


def test_a_batch_in_step_counts_all_tokens_after_its_first_ones() -> None:
    timed = SteppedPeer(ScriptedEngine()).decode([[0], [0], [0]], steps=5)
    assert timed.tokens == 3 * (5 + HEAD_START)


def test_the_window_opens_with_the_last_request() -> None:
    engine = ScriptedEngine()
    timed = SteppedPeer(engine).decode([[0], [HEAD_START]], steps=5)
    assert timed.tokens == 2 * 5
    assert not engine.live


def test_requests_that_never_run_together_are_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="never decoded together"):
        SteppedPeer(ScriptedEngine()).decode([[0], [50]], steps=2)


def test_prompts_are_filled_one_at_a_time() -> None:
    engine = ScriptedEngine()
    SteppedPeer(engine).fill([[0, 1], [0, 2], [0, 3]])
    assert (engine.most_live, engine.steps) == (1, 3 * FILL_NEW)


def test_prefill_counts_the_prompt() -> None:
    assert SteppedPeer(ScriptedEngine()).prefill([2, 7, 8, 9]).tokens == 4


def test_every_arrival_is_served_in_order_with_its_tokens() -> None:
    arrivals = [Arrival(0.0, [1], 4), Arrival(0.001, [0], 2), Arrival(0.02, [0], 1)]
    served = SteppedPeer(ScriptedEngine()).replay(arrivals)
    assert [(one.at, one.tokens) for one in served] == [(0.0, 4), (0.001, 2), (0.02, 1)]
    assert all(one.at <= one.first <= one.last for one in served)

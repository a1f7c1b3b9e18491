"""Prompts on their way into the prefill engine: what is given up while it waits is never computed, and the queue has a
bound."""

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import pytest

from bench.null_device import build_null, prompt
from engine.config import ContinuousBatchingConfig
from engine.loop import EngineLoop
from engine.outputs import EngineListener, PrefillChunk
from kv_messenger.pump import Pump
from prefill_node.engine_port import PrefillEngine
from protocol.messages import Failure, FailureCode

MAX_QUEUE = 3
CHUNK = 64


class Computed(EngineListener):
    """The prompt of each chunk that was ever about to run."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    def before_forward(self, chunks: Sequence[PrefillChunk]) -> None:
        self.prompts += [chunk.request_id for chunk in chunks]

    def forward_ended(self, chunks: Sequence[PrefillChunk], started_ns: int, ended_ns: int) -> None: ...

    def forward_failed(self, chunks: Sequence[PrefillChunk], error: str) -> None:
        raise AssertionError(error)


class AtOnce:
    """A pump without a thread."""

    def submit(self, action: Callable[[], None]) -> None:
        action()


class Desk:
    """An engine whose loop stands still until `go_on`."""

    def __init__(self) -> None:
        self.engine = build_null(ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=CHUNK))
        self.computed = Computed()
        self.engine.listener = self.computed
        self.loop = EngineLoop(self.engine, on_step=lambda _: None)
        self.port = PrefillEngine(self.loop, MAX_QUEUE)
        self.port.refuse_through(cast(Pump, AtOnce()))
        self.refused: dict[str, FailureCode] = {}

    def submit(self, name: str, tokens: int = CHUNK) -> None:
        def refused(failure: Failure) -> None:
            self.refused[name] = failure.code

        self.port.submit(name, prompt(tokens, seed=len(name)), refused)

    def give_up(self, name: str) -> None:
        """As the sender does."""
        self.port.abort(name)
        self.port.release(name)

    def go_on(self) -> None:
        self.loop.start()
        while self.loop.submit(lambda engine: engine.waiting or engine.running).result():
            pass


@pytest.fixture
def desk() -> Iterator[Desk]:
    opened = Desk()
    yield opened
    opened.loop.stop()
    opened.engine.close()


def test_a_prompt_that_is_given_up_while_it_waits_is_never_computed(desk: Desk) -> None:
    """Its decode node has left, was given up, or its deadline has passed: all end so."""
    for name in ("first", "given up", "last"):
        desk.submit(name, 3 * CHUNK)
    desk.give_up("given up")
    desk.go_on()
    assert desk.computed.prompts == ["first"] * 3 + ["last"] * 3
    assert desk.refused == {}


def test_what_waits_is_bounded_and_the_next_one_is_told_at_once(desk: Desk) -> None:
    for number in range(MAX_QUEUE + 2):
        desk.submit(f"prompt {number}")
    desk.go_on()
    assert desk.refused == dict.fromkeys(("prompt 3", "prompt 4"), FailureCode.OVERLOADED)
    assert desk.computed.prompts == ["prompt 0", "prompt 1", "prompt 2"]


def test_giving_up_makes_room_for_the_next(desk: Desk) -> None:
    for number in range(MAX_QUEUE):
        desk.submit(f"prompt {number}")
    desk.give_up("prompt 1")
    desk.submit("another")
    desk.go_on()
    assert desk.refused == {} and desk.computed.prompts == ["prompt 0", "prompt 2", "another"]


def test_giving_up_what_was_refused_changes_nothing(desk: Desk) -> None:
    for number in range(MAX_QUEUE + 1):
        desk.submit(f"prompt {number}")
    desk.give_up("prompt 3")
    for number in range(MAX_QUEUE):
        desk.port.release(f"prompt {number}")
    desk.go_on()
    assert desk.engine.pages_free == desk.engine.pages_total and desk.computed.prompts == []

"""The fence, against a real process that writes at full speed: after `close_endpoint(landing)` nothing lands."""

import numpy as np
import pytest

from fabric.immediates import pack
from fabric.libfabric import open_engine
from tests.fabric.child import WriterProcess
from tests.fabric.party import Party, drive, settle

MEMORY = 8 << 20
IMMEDIATE = pack(7, 1)


@pytest.mark.parametrize("page", [4 << 10, 64 << 10, 1 << 20])
@pytest.mark.parametrize("attempt", range(4))
def test_nothing_lands_after_the_landing_is_closed(page: int, attempt: int) -> None:
    engine = open_engine("net")
    receiver = Party(engine)
    memory, region = receiver.memory(MEMORY, fill=0)
    landing = engine.open_landing("writer")
    expectation = engine.expect(landing, IMMEDIATE, 1 << 40)
    with WriterProcess("net", landing, region.remote, page, IMMEDIATE) as writer:
        # two passes over the memory, then some writes into the next one: the fence cuts through a batch
        drive(receiver, until=lambda: engine.counted(expectation) > 2 * MEMORY // page + 1 + attempt)
        engine.close_endpoint(landing)
        at_the_fence = memory.copy()
        said: list[str] = []

        def the_writer_gave_up() -> bool:
            said.extend(filter(None, [writer.says()]))
            return any(line.startswith("ended") for line in said)

        drive(receiver, until=the_writer_gave_up)
        settle(receiver)
    assert np.array_equal(memory, at_the_fence)
    assert memory.any()
    assert receiver.events == []
    engine.close()

"""Batches behind held gates: armed in their order, each gate asked again whenever one is released."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kv_messenger.sender_transfer import Arm, Chunk, SenderTransfer
from kv_messenger.sent import Sent
from kv_messenger.withheld import GatedArming
from protocol.gates import GateClient, Gates
from tests.kv_messenger.builders import KEY, layout, no_source, plan

LAYERS = 3


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Gates]:
    made = Gates(str(tmp_path / "gates"))
    made.start()
    yield made
    made.close()


@pytest.fixture
def client(gates: Gates, tmp_path: Path) -> Iterator[GateClient]:
    made = GateClient(str(tmp_path / "gates"))
    yield made
    made.close()


class Sending:
    """One transfer, and the layers of it that were armed so far."""

    def __init__(self) -> None:
        transfer = SenderTransfer(KEY, plan(layout(layers=LAYERS), 4, [9]), 0, 60.0)
        self.sent = Sent(transfer, no_source())
        self.arms = [arm for arm in transfer.on_chunk(Chunk(0, 4, [[1]], 1)) if isinstance(arm, Arm)]


class Armed(list[tuple[Sent, int]]):
    def __call__(self, sent: Sent, arm: Arm) -> None:
        self.append((sent, arm.layer))

    def layers(self, of: Sending) -> list[int]:
        return [layer for sent, layer in self if sent is of.sent]


def arm_all(arming: GatedArming, *sendings: Sending) -> None:
    for sending in sendings:
        for arm in sending.arms:
            arming.arm(sending.sent, arm)


def test_open_gates_keep_nothing_back(gates: Gates) -> None:
    armed, sending = Armed(), Sending()
    arm_all(GatedArming(gates, armed), sending)
    assert armed.layers(sending) == [0, 1, 2]


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_held_layer_and_all_behind_it_wait_and_then_go_in_order(gates: Gates, client: GateClient, layer: int) -> None:
    client.hold(f"xfer:layer={layer}")
    armed, sending = Armed(), Sending()
    arming = GatedArming(gates, armed)
    arm_all(arming, sending)
    assert armed.layers(sending) == list(range(layer))
    client.release(f"xfer:layer={layer}")
    arming.on_released()
    assert armed.layers(sending) == list(range(LAYERS))


def test_after_a_release_the_gates_behind_it_are_asked_again(gates: Gates, client: GateClient) -> None:
    for layer in (0, 2):
        client.hold(f"xfer:layer={layer}")
    armed, sending = Armed(), Sending()
    arming = GatedArming(gates, armed)
    arm_all(arming, sending)
    assert armed == []
    client.release("xfer:layer=0")
    arming.on_released()
    assert armed.layers(sending) == [0, 1]
    client.release("xfer:layer=2")
    arming.on_released()
    assert armed.layers(sending) == [0, 1, 2]


def test_the_release_of_another_gate_changes_nothing(gates: Gates, client: GateClient) -> None:
    client.hold("xfer:layer=1")
    armed, sending = Armed(), Sending()
    arming = GatedArming(gates, armed)
    arm_all(arming, sending)
    client.release("xfer:layer=2")
    arming.on_released()
    assert armed.layers(sending) == [0]


def test_transfers_wait_each_for_itself(gates: Gates, client: GateClient) -> None:
    client.hold("xfer:layer=1")
    armed, first, second = Armed(), Sending(), Sending()
    arming = GatedArming(gates, armed)
    arm_all(arming, first)
    arming.arm(second.sent, second.arms[0])
    assert armed.layers(second) == [0]
    client.release("xfer:layer=1")
    arming.on_released()
    arm_all(arming, Sending())
    assert armed.layers(first) == [0, 1, 2] and armed.layers(second) == [0]


def test_what_was_stopped_meanwhile_is_never_armed(gates: Gates, client: GateClient) -> None:
    client.hold("xfer:layer=0")
    armed, first, second = Armed(), Sending(), Sending()
    arming = GatedArming(gates, armed)
    arm_all(arming, first, second)
    first.sent.transfer.stop(None)
    client.release("xfer:layer=0")
    arming.on_released()
    assert armed.layers(first) == [] and armed.layers(second) == [0, 1, 2]

"""Batches that a test's gate keeps from being armed: a transfer can be stopped between two layers."""

from collections.abc import Callable

from kv_messenger.sender_transfer import Arm
from kv_messenger.sent import Sent
from protocol.gates import Gates


class GatedArming:
    """Arms through `arm`, unless the gate `xfer:layer=l` is held (the context is one layer more); what comes behind a
    withheld batch waits with it."""

    def __init__(self, gates: Gates, arm: Callable[[Sent, Arm], None]) -> None:
        self._gates = gates
        self._arm = arm
        self._withheld: list[tuple[Sent, Arm]] = []

    def arm(self, sent: Sent, arm: Arm) -> None:
        behind = any(other is sent for other, _ in self._withheld)
        if behind or self._gates.held(f"xfer:layer={arm.layer}"):
            self._withheld.append((sent, arm))
        else:
            self._arm(sent, arm)

    def on_released(self) -> None:
        """Some gate opened; the others are asked again."""
        withheld, self._withheld = self._withheld, []
        for sent, arm in withheld:
            if sent.transfer.live:
                self.arm(sent, arm)

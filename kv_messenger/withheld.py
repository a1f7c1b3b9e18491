"""Batches that a test's gate keeps from being armed: a transfer can be stopped between two layers."""

from collections.abc import Callable

from kv_messenger.sender_transfer import Arm, SenderTransfer
from protocol.gates import Gates


class GatedArming:
    """Arms through `arm`, unless the gate `xfer:layer=l` is held; what comes behind a withheld batch waits with it."""

    def __init__(self, gates: Gates, arm: Callable[[SenderTransfer, Arm], None]) -> None:
        self._gates = gates
        self._arm = arm
        self._withheld: list[tuple[SenderTransfer, Arm]] = []

    def arm(self, transfer: SenderTransfer, arm: Arm) -> None:
        behind = any(other is transfer for other, _ in self._withheld)
        if behind or self._gates.held(f"xfer:layer={arm.layer}"):
            self._withheld.append((transfer, arm))
        else:
            self._arm(transfer, arm)

    def on_released(self) -> None:
        """Some gate opened; the others are asked again."""
        withheld, self._withheld = self._withheld, []
        for transfer, arm in withheld:
            if transfer.live:
                self.arm(transfer, arm)

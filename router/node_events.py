"""What nodes say, frame by frame, and the timer that notices silence. The only reader of the node channel."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from protocol.codec import BadFrame, decode
from protocol.logs import event
from protocol.messages import (
    ChoiceEnded,
    Failure,
    FailureCode,
    FromNode,
    Nack,
    NodeStatus,
    RequestEnded,
    StatusAck,
    TokenDelta,
    TokenDeltas,
)
from router.dispatch import Dispatcher
from router.membership import Member, Membership
from router.node_channel import NodeChannel
from router.policy import misfits

SWEEP_S = 0.25
MESSAGES_PER_TURN = 100
"""After so many the loop serves others; a frame may hold several."""

log = logging.getLogger(__name__)


class NodeEvents:
    """Keeps membership and dispatcher up to date. `start` and `close` on the event loop."""

    def __init__(
        self,
        channel: NodeChannel,
        membership: Membership,
        dispatcher: Dispatcher,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._membership = membership
        self._dispatcher = dispatcher
        self._clock = clock
        self._router_instance = secrets.token_hex(16)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def alive(self) -> bool:
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]
        for task in self._tasks:
            task.add_done_callback(_report)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        self._tasks = []

    def on_frame(self, sender: bytes, frame: bytes) -> int:
        """One frame of one node; never raises for what the frame holds. Returns how many messages that was."""
        instance = sender.decode(errors="replace")
        try:
            message: Any = decode(frame, FromNode)
        except BadFrame as error:
            self._drop("bad_frame", instance, str(error))
            self._channel.send(instance, Nack(failure=Failure(FailureCode.UNSUPPORTED, str(error)[:1000])))
            return 1
        match message:
            case NodeStatus():
                self._on_status(instance, message)
            case TokenDelta() | ChoiceEnded() | RequestEnded():
                self._dispatcher.on_message(instance, message)
            case TokenDeltas():
                for delta in message.deltas:
                    self._dispatcher.on_message(instance, delta)
                return len(message.deltas)
            case Nack():
                event(log, "node refused a frame", logging.WARNING, instance=instance, reason=message.failure.message)
                self._dispatcher.on_refused(instance)
        return 1

    def sweep(self) -> None:
        for lost in self._membership.sweep(self._clock()):
            self._lose(lost, "silent")

    async def _read(self) -> None:
        while True:
            messages = 0
            while messages < MESSAGES_PER_TURN:
                messages += self.on_frame(*await self._channel.receive())
            await asyncio.sleep(0)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep()

    def _on_status(self, instance: str, status: NodeStatus) -> None:
        if status.instance != instance:
            self._drop("foreign_instance", instance, status.instance)
            return
        known = self._membership.get(instance)
        was_usable, was_refused = (known.usable, known.refusal) if known else (False, None)
        refusal, replaced = self._membership.observe(status, self._clock())
        for lost in replaced:
            self._lose(lost, f"replaced by {instance}")
        now = self._membership.get(instance)
        if known is None or was_refused != refusal or now is None or now.usable != was_usable:
            _log_change(status, refusal)
            self._dispatcher.queue.move_up()
        if now is not None and now.usable and not was_usable:
            self._warn_of_misfits(now)
        self._channel.send(instance, StatusAck(router_instance=self._router_instance, refusal=refusal))

    def _warn_of_misfits(self, member: Member) -> None:
        """Of one of them, when a node comes into use: they tend to be alike."""
        found = misfits(member, self._membership)
        if found:
            prefill, decode, reason = found[0]
            names = {"prefill": prefill.status.name, "decode": decode.status.name}
            event(log, "nodes do not go together", logging.WARNING, **names, reason=reason, others=len(found) - 1)

    def _lose(self, member: Member, reason: str) -> None:
        """One that was draining has gone as it said it would."""
        node, instance = member.status.name, member.instance
        if member.status.draining:
            event(log, "node left", node=node, instance=instance)
        else:
            self._dispatcher.metrics.lost.inc()
            event(log, "node lost", logging.WARNING, node=node, instance=instance, reason=reason)
        self._dispatcher.on_lost(instance)

    def _drop(self, reason: str, instance: str, detail: str) -> None:
        self._dispatcher.metrics.dropped(reason)
        event(log, "frame dropped", logging.WARNING, reason=reason, instance=instance, detail=detail[:200])


def _log_change(status: NodeStatus, refusal: str | None) -> None:
    event(
        log,
        "node changed",
        role=status.role.value,
        node=status.name,
        instance=status.instance,
        ready=status.ready,
        draining=status.draining,
        refusal=refusal,
    )


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.critical("the node channel's reader died", exc_info=task.exception())

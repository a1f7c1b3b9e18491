"""Control messages under a schedule: the real `ControlThread` sends them, over sockets that are none.

As over ZeroMQ: messages of one connection keep their order; a queue that is full refuses; a connection that breaks
loses what was on its way. A dealer keeps what it had not sent, and gives it to whoever answers at the address next; a
router knows only those that are connected.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import msgspec
import zmq

from protocol.channel import ChannelCounters, ControlThread, Handler, Link
from tests.simulation.errors import Violation
from tests.simulation.schedule import Process, Schedule, Thread
from tests.simulation.script import Manners

RECONNECT_S = 1.0


class Wire:
    """One direction of a connection: at most `queue_limit` messages, in order."""

    def __init__(self, channel: "Channel", to: Callable[[], Process | None], deliver: Callable[[Any], None]) -> None:
        self.queue: deque[Any] = deque()
        self._channel = channel
        self._to = to
        self._deliver = deliver
        self._last = 0.0
        self._generation = 0

    def put(self, message: Any, flags: int, whom: str) -> None:
        """Raises zmq.Again if it is full. Sent at once if somebody is connected."""
        if len(self.queue) >= self._channel.manners.queue_limit:
            if flags & zmq.NOBLOCK:
                raise zmq.Again
            raise Violation(f"a control thread stands still: it sends to {whom}, who does not read")
        if self._channel.unruly():
            return
        for _ in range(1 + self._channel.unruly()):
            self.queue.append(message)
            self._launch()

    def connected(self) -> None:
        for _ in self.queue:
            self._launch()

    def broken(self, lost: int) -> None:
        """So many messages, the oldest, were on their way."""
        self._generation += 1
        for _ in range(lost):
            self.queue.popleft()

    def _launch(self) -> None:
        process, schedule = self._to(), self._channel.schedule
        if process is None:
            return
        self._last = max(self._last, schedule.now + schedule.within(self._channel.manners.message_delay))
        schedule.after(self._last - schedule.now, partial(self._arrive, self._generation), process)

    def _arrive(self, generation: int) -> None:
        if generation != self._generation:
            return
        if self._channel.unruly():
            self.queue.rotate(1)
        self._deliver(self.queue.popleft())


class DealerSocket:
    """Dials one address, again and again."""

    def __init__(
        self, channel: "Channel", control: "SimulatedControl", address: str, broken: Callable[[], None] | None
    ) -> None:
        self.control = control
        self._broken = broken
        self.address = address
        self.link: Link | None = None
        self.bound: RouterSocket | None = None
        self._channel = channel
        self.closed = False
        self._up = Wire(channel, lambda: self.bound.control.process if self.bound else None, self._deliver_up)
        self.down = Wire(channel, lambda: control.process, self._deliver_down)

    def send_multipart(self, frames: list[Any], flags: int = 0) -> None:
        self._up.put(frames[-1], flags, self.address)

    def connect(self, within: float) -> None:
        """To whoever listens there by then; later if nobody does. A process that stands still answers later, too."""
        self._channel.schedule.after(self._channel.schedule.within(within), self._reach)

    def cut(self) -> None:
        """The connection breaks."""
        if self.bound is not None:
            self.bound.dealers.pop(self.control.identity, None)
            self.bound = None
            self._up.broken(self._channel.schedule.random.randint(0, len(self._up.queue)))
            self.down.broken(len(self.down.queue))
            self._tell_broken()
        if not self.closed and not self.control.process.dead:
            self.connect(RECONNECT_S)

    def close(self) -> None:
        self.closed = True
        self.cut()
        self._up.broken(len(self._up.queue))

    def _tell_broken(self) -> None:
        if self._broken is not None and not self.closed:
            schedule = self._channel.schedule
            schedule.after(schedule.within(self._channel.manners.message_delay), self._broken, self.control.process)

    def _reach(self) -> None:
        bound = self._channel.bound.get(self.address)
        if self.closed or self.bound is not None or self.control.process.dead:
            return
        if bound is None:
            self._channel.waiting.append(self)
            self._tell_broken()
        else:
            bound.calling.append(self)
            self._channel.schedule.after(0.0, partial(self._accepted, bound), bound.control.process)

    def _accepted(self, bound: "RouterSocket") -> None:
        bound.calling.remove(self)
        if self.closed or self.bound is not None or self.control.process.dead:
            return
        before = bound.dealers.get(self.control.identity)
        if before is not None:
            before.cut()
        self.bound = bound
        bound.dealers[self.control.identity] = self
        self._up.connected()

    def _deliver_up(self, message: Any) -> None:
        assert self.bound is not None and self.bound.link is not None
        self.bound.control.receive(self.bound.link, self.control.identity, message)

    def _deliver_down(self, message: Any) -> None:
        if self.link is not None and not self.closed:
            self.control.receive(self.link, b"", message)


class RouterSocket:
    """Listens at one address."""

    def __init__(self, control: "SimulatedControl") -> None:
        self.control = control
        self.link: Link | None = None
        self.dealers: dict[bytes, DealerSocket] = {}
        self.calling: list[DealerSocket] = []

    def send_multipart(self, frames: list[Any], flags: int = 0) -> None:
        dealer = self.dealers.get(frames[0])
        if dealer is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        dealer.down.put(frames[1], flags, frames[0].decode())


class Channel:
    """Who listens where, and who is connected."""

    def __init__(self, schedule: Schedule, manners: Manners) -> None:
        self.schedule = schedule
        self.manners = manners
        self.bound: dict[str, RouterSocket] = {}
        self.waiting: list[DealerSocket] = []
        """Dealers whose address nobody listens at."""
        self.calm = False
        """From the moment when everything is healed."""

    def unruly(self) -> bool:
        share = self.manners.unruly
        return bool(share) and not self.calm and self.schedule.random.random() < share

    def listens(self, address: str) -> bool:
        return address in self.bound

    def bind(self, address: str, socket: RouterSocket) -> None:
        self.bound[address] = socket
        waiting, self.waiting = self.waiting, []
        for dealer in waiting:
            dealer.connect(RECONNECT_S)

    def died(self, control: "SimulatedControl") -> None:
        """Its process is gone: every connection breaks, and nobody listens at its addresses."""
        for address in [address for address, socket in self.bound.items() if socket.control is control]:
            socket = self.bound.pop(address)
            for dealer in list(socket.dealers.values()):
                dealer.cut()
            for dealer in socket.calling:
                dealer.connect(RECONNECT_S)
        for dealer in control.dealers:
            dealer.close()


class SimulatedControl(ControlThread):
    """A control thread whose sockets are the channel's, and whose turns are the schedule's. Handlers run as soon as a
    message is there; what is posted runs a little later, in order."""

    def __init__(self, channel: Channel, process: Process, identity: str, lag: float) -> None:
        # Not the parent's: it opens sockets and makes a thread.
        self.process = process
        self.identity = identity.encode()
        self.dealers: list[DealerSocket] = []
        self.counters = ChannelCounters()
        self._channel = channel
        self._inbox = Thread(channel.schedule, process, lag)

    def bind(self, address: str, expected: Any, handler: Handler) -> tuple[Link, str]:
        socket = RouterSocket(self)
        socket.link = Link(cast("zmq.Socket[bytes]", socket), expected, handler, bound=True)
        self._channel.bind(address, socket)
        return socket.link, address

    def dial(self, address: str, expected: Any, handler: Handler, broken: Callable[[], None] | None = None) -> Link:
        socket = DealerSocket(self._channel, self, address, broken)
        socket.link = Link(cast("zmq.Socket[bytes]", socket), expected, handler, bound=False)
        self.dealers.append(socket)
        socket.connect(self._channel.manners.message_delay)
        return socket.link

    def hang_up(self, link: Link) -> None:
        socket = cast(DealerSocket, link.socket)
        if socket in self.dealers:
            self.dealers.remove(socket)
            socket.close()

    def post(self, action: Callable[[], None]) -> None:
        self._inbox.post(action)

    def receive(self, link: Link, sender: bytes, message: Any) -> None:
        self.counters.received += 1
        link.handler(link, sender, message)

    def _frame(self, message: msgspec.Struct) -> bytes:
        """As it is: frozen, and its wire form has tests of its own."""
        return cast(bytes, message)

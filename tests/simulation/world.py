"""One seed, played: everything is started, its faults happen, everything is healed, and the books are looked at."""

from collections.abc import Callable
from functools import partial

from fabric.errors import OperationError
from fabric.immediates import SLOTS
from protocol.messages import Failure, FailureCode, FinishReason, Role
from tests.simulation.channel import Channel
from tests.simulation.decode import SimulatedDecodeNode
from tests.simulation.errors import Violation
from tests.simulation.network import ScheduledNetwork
from tests.simulation.nodes import STOP_S, Node, Surroundings
from tests.simulation.prefill import SimulatedPrefillNode
from tests.simulation.router import ClientRequest, SimulatedRouter
from tests.simulation.schedule import START_S, Schedule
from tests.simulation.script import PAGE, Fault, FaultKind, Script, Submission

BEGIN_S = 0.3
"""By then every node is registered."""
SMALL_PROMPT = 6
"""What a small prefill node takes at most, in tokens without the prompt's last."""
SETTLE_S = 20.0
"""After the last fault and the last deadline: until then everything must be at rest."""
STEPS_BETWEEN_LOOKS = 20
MAX_STEPS = 60_000


class World:
    """`say`: takes a line of what happens, for people."""

    def __init__(self, script: Script, say: Callable[[str], None] = lambda line: None) -> None:
        self.script = script
        self.say = say
        self.schedule = Schedule(script.seed)
        network = ScheduledNetwork(self.schedule, script.manners, script.fence_needs_dead_peer)
        self.channel = Channel(self.schedule, script.manners)
        self.around = Surroundings(script, self.schedule, network, self.channel)
        self.requests: dict[str, ClientRequest] = {}
        self.router = SimulatedRouter(self.around, 0, self.requests)
        names = [f"prefill-{i}" for i in range(script.prefills)] + [f"decode-{i}" for i in range(script.decodes)]
        self.nodes: list[Node] = [self._make(name, 0) for name in names]
        self._gone: list[Node] = []
        """Dead ones: what is on its way to their memory must not find it freed."""
        self._down: set[int] = set()
        """Nodes that are stopping, or dead and not started again."""
        self._starts = 0

    # ---- the play ----

    def run(self) -> None:
        """Raises Violation, or whatever a broken state machine raises."""
        self.router.start()
        for node in self.nodes:
            node.start()
        for index, submission in enumerate(self.script.submissions):
            self.schedule.after(BEGIN_S + submission.at, partial(self._submit, f"r{index}", submission))
        for fault in self.script.faults:
            self.schedule.after(BEGIN_S + fault.at, partial(self._strike, fault))
        self._play_until(self._healed_at())
        self._heal()
        self._play_until_at_rest()
        self._check_outcomes()

    def _healed_at(self) -> float:
        """Everything was asked, and every fault has struck and is over, but for what waits to be started again."""
        ends = [s.at for s in self.script.submissions] + [f.at + f.lasting for f in self.script.faults]
        return START_S + BEGIN_S + max(ends) + 0.01

    def _play_until(self, end: float) -> None:
        while self.schedule.now < end:
            self._play_some()

    def _play_until_at_rest(self) -> None:
        end = self.schedule.now + max(s.deadline_s for s in self.script.submissions) + SETTLE_S
        replaced = False
        while wrong := self._not_at_rest():
            if self.schedule.now > end:
                if replaced or not self.script.fence_needs_dead_peer:
                    raise Violation(f"not at rest in the end: {'; '.join(wrong)}")
                # Pages that only a dead peer cannot write to any more wait for its death.
                replaced, end = True, self.schedule.now + SETTLE_S
                for index in range(self.script.prefills):
                    self._kill(index, 0.1)
            self._play_some()

    def _play_some(self) -> None:
        step = self.schedule.step
        for _ in range(STEPS_BETWEEN_LOOKS):
            step()
        if self.schedule.steps > MAX_STEPS:
            raise Violation(f"no end after {MAX_STEPS} steps")

    def _submit(self, key: str, submission: Submission) -> None:
        request = ClientRequest(key, submission, self.schedule.now + submission.deadline_s)
        self.say(f"{key} is submitted")
        self.router.submit(request)
        if submission.abort_at is not None:
            self.schedule.after(submission.abort_at - submission.at, lambda: self._leave(request))

    def _leave(self, request: ClientRequest) -> None:
        self.say(f"the client of {request.key} leaves")
        self.router.leave(request)

    # ---- faults ----

    def _strike(self, fault: Fault) -> None:
        index, node = fault.node, self.nodes[fault.node]
        self.say(f"{fault.kind.value}: {node.instance} for {fault.lasting:.3f} s")
        match fault.kind:
            case FaultKind.KILL:
                self._kill(index, fault.lasting)
            case FaultKind.PAUSE:
                self._pause(node, fault.lasting)
            case FaultKind.STOP:
                self._stop(index, fault.lasting)
            case FaultKind.CUT_LINK:
                self._cut(node)
            case FaultKind.HOLD_GATE:
                self._hold(node, fault.lasting)
            case FaultKind.BREAK_RAIL:
                rail = self.schedule.random.randrange(node.fabric.rails)
                self.around.network.break_rail(node.fabric, rail, fault.lasting)
            case FaultKind.NEW_ROUTER:
                self._replace_router()
            case FaultKind.PAUSE_ROUTER:
                self._pause_router(fault.lasting)
            case _:
                self._spoil(fault.kind, self._prefill(index))

    def _prefill(self, index: int) -> SimulatedPrefillNode:
        node = self.nodes[index % self.script.prefills]
        assert isinstance(node, SimulatedPrefillNode)
        return node

    def _spoil(self, kind: FaultKind, node: SimulatedPrefillNode) -> None:
        network = self.around.network
        match kind:
            case FaultKind.BREAK_WRITES:
                for endpoint in node.fabric.sendings:
                    network.break_writes(endpoint)
            case FaultKind.FAIL_WRITE:
                network.fail_next.append(node.fabric)
            case FaultKind.LOSE_IMMEDIATE:
                network.lose_next.append(node.fabric)
            case FaultKind.FAIL_FORWARD:
                node.thread.fail_next = True

    def _kill(self, index: int, lasting: float) -> None:
        node = self.nodes[index]
        if index in self._down and node.process.dead:
            return
        self.say(f"{node.instance} is dead")
        self._down.add(index)
        self.schedule.kill(node.process)
        self.around.network.died(node.fabric)
        self.channel.died(node.control)
        if self.script.manners.notices_death:
            self._notice_death(node)
        self.schedule.after(lasting, partial(self._restart, index))

    def _notice_death(self, dead: Node) -> None:
        error = OperationError("simulated connection", 104, "reset by peer", "", dead.name)
        for node in self.nodes:
            for landing in node.fabric.landings:
                if landing.peer == dead.name:
                    later = partial(node.fabric.landing_failed, landing, error)
                    self.schedule.after(self.schedule.within(0.1), later)

    def _restart(self, index: int) -> None:
        if not self.nodes[index].process.dead:
            return
        self._starts += 1
        self._gone.append(self.nodes[index])
        self._down.discard(index)
        self.nodes[index] = self._make(self.nodes[index].name, self._starts)
        self.say(f"{self.nodes[index].instance} starts")
        self.nodes[index].start()

    def _make(self, name: str, incarnation: int) -> Node:
        if name.startswith("decode"):
            return SimulatedDecodeNode(self.around, name, incarnation)
        small = self.script.small_prefill and name == "prefill-0"
        most = SMALL_PROMPT if small else self.script.prefill_blocks * PAGE
        return SimulatedPrefillNode(self.around, name, incarnation, most)

    def _pause(self, node: Node, lasting: float) -> None:
        if node.process.running:
            self.schedule.pause(node.process)
            self.schedule.after(lasting, partial(self._resume, node))

    def _resume(self, node: Node) -> None:
        if node.process.paused:
            self.say(f"{node.instance} goes on")
            self.schedule.resume(node.process)
            self.around.network.released(node.fabric)

    def _stop(self, index: int, lasting: float) -> None:
        if index not in self._down and self.nodes[index].process.running:
            node = self.nodes[index]
            self._down.add(index)
            node.drain()
            self.schedule.after(self.schedule.within(1.0), node.stop, node.process)
            self.schedule.after(1.0, partial(self._close, index, node, lasting, self.schedule.now + STOP_S))

    def _close(self, index: int, node: Node, lasting: float, latest: float) -> None:
        """The process ends once nothing runs there, or when it has waited long enough."""
        if node.idle or self.schedule.now >= latest or node.process.dead:
            self._kill(index, lasting)
        else:
            self.schedule.after(0.1, partial(self._close, index, node, lasting, latest))

    def _cut(self, node: Node) -> None:
        for dealer in list(node.control.dealers):
            dealer.cut()
        socket = self.channel.bound.get(node.address)
        for dealer in list(socket.dealers.values()) if socket is not None else []:
            dealer.cut()

    def _hold(self, node: Node, lasting: float) -> None:
        layer = self.schedule.random.randrange(2)
        node.gates.shut.add("decode:join" if node.role is Role.DECODE else f"xfer:layer={layer}")
        self.schedule.after(lasting, node.gates.release_all, node.process)

    def _replace_router(self) -> None:
        self.router.lost()
        self.schedule.kill(self.router.process)
        self.channel.died(self.router.control)
        self._starts += 1
        self.router = SimulatedRouter(self.around, self._starts, self.requests)
        self.router.start()

    def _pause_router(self, lasting: float) -> None:
        """Its clients wait. Nodes give it up, and what it asked for."""
        process = self.router.process
        if process.running:
            self.schedule.pause(process)
            self.schedule.after(lasting, lambda: self.schedule.resume(process) if process.paused else None)

    def _heal(self) -> None:
        """From now on nothing breaks. What was to be started again is, what waits goes on."""
        self.say("everything is healed")
        self.channel.calm = True
        self.around.network.fail_next.clear()
        self.around.network.lose_next.clear()
        self.around.network.broken.clear()
        for node in self.nodes:
            node.gates.release_all()
            if isinstance(node, SimulatedPrefillNode):
                node.thread.fail_next = False
            self._resume(node)
        if self.router.process.paused:
            self.schedule.resume(self.router.process)

    # ---- what must hold in the end ----

    def _not_at_rest(self) -> list[str]:
        """What is still going on, in words."""
        wrong = [f"{request.key} has no outcome" for request in self.requests.values() if request.outcome is None]
        if self._down or len(self.requests) < len(self.script.submissions):
            wrong.append("not all nodes are up")
        for node in [] if wrong else self.nodes:
            wrong += [f"{node.instance}: {what}" for what in self._leaks(node)]
        return wrong

    def _leaks(self, node: Node) -> list[str]:
        gauges, cache = node.fabric.gauges(), node.pages.cache
        living = {other.instance for other in self.nodes}
        found = {
            "pages are not free": cache.total - cache.free,
            "context slots are taken": node.contexts.count - node.contexts.free,
            "writes are outstanding": gauges.outstanding,
            "batches are armed": gauges.armed,
            "immediates are expected": gauges.expectations,
        }
        if isinstance(node, SimulatedDecodeNode):
            found |= {
                "requests": node.admission.jobs,
                "requests have no end": sum(node.open.values()),
                "transfers": node.receiver.transfers,
                "transfer slots are taken": SLOTS - node.receiver.slots_free,
                "landings linger": node.receiver.lingering_landings,
                "landings too many": max(0, gauges.endpoints - self.script.prefills),
            }
        elif isinstance(node, SimulatedPrefillNode):
            sessions = node.sender.sessions
            found |= {
                "transfers": node.sender.transfers,
                "prompts": 0 if node.engine.at_rest else 1,
                "sessions too many": max(0, sessions - len([i for i in living if i.startswith("decode")])),
                "endpoints too many": gauges.endpoints - sessions,
            }
        return [f"{number} {what}" for what, number in found.items() if number]

    def _check_outcomes(self) -> None:
        for node in self.nodes:
            node.pages.check()
        if not self.script.must_succeed:
            return
        for request in self.requests.values():
            left = request.submission.abort_at is not None
            if request.outcome is not FinishReason.LENGTH and not left and not self._too_long(request):
                raise Violation(f"{request.key} had to succeed: {request.outcome}")
        self._check_nobody_given_up()

    def _too_long(self, request: ClientRequest) -> bool:
        """A prefill node has said so: no fault of the node's."""
        outcome = request.outcome
        said = isinstance(outcome, Failure) and outcome.code is FailureCode.TOO_LONG
        return said and self.script.small_prefill and request.submission.tokens - 1 > SMALL_PROMPT

    def _check_nobody_given_up(self) -> None:
        if self.script.faults and not self.script.must_move:
            return
        for node in self.nodes:
            fenced = isinstance(node, SimulatedDecodeNode) and node.receiver.counters.fences
            if fenced or self._lost_peers(node):
                raise Violation(f"{node.instance} gave up a peer that did nothing wrong")

    @staticmethod
    def _lost_peers(node: Node) -> int:
        assert isinstance(node, SimulatedDecodeNode | SimulatedPrefillNode)
        side = node.receiver if isinstance(node, SimulatedDecodeNode) else node.sender
        return side.counters.peers_lost

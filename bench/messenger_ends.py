"""The halves of the KV messenger that benchmarks put into processes of their own: real sender or receiver, pump,
fabric and control sockets. Who computes, and who waits for KV, is theirs."""

from collections.abc import Callable
from dataclasses import dataclass

from bench.messenger_shape import COMPATIBILITY
from decode_node.server import PrefillLinks
from engine.progress import ProgressWord
from fabric.api import MemoryRegion, TransferEngine
from fabric.libfabric import open_engine
from kv_messenger.peers import Introduction
from kv_messenger.pump import Pump, PumpOwner
from kv_messenger.receiver import Receiver
from kv_messenger.sender import Sender
from kv_messenger.sources import EnginePort, Source
from kv_messenger.targets import Target, TargetOwner
from prefill_node.server import DecodePeers
from protocol.channel import ControlThread
from protocol.curve import ClusterKey
from protocol.gates import Gates
from protocol.layout import KVLayout

INSTANCE = "bench-prefill"


@dataclass(frozen=True, slots=True)
class Means:
    """Of either half. `provider`: of libfabric, "" for the best. `register`: gives a fabric the pool of pages."""

    provider: str
    layout: KVLayout
    register: Callable[[TransferEngine], MemoryRegion]
    key: ClusterKey


class SendingEnd:
    """`watch`: what the pump tells instead of the sender itself. Runs once it is built."""

    def __init__(self, means: Means, engine: EnginePort, watch: Callable[[Sender], PumpOwner] = lambda it: it) -> None:
        self._means = means  # the pool that it registers must live as long
        self.fabric = open_engine(means.provider or None)
        self.region = means.register(self.fabric)
        self.word = ProgressWord()
        self._control = ControlThread(means.key, INSTANCE, lambda: None)
        peers = DecodePeers(self._control)
        self.sender = Sender(
            instance=INSTANCE,
            compatibility=COMPATIBILITY,
            layout=means.layout,
            fabric=self.fabric,
            sources=[Source(engine, self.word.address, [self.region])],
            send=peers.send,
            gates=Gates(),
        )
        self.pump = Pump(self.fabric, watch(self.sender))
        peers.deliver_to(self.pump, self.sender)
        self.address = peers.bind("tcp://127.0.0.1:0")
        self.pump.start()
        self._control.start()

    def close(self) -> None:
        self._control.close()
        self.pump.close()


class ReceivingEnd:
    """`start` it once `owner` can be told of arrivals."""

    def __init__(self, name: str, means: Means, owner: TargetOwner) -> None:
        self.instance = f"bench-{name}"
        self._means = means  # the pool that it registers must live as long
        self.fabric = open_engine(means.provider or None)
        region = means.register(self.fabric)
        self._control = ControlThread(means.key, self.instance, lambda: None)
        links = PrefillLinks(self._control)
        self.receiver = Receiver(
            me=Introduction(self.instance, name, COMPATIBILITY, means.layout),
            fabric=self.fabric,
            targets=[Target(owner, [region])],
            send=links.send,
            hang_up=links.hang_up,
        )
        self.pump = Pump(self.fabric, self.receiver)
        links.deliver_to(self.pump, self.receiver)

    def start(self) -> None:
        self.pump.start()
        self._control.start()

    def close(self) -> None:
        self._control.close()
        self.pump.close()

"""The socket that nodes dial: a node that does not read never holds the router up."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import zmq

from protocol.curve import ClusterKey
from protocol.messages import DecodeRequest
from protocol.sampling import SamplingParams
from router.node_channel import NodeChannel

DEADLINE_S = 10.0


def request(prompt: int) -> DecodeRequest:
    sampling = SamplingParams(max_new_tokens=1)
    return DecodeRequest(request="r", public_id="", prompt=[5] * prompt, sampling=sampling, deadline_s=1.0, prefills=[])


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await work

    asyncio.run(bounded())


def test_a_node_that_does_not_read_is_refused_more_and_blocks_nothing(key: ClusterKey) -> None:
    async def work(peer: "zmq.Socket[bytes]") -> None:
        channel = NodeChannel(key, "tcp://127.0.0.1:*", high_water_mark=4)
        try:
            channel.open()
            peer.connect(channel.address)
            peer.send(b"hello")
            assert await channel.receive() == (b"silent", b"hello")
            sent = 0
            while channel.send("silent", request(prompt=100_000)):
                sent += 1
                await asyncio.sleep(0)
            assert sent > 0
        finally:
            peer.close()
            channel.close()

    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.rcvhwm = 1
        peer.routing_id = b"silent"
        key.secure_client(peer)
        run(work(peer))


def test_a_node_that_is_not_connected_is_refused(key: ClusterKey) -> None:
    async def work() -> None:
        channel = NodeChannel(key, "tcp://127.0.0.1:*")
        channel.open()
        assert channel.send("nobody", request(prompt=1)) is False
        channel.close()

    run(work())

"""A call of one daemon to another that gets through only when nobody wants it any more."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from pdserve.api.kvd.v1 import peer_pb2, peer_pb2_grpc
from pdserve.kvd.testing import running_node
from pdserve.rpc.errors import Unavailable
from tests.contract.kvd.peers_rig import Stranger, until


class Late(Stranger):
    """A peer behind a slow way: its challenge comes when it is told to. What it then hears is kept."""

    def __init__(self) -> None:
        self.address = ""
        self.called, self.through, self.over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.heard: list[Any] = []

    async def Connect(
        self, request_iterator: AsyncIterator[peer_pb2.ConnectRequest], context: object
    ) -> AsyncIterator[peer_pb2.ConnectResponse]:
        """See peer.proto."""
        try:
            self.called.set()
            await self.through.wait()
            yield peer_pb2.ConnectResponse(challenge=peer_pb2.Challenge(nonce=bytes(16), address=self.address))
            async for request in request_iterator:
                self.heard.append(request)
        finally:
            self.over.set()


@pytest.mark.parametrize("given_up", [True, False])
async def test_a_call_of_a_link_that_was_given_up_greets_nobody(given_up: bool) -> None:
    """The peer would take the greeting for the present link's, and lose what goes over that one. A call that is wanted
    still is greeted."""
    server, late = grpc.aio.server(), Late()
    peer_pb2_grpc.add_PeerServiceServicer_to_server(late, server)
    late.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with running_node() as a, asyncio.timeout(20.0):
            node = a.kvd.node
            with capture_logs() as logs:
                link = node.desk.links.towards(late.address, node.now())
                node.network.kick(node.now())
                await late.called.wait()
                if given_up:
                    node.desk.links.broken(link, link.stream, Unavailable("given up"), node.now())
                late.through.set()
                if given_up:
                    await late.over.wait()
                    await until(lambda: any(entry["event"] == "peer_not_reached" for entry in logs))
                else:
                    await until(lambda: bool(late.heard))
            assert [request.WhichOneof("message") for request in late.heard] == ([] if given_up else ["greeting"])
            assert not node.defects
    finally:
        await server.stop(0)

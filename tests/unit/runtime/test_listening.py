"""A server that closes forgets nobody, whenever they came; what is fake: the handlers, the sockets are real."""

import asyncio
import socket
from typing import Any

import pytest
from aiohttp import web

from pdserve.rpc.errors import ConfigError
from pdserve.runtime.listening import HttpPort, stop_listening

TURNS = pytest.mark.parametrize("turns", range(6))
"""Turns of the loop between a client's connect and the close: before it is accepted, in between, after."""


class Known(asyncio.Protocol):
    """Notes whom it was given."""

    def __init__(self) -> None:
        self.transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self.transport = transport


async def connected(port: int, turns: int) -> socket.socket:
    """A client whose connection waits in the backlog, `turns` turns later. The kernel shakes hands: nothing blocks."""
    client = socket.create_connection(("127.0.0.1", port))
    client.setblocking(False)
    for _ in range(turns):
        await asyncio.sleep(0)
    return client


async def ended(client: socket.socket) -> bool:
    """Whether the client hears that nobody is there, rather than nothing."""
    try:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), 5) == b""
    except ConnectionResetError:
        return True


@TURNS
async def test_whoever_was_accepted_is_made_known(turns: int) -> None:
    """On return each connection is its protocol's, which can end it, or its client was refused."""
    made: list[Known] = []

    def protocol() -> Known:
        made.append(Known())
        return made[-1]

    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    with await connected(server.sockets[0].getsockname()[1], turns) as client:
        await stop_listening(server)
        for one in made:
            assert isinstance(one.transport, asyncio.Transport)
            one.transport.abort()
        assert await ended(client)
    assert not server.is_serving()
    await stop_listening(server)  # safe twice


@TURNS
async def test_whoever_comes_while_an_http_port_closes_hears_of_it(turns: int) -> None:
    """A client that has connected and has not asked yet does not wait until the process ends."""
    port = HttpPort(web.Application())
    with await connected(await port.start("127.0.0.1", 0), turns) as client:
        await port.aclose()
        assert await ended(client)
    await port.aclose()  # safe twice


async def test_a_cancelled_close_closes() -> None:
    """Nobody is taken any more, although the wait for who was accepted is cut short."""
    server = await asyncio.get_running_loop().create_server(Known, "127.0.0.1", 0)
    closing = asyncio.create_task(stop_listening(server))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not server.is_serving()


async def test_a_port_that_is_taken_is_named() -> None:
    """As what it was to be and as what was asked for; nothing is left of the attempt."""
    port: Any = HttpPort(web.Application())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot bind the page's port 127.0.0.1:{number}: .*in use"):
            await port.start("127.0.0.1", number, called="the page's port")
    await port.aclose()

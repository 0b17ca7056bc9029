"""An HTTP application on one port, and the end of any asyncio server that forgets no connection."""

import asyncio

from aiohttp import web

from pdserve.rpc.errors import ConfigError

GRACE = 1.0
"""Seconds that an open request gets to end, once the port is closed."""


async def stop_listening(server: asyncio.Server) -> None:
    """Closes a server once every connection that it has accepted is its protocol's; safe twice.

    asyncio accepts a connection in one turn of the loop and makes its transport in the next. A server that is closed
    between the two forgets it with its socket open, and whoever called waits for an answer until the process ends
    (python/cpython#109564).
    """
    loop = asyncio.get_running_loop()
    try:
        for listener in server.sockets:
            loop.remove_reader(listener.fileno())  # accepts no more; who is in the backlog is refused by the close
        await asyncio.sleep(0)  # the last one's transport is made,
    finally:
        server.close()
    await asyncio.sleep(0)  # and its protocol told


class HttpPort:
    """Serves a web application from `start` to `aclose`."""

    def __init__(self, app: web.Application, *, handler_cancellation: bool = False) -> None:
        """`handler_cancellation`: a client that goes away cancels its handler."""
        self._runner = web.AppRunner(
            app, handler_cancellation=handler_cancellation, access_log=None, shutdown_timeout=GRACE
        )
        self._listener: asyncio.Server | None = None

    async def start(self, host: str, port: int, *, called: str = "HTTP port", backlog: int = 128) -> int:
        """Binds and serves; returns the port, 0 takes a free one. `called`: as what an error names it.

        Raises:
            ConfigError: the address is taken or is none of this host's.
        """
        await self._runner.setup()
        made = self._runner.server
        assert made is not None, "set up"
        try:
            # Not aiohttp's own site, which has no door to the listener: see `stop_listening`.
            self._listener = await asyncio.get_running_loop().create_server(
                made, host.strip("[]"), port, backlog=backlog
            )
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(f"cannot bind {called} {host}:{port}: {error.strerror}") from error
        return int(self._listener.sockets[0].getsockname()[1])

    async def aclose(self) -> None:
        """Takes no more connections and ends all there are, with what they ask; safe twice."""
        listener, self._listener = self._listener, None
        if listener is not None:
            await stop_listening(listener)
        await self._runner.cleanup()

"""The program that an engine asks for a service's health, against real servers."""

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from pdserve.runtime.server import Server
from tests.compose.deployment import COMPOSE


async def ask(target: str) -> tuple[int, str]:
    """Status and words of health.py, as the engine runs it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", str(COMPOSE / "health.py"), target, stderr=subprocess.PIPE
    )
    _, said = await process.communicate()
    return process.returncode or 0, said.decode()


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
async def test_a_grpc_server_is_healthy_while_it_serves(unix: bool, tmp_path: Path) -> None:
    """0 only between `serving(True)` and `serving(False)`: not while it starts, nor while it drains, nor afterwards."""
    server = Server(())
    if unix:
        server.bind_unix(tmp_path / "s.sock")
        target = f"unix:{tmp_path}/s.sock"
    else:
        target = f"127.0.0.1:{server.bind('127.0.0.1', 0)}"
    await server.start()
    try:
        assert (await ask(target))[0] == 1
        await server.serving(True)
        assert await ask(target) == (0, "")
        await server.serving(False)
        status, said = await ask(target)
        assert (status, "not serving" in said) == (1, True)
    finally:
        await server.stop()
    status, said = await ask(target)
    assert (status, target in said) == (1, True)


async def test_http_is_healthy_only_with_200() -> None:
    """What a 503 says is passed on."""
    answer = {"status": 503}

    async def health(_: web.Request) -> web.Response:
        return web.Response(status=answer["status"], text="no engine can be routed to")

    app = web.Application()
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/health"
        status, said = await ask(url)
        assert (status, "no engine can be routed to" in said) == (1, True)
        answer["status"] = 200
        assert await ask(url) == (0, "")
    finally:
        await runner.cleanup()


async def test_a_server_that_says_nothing_is_not_healthy() -> None:
    """A socket that takes the question and never answers is given up within the engine's own timeout."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        async with asyncio.timeout(4):
            status, said = await ask(f"127.0.0.1:{server.getsockname()[1]}")
        assert (status, "timed out" in said) == (1, True)

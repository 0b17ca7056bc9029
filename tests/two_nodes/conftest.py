"""Two namespaces, the processes in them, and what may happen to the link between. Needs root."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.engine.port import Request, Sampling
from pdserve.engine.sim import SimConfig, SimEngine
from pdserve.rpc.channel import aio_channel

A, B = "pdserve-a", "pdserve-b"
FRONT = {A: "10.77.0.1", B: "10.77.0.2"}
BACK = {A: "10.77.1.1", B: "10.77.1.2"}
DEVICE = "back0"
"""Of the daemons' link, in each namespace."""
PROXY, PING, PEER, RELAY = 7001, 7002, 7003, 7004
START_S = 40.0
Answer = dict[str, Any]


def ip(*words: str) -> None:
    """One `ip` command.

    Raises:
        CalledProcessError: it did not work.
    """
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


def inside(node: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    """A command in a namespace; its result says whether it worked."""
    return subprocess.run(["ip", "netns", "exec", node, *words], capture_output=True, timeout=10, check=False)


@dataclass
class Nodes:
    """Two nodes that serve."""

    folder: Path

    async def ask(self, mode: str, *, tokens: int = 150, count: int = 6, seed: int = 1) -> "asyncio.Task[list[Answer]]":
        """Begins to ask, in the first namespace."""
        words = (f"{FRONT[A]}:{PROXY}", mode, str(tokens), str(count), str(seed))
        process = await start(A, [str(Path(__file__).with_name("ask.py")), *words], self.folder / "ask.log", piped=True)

        async def answers() -> list[Answer]:
            out, _ = await asyncio.wait_for(process.communicate(), 120.0)
            return [json.loads(line) for line in out.splitlines()]

        return asyncio.create_task(answers())

    async def right(self, answers: Sequence[Answer]) -> None:
        """Raises AssertionError where an answer is not that of one engine by itself."""
        engine = await SimEngine.start(SimConfig(num_blocks=4096), None)
        try:
            for number, said in enumerate(answers):
                assert "tokens" in said, said
                request = Request(f"alone-{number}", tuple(said["prompt"]), Sampling(max_tokens=8, temperature=0.0))
                alone: list[int] = []
                async with contextlib.aclosing(engine.generate(request)) as stream:
                    async for output in stream:
                        alone += output.token_ids
                assert said["tokens"] == alone
                assert said["kv_bytes"]
        finally:
            await engine.aclose()

    async def describe(self, node: str) -> kvd_pb2.DescribeResponse:
        """What a daemon says of itself."""
        async with aio_channel(f"unix:{self.folder}/{node}/kvd.sock") as channel:
            return await kvd_pb2_grpc.OperatorStub(channel).Describe(kvd_pb2.DescribeRequest(), timeout=5.0)

    async def idle(self) -> None:
        """Waits until neither daemon holds anything.

        Raises:
            AssertionError: one does.
        """
        for _ in range(400):
            said = [await self.describe(node) for node in (A, B)]
            held = [r for one in said for r in one.regions if r.free != r.num_blocks]
            if not held:
                break
            await asyncio.sleep(0.05)
        assert not held
        assert not any(one.defects for one in said)

    def link(self, state: str) -> None:
        """The daemons' link goes "down" or "up"."""
        assert not inside(B, "ip", "link", "set", DEVICE, state).returncode


async def start(
    node: str, words: Sequence[str], log: Path, *, piped: bool = False, environ: Mapping[str, str] | None = None
) -> Any:
    """`python` with these words in a namespace."""
    with log.open("ab") as file:
        return await asyncio.create_subprocess_exec(
            "ip", "netns", "exec", node, sys.executable, *words,
            stdout=subprocess.PIPE if piped else file, stderr=file, env=os.environ | dict(environ or {}),
        )  # fmt: skip


async def said(log: Path, words: str, process: Any) -> None:
    """Waits until a log has some words.

    Raises:
        AssertionError: not in time, or its process has ended; with the log.
    """
    for _ in range(int(START_S / 0.05)):
        text = await asyncio.to_thread(log.read_text)
        if words in text:
            return
        assert process.returncode is None, text
        await asyncio.sleep(0.05)
    raise AssertionError(f"no {words!r} within {START_S} s:\n{text}")


@pytest.fixture(scope="session")
def namespaces() -> Iterator[None]:
    """Two namespaces, joined twice."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.fail("network namespaces take root and iproute2")
    for node in (A, B):
        subprocess.run(["ip", "netns", "del", node], capture_output=True, check=False, timeout=10)
        ip("netns", "add", node)
        ip("-n", node, "link", "set", "lo", "up")
    for device, addresses in (("front0", FRONT), (DEVICE, BACK)):
        ip("-n", A, "link", "add", device, "type", "veth", "peer", "name", device, "netns", B)
        for node in (A, B):
            ip("-n", node, "addr", "add", f"{addresses[node]}/24", "dev", device)
            ip("-n", node, "link", "set", device, "up")
    yield
    for node in (A, B):
        ip("netns", "del", node)


@contextlib.asynccontextmanager
async def running(
    clock_off: float = 0.0, delay: float = 0.0, transport: tuple[str, ...] = ("--transport=sim",)
) -> AsyncIterator[Nodes]:
    """A deployment over both. `transport`: of the daemons, as flags; `clock_off`: seconds that everything on the second
    node is ahead; `delay`: seconds that a relay before each daemon keeps what passes, each way."""
    folder = Path(tempfile.mkdtemp(prefix="two"))
    key = folder / "key"
    key.write_text("the key of these two nodes")
    off = {"PDSERVE_FAILPOINTS": f"clock=return({clock_off})"} if clock_off else {}
    common = ["--log-format=console", f"--cluster-key-file={key}"]
    processes: list[Any] = []

    async def run(node: str, name: str, ready: str, *words: str) -> None:
        log = folder / f"{name}.log"
        environ = off if node == B else {}
        process = await start(node, ["-m", f"pdserve.{name.split('-')[0]}", *words, *common], log, environ=environ)
        processes.append(process)
        await said(log, ready, process)

    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.push_async_callback(_end, processes)
        front = f"--host={FRONT[A]}"
        await run(A, "proxy", "proxy_ready", front, f"--grpc-port={PROXY}", f"--ping-port={PING}", "--http-port=0")
        for node, role in ((A, "prefill"), (B, "decode")):
            address = f"{BACK[node]}:{RELAY if delay else PEER}"
            if delay:
                words = [str(Path(__file__).with_name("relay.py")), BACK[node], str(RELAY), str(PEER), str(delay)]
                processes.append(await start(node, words, folder / f"relay-{role}.log"))
            listen = (f"--peer-listen={BACK[node]}:{PEER}", f"--peer-address={address}", "--insecure")
            await run(node, f"kvd-{role}", "kvd_ready", f"--state-dir={folder}/{node}", *transport, *listen)
            engine = ("--engine=sim", f"--kvd-socket={folder}/{node}/kvd.sock", f"--proxy={FRONT[A]}:{PING}")
            await run(node, role, "serving", *engine, f"--host={FRONT[node]}", "--no-sim-prefix-cache")
        yield Nodes(folder)


async def _end(processes: Sequence[Any]) -> None:
    for process in reversed(processes):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

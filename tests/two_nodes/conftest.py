"""Two namespaces, the processes in them, and what may happen to the link between. Needs root."""

import asyncio
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.engine.port import Request, Sampling
from pdserve.engine.sim import SimConfig, SimEngine
from pdserve.rpc.channel import aio_channel
from tests.two_nodes.asker import LINE_BYTES, Answer, Asker

if TYPE_CHECKING:
    from tests.two_nodes.ups import Ups

A, B = "pdserve-a", "pdserve-b"
FRONT = {A: "10.77.0.1", B: "10.77.0.2"}
BACK = {A: "10.77.1.1", B: "10.77.1.2"}
DEVICE = "back0"
"""Of the daemons' link, in each namespace."""
PROXY, PING, PEER, RELAY = 7001, 7002, 7003, 7004
START_S = 40.0
SIM = ("--transport=sim",)
NIXL = ("--transport=nixl", "--nixl-tls=tcp", f"--nixl-net-devices={DEVICE}")


def ip(*words: str) -> None:
    """One `ip` command.

    Raises:
        CalledProcessError: it did not work.
    """
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


def inside(node: str, *words: str) -> subprocess.CompletedProcess[bytes]:
    """A command in a namespace; its result says whether it worked."""
    return subprocess.run(["ip", "netns", "exec", node, *words], capture_output=True, timeout=10, check=False)


_alone: dict[tuple[int, ...], list[int]] = {}
"""What one simulated engine answers by itself, by prompt."""


@dataclass
class Nodes:
    """Two nodes that serve, and who asks them."""

    folder: Path
    asker: Asker

    async def ask(self, mode: str, *, tokens: int = 150, count: int = 6, seed: int = 1) -> "asyncio.Task[list[Answer]]":
        """Begins to ask for as many prompts of a length, in the first namespace."""
        draw = random.Random(seed)
        prompts = [[draw.randrange(256) for _ in range(tokens)] for _ in range(count)]
        return await self.call([{"prompt": prompt, "mode": mode} for prompt in prompts])

    async def call(self, calls: Sequence[Mapping[str, Any]]) -> "asyncio.Task[list[Answer]]":
        """Begins to make these calls (see ask.py), in the first namespace; their answers come in this order."""
        return await self.asker.asks(calls)

    async def right(self, answers: Sequence[Answer]) -> None:
        """Raises AssertionError where an answer is not that of one engine by itself."""
        prompts = [tuple(said["prompt"]) for said in answers]
        for said in answers:
            assert "tokens" in said, said
            assert said["kv_bytes"]
        engine = await SimEngine.start(SimConfig(num_blocks=4096), None)
        try:
            for number, prompt in enumerate(set(prompts) - _alone.keys()):
                request = Request(f"alone-{number}", prompt, Sampling(max_tokens=8, temperature=0.0))
                alone: list[int] = []
                async with contextlib.aclosing(engine.generate(request)) as stream:
                    async for output in stream:
                        alone += output.token_ids
                _alone[prompt] = alone
        finally:
            await engine.aclose()
        assert [said["tokens"] for said in answers] == [_alone[prompt] for prompt in prompts]

    async def describe(self, node: str) -> kvd_pb2.DescribeResponse:
        """What a daemon says of itself."""
        async with aio_channel(f"unix:{self.folder}/{node}/kvd.sock") as channel:
            return await kvd_pb2_grpc.OperatorStub(channel).Describe(kvd_pb2.DescribeRequest(), timeout=5.0)

    async def busy(self) -> None:
        """Waits until decode's daemon holds something."""
        for _ in range(400):
            if any(region.free != region.num_blocks for region in (await self.describe(B)).regions):
                return
            await asyncio.sleep(0.02)
        raise AssertionError("nothing is handed over")

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

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """The daemons' link is down."""
        link("down")
        try:
            yield
        finally:
            link("up")


def link(state: str) -> None:
    """The daemons' link goes "down" or "up"."""
    assert not inside(B, "ip", "link", "set", DEVICE, state).returncode


async def start(
    node: str,
    words: Sequence[str],
    log: Path,
    *,
    piped: bool = False,
    environ: Mapping[str, str] | None = None,
    core: int | None = None,
) -> Any:
    """`python` with these words in a namespace. `piped`: its stdin and stdout are ours; `core`: all it may run on."""
    pipe = subprocess.PIPE if piped else None
    with log.open("ab") as file:
        return await asyncio.create_subprocess_exec(
            *(("taskset", "-c", str(core)) if core is not None else ()),
            "ip", "netns", "exec", node, sys.executable, *words,
            stdin=pipe or subprocess.DEVNULL, stdout=pipe or file, stderr=file, env=os.environ | dict(environ or {}),
            limit=LINE_BYTES,
        )  # fmt: skip


async def start_asker(folder: Path) -> Asker:
    """Who asks the proxy, in the first namespace."""
    log = folder / "ask.log"
    words = [str(Path(__file__).with_name("ask.py")), f"{FRONT[A]}:{PROXY}"]
    return Asker(await start(A, words, log, piped=True), log)


async def said(log: Path, words: str, process: Any, within: float = START_S) -> None:
    """Waits until a log has some words, for so many seconds.

    Raises:
        AssertionError: not in time, or its process has ended; with the log.
    """
    for _ in range(int(within / 0.05)):
        text = await asyncio.to_thread(log.read_text)
        if words in text:
            return
        assert process.returncode is None, text
        await asyncio.sleep(0.05)
    raise AssertionError(f"no {words!r} within {within} s:\n{text}")


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


@dataclass(frozen=True)
class Deployment:
    """What runs in the namespaces."""

    transport: tuple[str, ...] = SIM
    """Of the daemons, and whatever else they are told, as flags."""
    clock_off: float = 0.0
    """Seconds that everything on the second node is ahead."""
    delay: float = 0.0
    """Seconds that a relay before each daemon keeps what passes, each way."""


class Deployments:
    """The one deployment that runs: the next test has it too if it wants the same and this one found nothing wrong."""

    def __init__(self) -> None:
        self._running: tuple[Deployment, Nodes] | None = None
        self._stack = AsyncExitStack()

    @contextlib.asynccontextmanager
    async def running(self, wanted: Deployment) -> AsyncIterator[Nodes]:
        """It, which holds nothing."""
        if self._running is None or self._running[0] != wanted:
            await self.aclose()
            self._running = wanted, await self._stack.enter_async_context(_running(wanted))
        nodes = self._running[1]
        try:
            await nodes.idle()
            yield nodes
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Ends it."""
        self._running = None
        await self._stack.aclose()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def deployments(namespaces: None) -> AsyncIterator[Deployments]:
    """None is running yet."""
    made = Deployments()
    yield made
    await made.aclose()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_ups(deployments: Deployments) -> "AsyncIterator[Ups]":
    """One deployment on vLLM for all tests, which is whole and idle between them."""
    from tests.two_nodes.ups import two_ups  # which imports this module

    await deployments.aclose()  # the namespaces have room for one
    async with two_ups() as both:
        yield both


@contextlib.asynccontextmanager
async def _running(wanted: Deployment) -> AsyncIterator[Nodes]:
    folder = Path(tempfile.mkdtemp(prefix="two"))
    key = folder / "key"
    key.touch(0o600)
    key.write_text("the key of these two nodes")
    off = {"PDSERVE_FAILPOINTS": f"clock=return({wanted.clock_off})"} if wanted.clock_off else {}
    common = ["--log-format=console", f"--cluster-key-file={key}"]
    processes: list[Any] = []

    async def run(node: str, name: str, ready: str, *words: str) -> None:
        log = folder / f"{name}.log"
        environ = off if node == B else {}
        process = await start(node, ["-m", f"pdserve.{name.split('-')[0]}", *words, *common], log, environ=environ)
        processes.append(process)
        await said(log, ready, process)

    async def run_kvd(node: str, role: str) -> None:
        address = f"{BACK[node]}:{RELAY if wanted.delay else PEER}"
        if wanted.delay:
            words = [str(Path(__file__).with_name("relay.py")), BACK[node], str(RELAY), str(PEER), str(wanted.delay)]
            processes.append(await start(node, words, folder / f"relay-{role}.log"))
        listen = (f"--peer-listen={BACK[node]}:{PEER}", f"--peer-address={address}", "--insecure")
        await run(node, f"kvd-{role}", "kvd_ready", f"--state-dir={folder}/{node}", *wanted.transport, *listen)

    async def run_engine(node: str, role: str) -> None:
        engine = ("--engine=sim", f"--kvd-socket={folder}/{node}/kvd.sock", f"--proxy={FRONT[A]}:{PING}")
        await run(node, role, "serving", *engine, f"--host={FRONT[node]}", "--no-sim-prefix-cache")

    async with AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.push_async_callback(_end, processes)
        front = (f"--host={FRONT[A]}", f"--grpc-port={PROXY}", f"--ping-port={PING}", "--http-port=0")
        async with asyncio.TaskGroup() as starting:
            starting.create_task(run(A, "proxy", "proxy_ready", *front))
            starting.create_task(run_kvd(A, "prefill"))
            starting.create_task(run_kvd(B, "decode"))
        async with asyncio.TaskGroup() as starting:
            starting.create_task(run_engine(A, "prefill"))
            starting.create_task(run_engine(B, "decode"))
        asker = await start_asker(folder)
        stack.push_async_callback(asker.aclose)
        yield Nodes(folder, asker)


async def _end(processes: Sequence[Any]) -> None:
    for process in reversed(processes):
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

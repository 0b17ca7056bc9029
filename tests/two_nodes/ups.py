"""Two nodes as a newcomer starts them: one `pdserve up` in each namespace, with vLLM and a tiny random model; and for a
while a second prefill engine, whose KV lies otherwise."""

import asyncio
import contextlib
import json
import math
import mmap
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.engine.vllm.tiny import TinyShape, tiny_llama
from pdserve.rpc.channel import aio_channel
from tests.two_nodes.asker import Answer
from tests.two_nodes.beside import HALF, Beside
from tests.two_nodes.conftest import BACK, DEVICE, FRONT, PEER, PING, PROXY, A, B, Nodes, said, start, start_asker

SEED = int(os.environ.get("PDSERVE_TEST_SEED", "1"))
SHAPE = TinyShape()
BLOCK = 64
"""Tokens of a block of the engines that `pdserve up` starts."""
TOKEN_BYTES = 2 * SHAPE.kv_heads * SHAPE.head_dim * 4 * SHAPE.layers
"""K and V of a token in float32, over all layers."""
LEASE, SILENCE, GRACE = 4.0, 4.5, 1.0
"""Seconds. Short, so that a link can be down for longer."""
START_S, END_S = 120.0, 60.0
_ROUTED_S = 20.0
DECODE, ALONE = "decode-0", "both-0"
WORKER = kvd_pb2.PARTICIPANT_WORKER
AHEAD = 3.0
CLOCKS = {"PDSERVE_FAILPOINTS": ";".join(f"{name}:clock=return({AHEAD})" for name in ("kvd", DECODE, ALONE))}
"""Wall clocks of all processes of decode's node: seconds ahead of those of prefill's."""
VLLM = ("--max-model-len", "512", "--max-num-batched-tokens", "128", "--no-enable-prefix-caching")
ALIKE = ("--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(8 << 20), *VLLM)


@dataclass
class Ups(Nodes):
    """Two nodes, each with a `pdserve up`, a core and a kvd."""

    beside: Beside
    """The second prefill engine."""
    blocks: dict[str, int] = field(default_factory=dict)
    """Tokens of a block of each prefill engine, by id."""

    async def alone(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """What one engine answers by itself: a third one, of which kvd knows nothing."""
        said = await self.answers(prompts, route="colocated")
        assert not any(answer["kv_bytes"] for answer in said)
        return [answer["tokens"] for answer in said]

    async def answers(self, prompts: Sequence[Sequence[int]], **how: Any) -> list[Answer]:
        """All at once; raises AssertionError where one is not answered."""
        got = await (await self.asking(prompts, **how))
        assert all("tokens" in answer for answer in got), got
        return got

    async def asking(self, prompts: Sequence[Sequence[int]], **how: Any) -> "asyncio.Task[list[Answer]]":
        """Begins to ask."""
        return await self.call([{"prompt": prompt, "ignore_eos": True, **how} for prompt in prompts])

    def checked(self, got: Sequence[Answer], alone: Sequence[Sequence[int]]) -> int:
        """Raises AssertionError where answers are not those of one engine, or their KV did not come over nixl, all
        of it; the bytes of KV."""
        for answer, tokens in zip(got, alone, strict=True):
            assert answer["tokens"] == tokens, answer
            assert (answer["transport"], answer["recomputed"], answer["fallbacks"]) == ("nixl", 0, 0)
            block = self.blocks[answer["prefill"]]
            assert answer["kv_bytes"] == math.ceil(len(answer["prompt"]) / block) * block * TOKEN_BYTES
        return sum(answer["kv_bytes"] for answer in got)

    async def joined(self) -> None:
        """Waits until the proxy sends requests to both prefill engines: idle ones take turns."""
        await self.beside.registered(START_S)
        self.blocks = {one.engine_id: BLOCK if one.ranks == 1 else HALF for one in (await self.describe(A)).engines}
        assert set(self.blocks.values()) == {BLOCK, HALF}
        await self._routed(set(self.blocks.values()))

    async def parted(self) -> None:
        """Lets the second prefill engine go; waits until the proxy sends requests to the first alone. Safe twice."""
        self.beside.leave()
        await self._routed({BLOCK})

    async def _routed(self, wanted: set[int]) -> None:
        (prompt,) = drawn(1)
        until = time.monotonic() + _ROUTED_S
        while time.monotonic() < until:
            answers = [(await (await self.asking([prompt])))[0] for _ in range(2)]
            if {self.blocks.get(answer.get("prefill", "")) for answer in answers} == wanted:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"requests do not go to {wanted}: {answers}")

    def engine(self, block: int) -> str:
        """The prefill engine whose blocks have so many tokens."""
        (engine,) = [engine for engine, tokens in self.blocks.items() if tokens == block]
        return engine

    def pid(self, node: str, name: str) -> int:
        """Of one of a node's processes."""
        return int(json.loads((self.folder / node / "up.json").read_text())["processes"][name])

    @contextlib.contextmanager
    def stopped(self, node: str, name: str) -> Iterator[None]:
        """One of a node's processes does not run."""
        pid = self.pid(node, name)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    async def offered(self, count: int) -> dict[str, list[int]]:
        """Waits until prefill's kvd has so many offers that nobody has accepted, each of another engine; their blocks
        by engine."""
        async with aio_channel(f"unix:{self.folder}/{A}/kvd.sock") as channel:
            operator = kvd_pb2_grpc.OperatorStub(channel)
            for _ in range(400):
                listed = await operator.ListTransfers(kvd_pb2.ListTransfersRequest(), timeout=5.0)
                if [one.producer_state for one in listed.transfers] == ["complete"] * count:
                    leases = (await operator.ListLeases(kvd_pb2.ListLeasesRequest(), timeout=5.0)).leases
                    assert len(leases) == count
                    return {lease.engine_id: list(lease.block_ids) for lease in leases}
                await asyncio.sleep(0.05)
        raise AssertionError(f"no {count} offers: {listed}")

    async def filling(self, modes: int) -> None:
        """Waits until copies have begun for transfers of so many modes."""
        async with aio_channel(f"unix:{self.folder}/{A}/kvd.sock") as channel:
            operator = kvd_pb2_grpc.OperatorStub(channel)
            for _ in range(400):
                listed = await operator.ListTransfers(kvd_pb2.ListTransfersRequest(), timeout=5.0)
                if len({one.mode for one in listed.transfers if "filling" in one.consumer_states}) == modes:
                    return
                await asyncio.sleep(0.02)
        raise AssertionError(f"no copies of {modes} modes: {listed}")

    async def damage(self, block: int, blocks: Sequence[int]) -> None:
        """Overwrites some blocks of the prefill engine whose blocks have `block` tokens, in all layers of its last rank
        and of no other, with numbers that a model can compute on."""
        described, engine_id = await self.describe(A), self.engine(block)
        region = max((one for one in described.regions if one.engine_id == engine_id), key=lambda one: one.rank)
        (engine,) = [one for one in described.engines if one.engine_id == engine_id]
        (pid,) = [one.pid for one in engine.participants if (one.participant, one.rank) == (WORKER, region.rank)]
        length = block * TOKEN_BYTES // SHAPE.layers // (region.rank + 1)
        assert region.bytes == SHAPE.layers * region.num_blocks * length
        (memory,) = {os.stat(fd).st_ino: fd for fd in _kv_memory(pid)}.values()
        with memory.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            for layer in range(SHAPE.layers):
                for number in blocks:
                    at = (layer * region.num_blocks + number) * length
                    mapped[at : at + length] = bytes([0x3F, 0x11]) * (length // 2)


def _kv_memory(pid: int) -> Iterator[Path]:
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(fd).startswith("/memfd:pdserve-kv"):
                yield fd


def drawn(*lengths: int, name: str = "") -> list[list[int]]:
    """Prompts of these lengths."""
    print(f"PDSERVE_TEST_SEED={SEED}")
    draw = random.Random(f"{SEED} {name}")
    return [[draw.randrange(256) for _ in range(length)] for length in lengths]


@contextlib.asynccontextmanager
async def two_ups() -> AsyncIterator[Ups]:
    """Prefill, `Beside` and the proxy on one node; decode on the other, whose clocks are `AHEAD`, and an engine to
    compare with. At the end all drain, and end with status 0."""
    folder = Path(tempfile.mkdtemp(prefix="ups"))
    async with AsyncExitStack() as stack:
        if not os.environ.get("PDSERVE_TEST_KEEP"):  # set it to read the logs of a run
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        key, model = folder / "key", tiny_llama(folder / "tiny", SHAPE)
        key.touch(0o600)
        key.write_text("the key of these two nodes")
        _authority(folder)
        own = {
            A: ["--prefill", "1", "--decode", "0", "--grpc-port", str(PROXY), "--http-port", "0", "--no-traces"],
            B: ["--prefill", "0", "--decode", "1", "--both", "1", "--proxy", f"{FRONT[A]}:{PROXY}"],
        }
        cores, ups = sorted(os.sched_getaffinity(0)), {}
        for place, node in enumerate((A, B)):
            kvd = (f"peer-listen={BACK[node]}:{PEER}", "nixl-tls=tcp", f"nixl-net-devices={DEVICE}", f"lease={LEASE}",
                   f"peer-silence={SILENCE}", f"grace={GRACE}", *_tls(folder, node))  # fmt: skip
            words = ["-m", "pdserve.cli", "up", "--model", str(model), "--pin", "--restarts", "0",
                     "--host", FRONT[node], "--cluster-key-file", str(key), "--ping-port", str(PING),
                     "--state-dir", str(folder / node), *own[node],
                     *(word for setting in kvd for word in ("--kvd", setting)), "--", *ALIKE]  # fmt: skip
            ups[node] = await start(
                node, words, folder / f"{node}.log", core=cores[place % len(cores)], environ=CLOCKS if node == B else {}
            )
            stack.push_async_callback(_end, ups[node])
        beside = await Beside.start(folder, key, model, VLLM)
        stack.push_async_callback(_end, beside.process)
        for node, up in ups.items():
            await said(folder / f"{node}.log", "\nready", up, START_S)
        asker = await start_asker(folder)
        stack.push_async_callback(asker.aclose)
        both = Ups(folder, asker, beside)
        await both.joined()
        yield both
        await beside.end(END_S)
        for up in ups.values():
            up.send_signal(signal.SIGINT)
        for node, up in ups.items():
            assert await asyncio.wait_for(up.wait(), END_S) == 0, (folder / f"{node}.log").read_text()


async def _end(up: Any) -> None:
    """Twice SIGINT stops at once; a `pdserve up` that is killed takes the rest with it."""
    with contextlib.suppress(ProcessLookupError):
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
            up.send_signal(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(up.wait(), 1.0 if number is not signal.SIGKILL else END_S)


def _authority(folder: Path) -> None:
    """Certificates of both daemons and of who signed them, with the openssl of this machine."""
    new = ("-newkey", "rsa:2048", "-nodes", "-days", "2")
    _openssl(folder, "req", "-x509", *new, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ours")
    for node in (A, B):
        (folder / "names").write_text(f"subjectAltName=IP:{BACK[node]}\n")
        _openssl(folder, "req", *new[:3], "-keyout", f"{node}.key", "-out", "ask", "-subj", f"/CN={node}")
        signer = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        _openssl(folder, "x509", "-req", "-in", "ask", *signer, "-out", f"{node}.pem")


def _tls(folder: Path, node: str) -> tuple[str, ...]:
    return (f"peer-tls-cert={folder}/{node}.pem", f"peer-tls-key={folder}/{node}.key", f"peer-tls-ca={folder}/ca.pem")


def _openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=20)

"""Two nodes as a newcomer starts them: one `pdserve up` in each namespace, with vLLM and a tiny random model."""

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
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.engine.vllm.tiny import TinyShape, tiny_llama
from pdserve.rpc.channel import aio_channel
from tests.two_nodes.asker import Answer
from tests.two_nodes.conftest import BACK, DEVICE, FRONT, PEER, PING, PROXY, A, B, Nodes, said, start, start_asker

SEED = int(os.environ.get("PDSERVE_TEST_SEED", "1"))
SHAPE = TinyShape()
BLOCK = 32
BLOCK_BYTES = BLOCK * 2 * SHAPE.kv_heads * SHAPE.head_dim * 4 * SHAPE.layers
"""K and V of a block in float32, over all layers."""
LEASE, SILENCE, GRACE = 4.0, 4.5, 1.0
"""Seconds. Short, so that a link can be down for longer."""
START_S, END_S = 120.0, 60.0
PREFILL, DECODE, ALONE = "prefill-0", "decode-0", "both-0"
AHEAD = 3.0
CLOCKS = {"PDSERVE_FAILPOINTS": ";".join(f"{name}:clock=return({AHEAD})" for name in ("kvd", DECODE, ALONE))}
"""Wall clocks of all processes of decode's node: seconds ahead of those of prefill's."""
VLLM = ("--block-size", str(BLOCK), "--max-model-len", "512", "--kv-cache-memory-bytes", str(8 << 20),
        "--max-num-batched-tokens", "128", "--no-enable-prefix-caching")  # fmt: skip


@dataclass
class Ups(Nodes):
    """Two nodes, each with a `pdserve up`, a core and a kvd."""

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
            assert answer["kv_bytes"] == math.ceil(len(answer["prompt"]) / BLOCK) * BLOCK_BYTES
        return sum(answer["kv_bytes"] for answer in got)

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

    async def offered(self) -> None:
        """Waits until prefill's kvd has an offer that nobody has accepted."""
        async with aio_channel(f"unix:{self.folder}/{A}/kvd.sock") as channel:
            operator = kvd_pb2_grpc.OperatorStub(channel)
            for _ in range(400):
                listed = await operator.ListTransfers(kvd_pb2.ListTransfersRequest(), timeout=5.0)
                if [one.producer_state for one in listed.transfers] == ["complete"]:
                    return
                await asyncio.sleep(0.05)
        raise AssertionError(f"no offer: {listed}")

    def scribble(self) -> None:
        """Overwrites the KV memory of prefill's engine, with numbers that a model can compute on."""
        (memory,) = {os.stat(fd).st_ino: fd for pid in _below(self.pid(A, PREFILL)) for fd in _kv_memory(pid)}.values()
        with memory.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            mapped[:] = bytes([0x3F, 0x11]) * (len(mapped) // 2)


def _below(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _below(int(child))


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
    """Prefill and the proxy on one node; decode on the other, whose clocks are `AHEAD`, and an engine to compare with.
    At the end both drain, and end with status 0."""
    folder = Path(tempfile.mkdtemp(prefix="ups"))
    async with AsyncExitStack() as stack:
        if not os.environ.get("PDSERVE_TEST_KEEP"):  # set it to read the logs of a run
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        key, model = folder / "key", tiny_llama(folder / "tiny", SHAPE)
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
                     *(word for setting in kvd for word in ("--kvd", setting)), "--", *VLLM]  # fmt: skip
            ups[node] = await start(
                node, words, folder / f"{node}.log", core=cores[place % len(cores)], environ=CLOCKS if node == B else {}
            )
            stack.push_async_callback(_end, ups[node])
        for node, up in ups.items():
            await said(folder / f"{node}.log", "\nready", up, START_S)
        asker = await start_asker(folder)
        stack.push_async_callback(asker.aclose)
        yield Ups(folder, asker)
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

"""`pdserve up --engine vllm` with a tiny random Llama, and the ways in that a user has.

Real: every process, vLLM, gRPC, HTTP, kvd and its memory. Stands in: the model, whose text is noise that
hangs on every token of the prompt.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from openai import OpenAI

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.cli import demo_check
from pdserve.cli.deployment import Deployment
from pdserve.client import Client, Retry, Topology
from pdserve.engine.vllm.tiny import TinyShape, tiny_llama
from pdserve.rpc.channel import sync_channel

if TYPE_CHECKING:
    from tests.e2e.conftest import Up

SEED = int(os.environ.get("PDSERVE_TEST_SEED", "1"))
MODEL = "tiny"
BLOCK = 32
WAIT_S = 30.0
"""Longest wait for one answer."""


@dataclass(frozen=True)
class Fleet:
    """A deployment that is ready, and what talks to it."""

    up: "Up"
    at: Deployment
    kv: demo_check.Geometry
    sdk: Client
    openai: OpenAI
    public: grpc.Channel
    """To the proxy."""
    operator: kvd_pb2_grpc.OperatorStub

    def held(self) -> list[str]:
        """What is not free: kvd's blocks, transfers and leases, and requests in the proxy."""
        said = self.operator.Describe(kvd_pb2.DescribeRequest(), timeout=WAIT_S)
        assert len(said.regions) == 2, "prefill and decode have a region each"
        for one in said.regions:
            assert one.free + one.leased + one.in_flight + one.quarantined == one.num_blocks, one
        held = [f"{one.num_blocks - one.free} blocks of {one.engine_id}" for one in said.regions]
        leases = self.operator.ListLeases(kvd_pb2.ListLeasesRequest(), timeout=WAIT_S).leases
        transfers = self.operator.ListTransfers(kvd_pb2.ListTransfersRequest(), timeout=WAIT_S).transfers
        topology = self.topology()
        held += [f"{len(leases)} leases", f"{len(transfers)} transfers"]
        held += [f"{topology.in_flight} in flight", f"{topology.queued} queued"]
        return [line for line in held if not line.startswith("0 ")]

    def busy(self, since: float) -> list[str]:
        """Engines that hold KV or a request, by themselves, or have not spoken since the moment `since`."""
        asked = time.monotonic()
        return [
            f"{engine.role}: {engine.free_kv_tokens} of {engine.total_kv_tokens} free, {engine.running} running"
            for engine in self.topology().engines
            if (engine.free_kv_tokens, engine.running, engine.waiting) != (engine.total_kv_tokens, 0, 0)
            or asked - engine.beat_age_seconds <= since
        ]

    def topology(self) -> Topology:
        """The engines, as the proxy tells of them."""
        return self.sdk.topology(timeout=WAIT_S)

    def idle(self, within: float) -> None:
        """Returns when nothing is held anywhere, by the word of kvd, the proxy, and each engine's next beat."""
        since = time.monotonic()
        while left := [*self.held(), *self.busy(since)]:
            assert time.monotonic() < since + within, f"after {within} s: {left}"
            time.sleep(0.05)

    def curl(self, *words: str) -> "subprocess.Popen[bytes]":
        """A running curl, which says what it reads at once."""
        program = shutil.which("curl")
        assert program, "this test needs curl on the PATH"
        return subprocess.Popen([program, "-N", "-sS", *words], stdout=subprocess.PIPE, bufsize=0)

    def drain(self) -> None:
        """Ends it as Ctrl-C does, once nothing is held: with status 0, and no process is left."""
        self.idle(within=10.0)
        at = self.up.ready()  # with the pids of those that were started again
        assert self.up.end(signal.SIGINT) == 0, self.up.out.read_text()
        assert self.up.left(at) == []


Attend = Callable[..., contextlib.AbstractContextManager[Fleet]]


Begin = Callable[..., "Up"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model."""
    return tiny_llama(tmp_path_factory.mktemp("model") / MODEL, TinyShape(max_model_len=4096))


@pytest.fixture(scope="session")
def geometry(tiny: Path) -> demo_check.Geometry:
    """The KV cache of the model."""
    return demo_check.geometry(json.loads((tiny / "config.json").read_text()), BLOCK)


@pytest.fixture(scope="session")
def begin(launch: "Callable[..., Up]", tiny: Path, geometry: demo_check.Geometry) -> Begin:
    """`begin(pool_blocks, context, up's flags, vLLM's arguments)`: a deployment with the model that is starting, for
    whoever ends it."""

    def one(pool_blocks: int, context: int, flags: Sequence[str] = (), more: Sequence[str] = ()) -> "Up":
        pool_bytes = (pool_blocks + 1) * geometry.expected_bytes(BLOCK)  # vLLM keeps a block for itself
        vllm: dict[str, Any] = {
            "--block-size": BLOCK,
            "--max-model-len": context,
            "--kv-cache-memory-bytes": pool_bytes,
            "--max-num-batched-tokens": 128,  # long prompts come in chunks
        }
        given = [str(word) for pair in vllm.items() for word in pair]
        fixed = ("--engine", "vllm", "--model", str(tiny), "--pin", "--on-failure", "fail")
        return launch(*fixed, *flags, "--", *given, *more)

    return one


@pytest.fixture(scope="session")
def attend(begin: Begin, geometry: demo_check.Geometry) -> Attend:
    """`attend(...)` as `begin`: once it is ready, with what talks to it; drained at the end, if it still runs then."""

    @contextlib.contextmanager
    def one(pool_blocks: int, context: int, flags: Sequence[str] = (), more: Sequence[str] = ()) -> Iterator[Fleet]:
        up = begin(pool_blocks, context, flags, more)
        at = up.ready()
        with contextlib.ExitStack() as stack:
            channel = stack.enter_context(sync_channel(at.kvd))
            fleet = Fleet(
                up,
                at,
                geometry,
                stack.enter_context(Client(at.grpc, timeout=WAIT_S, retry=Retry(attempts=1))),
                stack.enter_context(OpenAI(base_url=f"{at.http}/v1", api_key="none", timeout=WAIT_S, max_retries=0)),
                stack.enter_context(sync_channel(at.grpc)),
                kvd_pb2_grpc.OperatorStub(channel),
            )
            yield fleet
            if up.process.poll() is None:
                fleet.drain()

    return one


@pytest.fixture
def words(request: pytest.FixtureRequest) -> Callable[[int], str]:
    """`words(n)`: text of n characters that no other test has, so that no prefix cache knows it."""
    print(f"PDSERVE_TEST_SEED={SEED}")
    source = random.Random(f"{SEED} {request.node.nodeid}")
    return lambda length: "".join(source.choices("etaoinshrdlu  ", k=length))

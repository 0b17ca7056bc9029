"""The commands as processes: exit status, signals, and what they say when they cannot start."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdserve.api.common.v1 import common_pb2
from pdserve.api.decode.v1 import decode_pb2, decode_pb2_grpc
from pdserve.rpc.channel import aio_channel
from pdserve.runtime.beats import Reply
from pdserve.runtime.clock import Clock
from pdserve.runtime.config import INSECURE_KEY
from pdserve.runtime.signing import Signer
from pdserve.runtime.testing import FakeProxy

SIM = ("--engine", "sim", "--role", "both", "--beat-seconds", "0.05", "--log-format", "json")


class Command:
    """`pdserve-decode` as a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def end(self, timeout: float = 20.0) -> tuple[int, list[dict[str, object]]]:
        """Exit status and what it logged."""
        async with asyncio.timeout(timeout):
            _, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, [json.loads(line) for line in err.splitlines() if line.startswith(b"{")]


async def start(*argv: str) -> Command:
    """Starts one."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdserve.decode", *argv, stderr=asyncio.subprocess.PIPE
    )
    return Command(process)


@pytest.fixture
async def proxy() -> AsyncIterator[FakeProxy]:
    """Under the key that everybody knows."""
    proxy = FakeProxy(Signer(INSECURE_KEY))
    yield proxy
    proxy.close()


async def test_a_signal_drains_and_the_status_is_0(proxy: FakeProxy) -> None:
    """Registered, signalled, gone: the log tells the story."""
    command = await start(*SIM, "--proxy", proxy.address)
    await proxy.answer(Reply(ok=True), Clock().unix(), 20.0)
    command.process.send_signal(signal.SIGTERM)
    status, lines = await command.end()
    events = [line["event"] for line in lines]
    assert status == 0
    assert [event for event in events if event in ("serving", "draining", "drained", "closed")] == [
        "serving",
        "draining",
        "drained",
        "closed",
    ]


async def test_a_second_signal_does_not_wait(proxy: FakeProxy) -> None:
    """A request that would take minutes is cut off; the status is 0 all the same."""
    command = await start(*SIM, "--proxy", proxy.address, "--sim-cost-decode-base", "0.1")
    beat = await proxy.answer(Reply(ok=True), Clock().unix(), 20.0)
    async with aio_channel(beat.grpc_address) as channel:
        sampling = common_pb2.SamplingParams(max_tokens=3000)
        request = decode_pb2.DecodeRequest(prompt_token_ids=[65], sampling=sampling)
        call = decode_pb2_grpc.DecodeStub(channel).Decode(request, timeout=60)
        await call.read()
        for state in ("draining", "bye"):
            command.process.send_signal(signal.SIGINT)
            while (await proxy.answer(Reply(ok=True), Clock().unix(), 20.0)).state != state:
                pass
        status, lines = await command.end()
    assert status == 0
    assert "drain_cut_short" in [line["event"] for line in lines]


async def test_a_signal_during_the_start_ends_it(tmp_path: Path) -> None:
    """There is nothing to drain yet: it leaves with 128 + SIGTERM instead of starting to the end."""
    command = await start(*SIM, "--kvd-socket", str(tmp_path / "none"), "--kvd-seconds", "60")
    assert command.process.stderr is not None
    while b'"starting"' not in await asyncio.wait_for(command.process.stderr.readline(), 20):
        pass
    command.process.send_signal(signal.SIGTERM)
    status, _ = await command.end()
    assert status == 128 + signal.SIGTERM


async def test_a_wrong_key_ends_it_with_the_proxy_s_reason(proxy: FakeProxy, tmp_path: Path) -> None:
    """Status 1; the last line says why."""
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_bytes(b"a key that is long enough")
    other = FakeProxy(Signer(key.read_bytes()))
    command = await start(*SIM, "--proxy", other.address, "--cluster-key-file", str(key))
    refused = Reply(ok=False, reason="UNAUTHENTICATED", detail="not signed under this cluster's key")
    await other.answer(refused, Clock().unix(), 20.0)
    status, lines = await command.end()
    other.close()
    assert status == 1
    assert (lines[-1]["event"], lines[-1]["reason"]) == ("ended", "UNAUTHENTICATED")
    assert "not signed" in str(lines[-1]["detail"])


async def test_an_open_bind_without_a_key_is_refused() -> None:
    """Status 2, and the line names the two ways out."""
    status, lines = await (await start(*SIM, "--host", "0.0.0.0")).end()
    assert status == 2
    assert "--insecure" in str(lines[-1]["detail"])

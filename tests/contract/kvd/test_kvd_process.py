"""The program `pdserve-kvd` as a process: ready, drained, stopped, killed."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.kvd.__main__ import parse
from pdserve.kvd.client import Accept, AttachConfig, Offer, Outcome
from pdserve.kvd.config import KvdConfig, TransportName
from pdserve.kvd.testing import FakeEngine, KvdAddress, kvd_process
from pdserve.kvd.types import Mode
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.errors import ConfigError


async def _read(kvd: KvdAddress) -> None:
    """One hand-over through the daemon, byte for byte."""
    async with FakeEngine(kvd, seed=1) as p, FakeEngine(kvd, seed=2) as d:
        tid = os.urandom(16)
        p.scheduler.send(Offer("p", tid, 0, (1,), 16, Mode.READ))
        d.scheduler.send(Accept("d", tid, 0, (2,), 0, ticket=p.ticket(tid)))
        assert (await d.end_of("d")).outcome is Outcome.LANDED
        assert p.memory[0].prompt((1,)) == d.memory[0].prompt((2,))


async def test_it_serves_says_so_and_ends_on_sigterm(tmp_path: Path) -> None:
    """A JSON line says that it is ready, health is SERVING, a hand-over works, SIGTERM ends it with 0."""
    async with kvd_process(tmp_path) as kvd:
        assert json.loads(kvd.ready)["event"] == "kvd_ready"
        async with aio_channel(f"unix:{kvd.socket}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            seen = await stub.Check(health_pb2.HealthCheckRequest(service="pdserve.api.kvd.v1.Kvd"), timeout=5)
            assert seen.status == health_pb2.HealthCheckResponse.SERVING
        await _read(kvd)
        kvd.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(kvd.process.wait(), 5) == 0
        assert not await asyncio.to_thread(Path(kvd.socket).exists)


async def test_the_first_sigterm_drains_and_the_second_stops(tmp_path: Path) -> None:
    """With a transfer open it goes on serving, refuses new ones, and stops at once when asked again."""
    async with kvd_process(tmp_path) as kvd, FakeEngine(kvd, seed=1, config=AttachConfig(reconnect_deadline=0.5)) as p:
        p.scheduler.send(Offer("open", os.urandom(16), 0, (1,), 16, Mode.READ))
        await asyncio.sleep(0.1)
        kvd.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        p.scheduler.send(Offer("new", os.urandom(16), 0, (2,), 16, Mode.READ))
        assert "drains" in (await p.end_of("new")).detail
        assert kvd.process.returncode is None
        kvd.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(kvd.process.wait(), 5) == 0
        assert (await p.scheduler_end_of("open")).reason == "KVD_UNAVAILABLE"


async def test_a_killed_daemon_is_noticed_and_a_new_one_taken(tmp_path: Path) -> None:
    """SIGKILL: open handles end with KVD_UNAVAILABLE; a new daemon gets the memory again and works."""
    config = AttachConfig(reconnect_deadline=0.3)
    async with kvd_process(tmp_path) as old:
        p, d = FakeEngine(old, seed=1, config=config), FakeEngine(old, seed=2, config=config)
        async with p, d:
            p.scheduler.send(Offer("open", os.urandom(16), 0, (1,), 16, Mode.READ))
            await asyncio.sleep(0.1)
            old.process.kill()
            await old.process.wait()
            assert (await p.scheduler_end_of("open")).reason == "KVD_UNAVAILABLE"
            async with kvd_process(tmp_path):
                await _again(p, d)


async def _again(p: FakeEngine, d: FakeEngine) -> None:
    """A hand-over once everybody is back."""
    async with asyncio.timeout(20):
        while True:
            if all(a.attached for e in (p, d) for a in (e.scheduler, *e.workers)):
                break
            await asyncio.sleep(0.02)
    tid = os.urandom(16)
    p.scheduler.send(Offer("p", tid, 0, (1,), 16, Mode.READ))
    d.scheduler.send(Accept("d", tid, 0, (2,), 0, ticket=p.ticket(tid)))
    assert (await d.end_of("d")).outcome is Outcome.LANDED
    assert p.memory[0].prompt((1,)) == d.memory[0].prompt((2,))


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--lease", "0"], "lease must be above 0"),
        (["--sim-bandwidth", "-1"], "cannot be simulated"),
        (["--cluster-key-file", "/nowhere/key"], "cluster key file"),
        (["--grace", "nan"], "grace must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, flags: list[str], told: str) -> None:
    """Each is a ConfigError that names the setting, before anything is opened."""
    with pytest.raises(ConfigError, match=told):
        parse(["--state-dir", str(tmp_path), *flags])
    assert not list(tmp_path.iterdir())


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """A socket path longer than the kernel takes: said at once, with the path."""
    with pytest.raises(ConfigError, match="107"):
        KvdConfig(tmp_path / ("x" * 120))


def test_flags_reach_the_settings(tmp_path: Path) -> None:
    """Deadlines, transport, link and key come from the command line."""
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_bytes(b"0123456789abcdef\n")
    config, _ = parse(
        f"--state-dir {tmp_path} --lease 7 --transport sim --sim-bandwidth 5 --sim-delay 2 "
        f"--cluster-key-file {key} --max-parked 3".split()
    )
    assert (config.limits.lease, config.limits.max_parked, config.limits.accept) == (7.0, 3, 10.0)
    assert (config.transport, config.sim.bandwidth, config.sim.delay) == (TransportName.SIM, 5.0, 2.0)
    assert config.cluster_key.secret == b"0123456789abcdef"


async def test_a_program_that_cannot_start_says_why_and_ends_with_2() -> None:
    """One line on stderr, no traceback."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdserve.kvd", "--state-dir", "/proc/nowhere", stderr=asyncio.subprocess.PIPE
    )
    _, said = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert b"cannot be used" in said
    assert b"Traceback" not in said

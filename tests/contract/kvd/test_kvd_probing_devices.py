"""What a daemon measures of its GPUs' memory: a real process has the scratch, the accelerator is a fake.

What mori goes over, and what its processes listen at, with the fake of its library.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.api.kvd.v1 import kvd_pb2
from pdserve.kvd.config import KvdConfig, MoriBackend
from pdserve.kvd.plan import Runs
from pdserve.kvd.probing import loans, scratch, survey, timing
from pdserve.kvd.probing.device_scratch import ScratchProcess, device_scratch
from pdserve.kvd.probing.exposure import complaint
from pdserve.kvd.probing.listeners import guarded, read_listeners
from pdserve.kvd.probing.values import Device, Exposure, Gpus
from pdserve.kvd.testing import RunningKvd, running_kvd
from pdserve.kvd.testing.device import FakeGpu, FakeGpus
from pdserve.kvd.testing.device_files import VARIABLE, FakeDevices, OpenedFiles
from pdserve.kvd.testing.mori import Machine, to_env
from pdserve.kvd.testing.mori_devices import BUS_ID
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.gpu_ipc import GpuIpcTransport
from pdserve.kvd.transport.mori import MoriTransport
from pdserve.kvd.transport.mori_process import Library
from pdserve.kvd.transport.port import Transport
from pdserve.kvd.transport.shm import ShmTransport
from pdserve.kvd.types import MemoryKind
from pdserve.rpc.errors import TransferFailed
from tests.contract.kvd.mori_suite import FAST
from tests.contract.kvd.peers_rig import until
from tests.contract.kvd.test_kvd_probing import empty, measure, used

SMALL = 4 << 20
OTHER = "0000:2c:00.0"
ROOM = 1 << 30


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch memory of 4 MiB, and time for a busy machine."""
    sized(monkeypatch, SMALL)
    monkeypatch.setattr(timing, "_EACH_S", 15.0)


def sized(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Scratch memory of so many bytes."""
    for module in (scratch, loans, survey):
        monkeypatch.setattr(module, "SCRATCH_BYTES", nbytes)


@dataclass
class Rig:
    """A daemon whose devices are fakes, and those."""

    kvd: RunningKvd
    gpus: FakeGpus
    started: list[int]
    """Processes that had scratch memory."""

    def gone(self) -> bool:
        """Whether nothing of a measurement is left: no process, nothing mapped, no memory, no slot."""
        mapped = [bus for bus in (BUS_ID, OTHER) if self.gpus.find(bus).opened]
        return not mapped and not any(os.path.exists(f"/proc/{pid}") for pid in self.started) and empty(self.kvd)

    def change(self, **changes: Any) -> None:
        """Other surroundings of its surveys."""
        self.kvd.node.survey._around = replace(self.kvd.node.survey._around, **changes)


@contextlib.asynccontextmanager
async def noted(kind: MemoryKind, started: list[int]) -> AsyncIterator[Any]:
    """Scratch memory of the fake devices, whose process is remembered."""
    async with device_scratch(kind, "pdserve.kvd.testing.device_files") as made:
        assert isinstance(made, ScratchProcess)
        started.append(made.pid)
        yield made


@contextlib.asynccontextmanager
async def rig(monkeypatch: pytest.MonkeyPatch, devices: FakeDevices) -> AsyncIterator[Rig]:
    """As `--transport gpu_ipc` has it."""
    monkeypatch.setenv(VARIABLE, devices.to_env())
    gpus = FakeGpus((BUS_ID, OTHER))
    gpus.exported = OpenedFiles()

    def transports(config: KvdConfig, arena: Arena) -> Sequence[Transport]:
        return (ShmTransport(arena), GpuIpcTransport(gpus))

    async with running_kvd(transports=transports) as kvd:
        made = Rig(kvd, gpus, [])
        seen = Gpus((Device(BUS_ID, "gpu", up=True),))
        made.change(open_scratch=partial(noted, started=made.started), gpus=lambda: seen)
        yield made


def of(said: kvd_pb2.MeasureResponse, kind: str) -> list[kvd_pb2.Way]:
    """The ways of one kind of memory."""
    return [way for way in said.ways if way.kind == kind]


async def test_memory_of_each_gpu_and_between_gpus_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside host memory, over scratch that a process of its own has on each; all of it is given back."""
    async with rig(monkeypatch, FakeDevices({BUS_ID: 2 * SMALL, OTHER: 2 * SMALL})) as on:
        said = await measure(on.kvd)
        (host,) = of(said, "host")
        assert used(host).transport == "shm"
        ways = of(said, "cuda")
        assert [(way.from_device, way.to_device) for way in ways] == [
            (BUS_ID, BUS_ID),
            (OTHER, OTHER),
            (OTHER, BUS_ID),
            (BUS_ID, OTHER),
        ]
        for way in ways:
            one = used(way)
            assert (one.transport, one.error, way.error, way.not_measured) == ("gpu_ipc", "", "", "")
            assert [speed.block_bytes >> 10 for speed in one.speeds] == [16, 64, 256, 1024]
            assert one.latency_seconds > 0
            assert {c.transport: c.why_not for c in way.candidates}["shm"] == "no cuda memory"
        for bus in (BUS_ID, OTHER):
            assert sum(on.gpus.find(bus).launches) > 100 * SMALL // 4
        assert BUS_ID in [device.name for device in said.devices if device.kind == "gpu"]
        assert len(on.started) == 1
        assert on.gone()


async def test_a_device_that_copies_nothing_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it has; what is in the memory is asked of its owner. The way fails, and only that way."""
    async with rig(monkeypatch, FakeDevices({BUS_ID: ROOM, OTHER: ROOM})) as on:
        on.gpus.find(BUS_ID).lie = True
        for way in of(await measure(on.kvd), "cuda"):
            broken = way.to_device == BUS_ID
            assert bool(used(way).error) is broken
            assert bool(used(way).speeds) is not broken
        assert on.gone()


async def test_a_gpu_without_free_memory_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one side of two: it says so, which is no fault of the transport; the other GPU is measured."""
    async with rig(monkeypatch, FakeDevices({BUS_ID: ROOM, OTHER: SMALL})) as on:
        ways = {(way.from_device, way.to_device): way for way in of(await measure(on.kvd), "cuda")}
        assert not ways[BUS_ID, BUS_ID].not_measured
        full = ways[OTHER, OTHER]
        assert full.not_measured == f"0 bytes of {OTHER} are free"
        assert (full.error, used(full).transport, used(full).error, len(used(full).speeds)) == ("", "gpu_ipc", "", 0)
        assert on.gone()


@pytest.mark.parametrize("kinds", [set(), {MemoryKind.HOST, MemoryKind.CUDA}], ids=["no engine", "engines on GPUs"])
async def test_a_node_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch, kinds: set[MemoryKind]) -> None:
    """Nothing is used there, unless engines have such memory all the same."""
    async with rig(monkeypatch, FakeDevices(missing="torch sees no device")) as on:
        on.change(kinds=lambda: kinds)
        (way,) = of(await measure(on.kvd), "cuda")
        assert (way.not_measured, way.error, way.from_device) == ("torch sees no device", "", "")
        one = next(candidate for candidate in way.candidates if candidate.transport == "gpu_ipc")
        assert one.used is bool(kinds)
        assert one.why_not == ("" if kinds else "torch sees no device")
        assert on.gone()


async def test_a_daemon_that_takes_no_device_memory_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the row of gpu_ipc: it is not switched on, or there is nothing to switch it on for. No process is started."""
    for seen, why in ((Gpus(), "no GPU is seen"), (Gpus((Device(BUS_ID, "gpu", up=True),)), "--transport gpu_ipc")):
        async with running_kvd() as kvd:
            around = replace(kvd.node.survey._around, gpus=partial(Gpus, seen.devices))
            monkeypatch.setattr(kvd.node.survey, "_around", around)
            (way,) = (await measure(kvd)).ways
            assert why in {one.transport: one.why_not for one in way.candidates}["gpu_ipc"]


async def test_who_asked_and_left_leaves_nothing_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a copy: it comes to its end, the memory is unmapped, and its process ends."""
    async with rig(monkeypatch, FakeDevices({BUS_ID: ROOM, OTHER: ROOM})) as on:
        copying, go_on = threading.Event(), threading.Event()

        def hold(_: Runs) -> None:
            copying.set()
            assert go_on.wait(10)

        gpu: FakeGpu = on.gpus.find(OTHER)
        gpu.before = hold
        asking = asyncio.create_task(measure(on.kvd))
        await asyncio.to_thread(copying.wait, 20)
        asking.cancel()
        await asyncio.wait([asking])
        assert not on.gone()
        go_on.set()
        await until(on.gone, 5.0)


async def test_a_process_that_does_not_start_in_time_ends_with_the_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was measured stands; no time was left for the devices, and nothing of the process is left."""
    never = asyncio.Event()

    @contextlib.asynccontextmanager
    async def starting(kind: MemoryKind) -> AsyncIterator[Any]:
        await never.wait()
        yield

    async with rig(monkeypatch, FakeDevices({BUS_ID: ROOM})) as on:
        on.change(open_scratch=starting)
        said = await measure(on.kvd, seconds=1.0)
        assert used(of(said, "host")[0]).speeds
        assert of(said, "cuda")[0].not_measured == "there was no time left"
        assert on.gone()


async def test_a_device_process_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an error of what is asked of it, at once."""
    monkeypatch.setenv(VARIABLE, FakeDevices({BUS_ID: ROOM}).to_env())
    async with device_scratch(MemoryKind.CUDA, "pdserve.kvd.testing.device_files") as made:
        assert isinstance(made, ScratchProcess)
        os.kill(made.pid, 9)
        with pytest.raises(TransferFailed, match="was ended"):
            await asyncio.wait_for(made.make(BUS_ID, SMALL, None), 5)


# -- mori -----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def mori(
    monkeypatch: pytest.MonkeyPatch, library: Library, backend: MoriBackend, machine: Machine | None = None
) -> AsyncIterator[Rig]:
    """As `--transport mori` has it, on a machine with one GPU. The fake takes its time: 1 MiB."""
    sized(monkeypatch, 1 << 20)
    monkeypatch.setenv(VARIABLE, FakeDevices({BUS_ID: ROOM}).to_env())

    def transports(config: KvdConfig, arena: Arena) -> Sequence[Transport]:
        far = MoriTransport(arena, replace(FAST, backend=backend), library, to_env(machine=machine))
        return (ShmTransport(arena), far)

    async with running_kvd(transports=transports) as kvd:
        made = Rig(kvd, FakeGpus((BUS_ID, OTHER)), [])
        seen = Gpus((Device(BUS_ID, "xgmi", 512 * 10**9, up=True),), {(BUS_ID, BUS_ID): 64 * 10**9})
        made.change(open_scratch=partial(noted, started=made.started), gpus=lambda: seen)
        yield made


async def test_mori_over_xgmi_is_called_so_and_measured(monkeypatch: pytest.MonkeyPatch, forked: Library) -> None:
    """Beside the nominal rate that the kernel tells; its processes listen at nothing."""
    async with mori(monkeypatch, forked, MoriBackend.XGMI) as on:
        said = await measure(on.kvd)
        (way,) = of(said, "rocm")
        one = used(way)
        assert (one.transport, one.link, one.lanes, list(one.names)) == ("mori", "XGMI", "", ["mori", "xgmi"])
        assert (one.error, len(one.speeds)) == ("", 4)
        assert one.nominal_bytes_per_second == 64e9
        assert {listener.exposure for listener in said.listeners} == {"none"}
        assert on.gone()


async def test_mori_over_rdma_is_measured_and_its_ports_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, forked: Library
) -> None:
    """Both of its processes, also the one that ends with the session: bound to the address that it was told, alone."""
    async with mori(monkeypatch, forked, MoriBackend.RDMA) as on:
        said = await measure(on.kvd)
        host, device = (next(one for one in way.candidates if one.transport == "mori") for way in said.ways)
        assert (list(host.names), list(device.names)) == (["mori", "rdma"], ["mori", "rdma"])
        assert (host.used, device.used) == (False, True)
        assert {(one.address, one.exposure, one.error) for one in said.listeners} == {("127.0.0.1", "loopback", "")}
        assert len({one.pid for one in said.listeners}) >= 2
        assert all(one.port for one in said.listeners)
        assert on.gone()


async def test_a_driver_that_does_not_take_memory_of_others_is_no_fault_of_host_memory(
    monkeypatch: pytest.MonkeyPatch, forked: Library
) -> None:
    """Without engines on GPUs mori is for host memory: that it could not carry theirs is said, and is no error. Those
    that are there may do for themselves what kvd cannot: not measured. For XGMI, which has nothing else, it is one."""
    foreign = Machine(foreign=False)
    async with mori(monkeypatch, forked, MoriBackend.RDMA, foreign) as on:
        (way,) = of(await measure(on.kvd), "rocm")
        one = next(candidate for candidate in way.candidates if candidate.transport == "mori")
        assert (one.used, one.error, way.error) == (False, "", "")
        assert "cannot register an engine's memory" in one.why_not
        on.change(kinds=lambda: {MemoryKind.ROCM})
        (way,) = of(await measure(on.kvd), "rocm")
        assert (used(way).transport, used(way).error) == ("mori", "")
        assert "cannot register an engine's memory" in way.not_measured
    async with mori(monkeypatch, forked, MoriBackend.XGMI, foreign) as on:
        (way,) = of(await measure(on.kvd), "rocm")
        assert "cannot register an engine's memory" in used(way).error


async def test_a_mori_that_listens_everywhere_is_an_error(monkeypatch: pytest.MonkeyPatch, forked: Library) -> None:
    """Beside the port that it was told: by what the kernel says, whatever the library does."""
    library = replace(forked, api="tests.contract.kvd.mori_open")
    async with mori(monkeypatch, library, MoriBackend.RDMA) as on:
        said = await measure(on.kvd)
        assert {(one.address, one.exposure, bool(one.error)) for one in said.listeners} == {
            ("127.0.0.1", "loopback", False),
            ("0.0.0.0", "wildcard", True),
        }
        assert used(said.ways[0]).error == ""


_LISTENS = """
import socket, sys
made = [socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, dualstack_ipv6=False)
        for host in sys.argv[1:]]
bound = socket.socket(); bound.bind(("0.0.0.0", 0))  # does not listen
print(*(one.getsockname()[1] for one in made), flush=True)
sys.stdin.read()
"""


def test_what_a_process_really_listens_at() -> None:
    """Read from the kernel of this machine: this process's sockets and no others, and nothing once it is gone."""
    hosts = ("127.0.0.1", "0.0.0.0", *(("::1", "::") if os.path.exists("/proc/net/if_inet6") else ()))
    listens = subprocess.Popen(
        [sys.executable, "-c", _LISTENS, *hosts], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert listens.stdout is not None
        ports = [int(word) for word in listens.stdout.readline().split()]
        found = read_listeners("mori", listens.pid)
        assert {(one.address, one.port) for one in found} == set(zip(hosts, ports, strict=True))
        assert {one.exposure for one in found} == {Exposure.LOOPBACK, Exposure.WILDCARD}
        assert [bool(complaint(one)) for one in found] == [one.exposure is Exposure.WILDCARD for one in found]
    finally:
        listens.kill()
        listens.communicate()
    assert read_listeners("mori", listens.pid) == ()


def test_whose_processes_are_looked_at() -> None:
    """Those of transports that give strangers the keys to memory. In a rank's process, which listens for the rank too,
    it is the control port alone."""
    process, rank = SimpleNamespace(pid=7, port=70, sleeps=True), SimpleNamespace(pid=8, port=80, sleeps=False)

    def transport(name: str, **more: Any) -> Any:
        return SimpleNamespace(capabilities=SimpleNamespace(name=name), **more)

    all_ = [
        transport("shm"),
        transport("nixl", processes=lambda: [process]),
        transport("mori", processes=lambda: [process, rank]),
    ]
    assert guarded(all_) == [("mori", 7, None), ("mori", 8, 80)]

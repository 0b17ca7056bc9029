"""A mori process as kvd sees it: `Child` has how it lives and dies, this how it sleeps.

The library has a thread that never sleeps, whichever way it is told to look for what has come: a whole core for as
long as there is an engine. What other nodes read, the NIC serves without it. So a process with nothing under way is
stopped after a while (SIGSTOP), and goes on when kvd asks it something, or when another node calls at its control port,
whose listening socket kvd watches meanwhile:

    at work ──nothing under way for --mori-idle──▶ stopped ──a caller, or something to do──▶ at work
"""

import asyncio
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, Self

import structlog

from pdserve.kvd.config import MoriConfig
from pdserve.kvd.transport import child_wire as wire
from pdserve.kvd.transport.child import Child, Launch
from pdserve.kvd.transport.mori_wire import DRAIN_S, IGNORED, Leave, MapDevice, MapOwn, Reach, Registered, decode_parts
from pdserve.kvd.transport.start import Start, interpreter
from pdserve.kvd.types import DeviceMemory

log = structlog.get_logger(__name__)

Parts = tuple[Registered, ...]
"""What a process has registered of a region."""

_STOPPED_S: Final = 1.0
"""Longest wait for a process to be stopped."""
_LOOK_S: Final = 0.002
_OPEN: Final = frozenset({"01", "03", "08"})
"""ESTABLISHED, SYN_RECV, CLOSE_WAIT, in the kernel's list of connections."""


@dataclass(frozen=True, slots=True)
class Library:
    """What a mori process loads, by module; another one in tests."""

    api: str = "mori.io"
    devices: str = "pdserve.kvd.transport.mori_devices"
    """How memory of devices is opened."""
    start: Start = interpreter
    """How its process comes to be."""


class MoriProcess(Child):
    """See the module. Made by `start`."""

    sleeps: ClassVar[bool] = True
    """Whether it may be stopped."""

    card = b""
    """How other engines call its engine."""
    port = 0
    """Of its control port."""
    asleep = False
    """Whether it is stopped."""
    _idle = 0.0
    _door: socket.socket | None = None
    _dozing: "asyncio.Task[None] | None" = None
    _timer: asyncio.TimerHandle | None = None

    @classmethod
    async def start(cls, name: str, config: MoriConfig, library: Library, around: Mapping[str, str]) -> Self:
        """A process that is ready. Cancelled, it leaves nothing. `around`: the environment.

        Raises:
            TransferFailed: it did not get ready; with what it wrote.
        """
        made = await cls.launch(
            Launch(
                library="mori",
                module="pdserve.kvd.transport.mori_worker",
                name=name,
                args=(library.api, library.devices, config.backend.value.upper(), config.host, str(config.stall)),
                env=environment(config, around),
                stall=config.stall + config.connect + DRAIN_S + 1.0,  # it looks after its peers' silence itself
                call=config.start,
                start=library.start,
            )
        )
        if cls.sleeps and not config.spin:
            made._idle = config.idle
            made._after()
        return made

    async def register(self, region: str, fd: int, size: int) -> Parts:
        """Has it map and register a file.

        Raises:
            TransferFailed: it cannot.
        """
        return decode_parts((await self.map(region, fd, size)).metadata)

    async def register_device(self, region: str, memory: DeviceMemory) -> Parts:
        """Has it open and register device memory.

        Raises:
            TransferFailed: it cannot.
        """
        return decode_parts((await self.call(MapDevice(region, memory.bus_id, memory.pieces))).data)

    async def register_own(self, region: str, bus_id: str, size: int) -> Parts:
        """Has it allocate and register memory of a device.

        Raises:
            TransferFailed: it cannot.
        """
        return decode_parts((await self.call(MapOwn(region, bus_id, size))).data)

    async def reach(self, peer: str, region: str, engine: bytes, memory: Parts) -> None:
        """Opens a way from a peer's memory to a region that is mapped; copies name it by `peer`.

        Raises:
            TransferFailed: there is none.
        """
        await self.call(Reach(peer, region, engine, memory))

    async def leave(self, peer: str, region: str) -> None:
        """Forgets a way. Raises TransferFailed where the process is gone."""
        await self.call(Leave(peer, region))

    def retire(self, reason: str) -> None:
        """Has it end, with what is on its way from peers that answer in place."""
        if not self.retiring:
            self.retiring = reason
            self._write(wire.Retire(reason))
            asyncio.get_running_loop().call_later(DRAIN_S + 1.0, self.end, reason)

    def give_up(self, reason: str) -> None:
        """See Child: one reads from all peers."""
        self.retire(reason)

    async def _ready(self) -> None:
        answer = await self._answer(0)
        self.card, self.port = answer.data, answer.address
        if self.port:  # its socket came before the answer
            _, fds, _, _ = socket.recv_fds(self._beside.files, 1, 1)
            self._door = socket.socket(fileno=fds[0])

    def _before(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._dozing is not None:
            self._dozing.cancel()
            self._dozing = None
            self._signal(signal.SIGCONT)
        if self.asleep:
            self._wake()

    def _after(self) -> None:
        at_rest = not self._busy and not self.failure
        if self._idle and at_rest and self._timer is None and self._dozing is None:
            self._timer = asyncio.get_running_loop().call_later(self._idle, self._begin_to_doze)

    def _buried(self) -> None:
        self._before()
        if self._door is not None:
            self._door.close()
            self._door = None

    def _begin_to_doze(self) -> None:
        self._timer = None
        self._dozing = asyncio.create_task(self._doze())

    async def _doze(self) -> None:
        """Stops it, unless somebody calls just now."""
        self._signal(signal.SIGSTOP)
        try:
            async with asyncio.timeout(_STOPPED_S):
                while not _stopped(self.pid):  # noqa: ASYNC110  # of a stop there is no event
                    await asyncio.sleep(_LOOK_S)
            called = await asyncio.to_thread(callers, self.pid, self.port) if self._door is not None else 0
        except TimeoutError:  # a thread of it is in the kernel
            called = 1
        self._dozing = None
        self.asleep = True
        if called:
            self._called()
        elif self._door is not None:
            # Whoever calls from now on is not answered by the process, so the socket is readable until it goes on.
            asyncio.get_running_loop().add_reader(self._door, self._called)

    def _called(self) -> None:
        self._wake()
        self._after()

    def _wake(self) -> None:
        self.asleep = False
        if self._door is not None:
            asyncio.get_running_loop().remove_reader(self._door)
        self._signal(signal.SIGCONT)


def _stopped(pid: int) -> bool:
    """Whether all of a process's threads are, or it is gone."""
    try:
        threads = [(thread / "stat").read_text() for thread in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return True
    return all(thread.rpartition(")")[2].split()[0] in "TtZX" for thread in threads)


def callers(pid: int, port: int) -> int:
    """How many have a connection to a port of a process's network namespace."""
    try:
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    except OSError:
        return 0  # it is gone
    found = 0
    for line in lines:
        _, local, _, state, *_ = line.split()
        found += state in _OPEN and int(local.rpartition(":")[2], 16) == port
    return found


def environment(config: MoriConfig, around: Mapping[str, str]) -> dict[str, str]:
    """The process's environment: mori's variables go before its configuration, so those that must not are left out."""
    made = dict(around)
    for name in IGNORED:
        if made.pop(name, None) is not None:
            log.warning("mori_variable_ignored", variable=name)
    made["MORI_IO_CP_TIMEOUT_MS"] = str(int(config.connect * 1000))
    if config.devices:
        made["MORI_RDMA_DEVICES"] = config.devices
    return made

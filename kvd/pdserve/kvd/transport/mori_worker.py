"""The process that MORI lives in: `python -m pdserve.kvd.transport.mori_worker`, started by mori_process.

It owns one engine and its own mappings of the regions that it was given, and either reads or serves what others read,
for which it has nothing to do. Whatever the library does to its process, it does to this one. A read that failed is
certainly over only with it: so kvd then gives it nothing more, what it has from other peers may come to its end for a
moment, and it ends. One thread; it sleeps unless something is in flight. (The library's own does not: mori_process.)
What is in `serve` also runs in a thread of a rank's process (client.mori_host), which ends the engine alone.
"""

import contextlib
import functools
import importlib
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from pdserve.kvd.plan import Runs
from pdserve.kvd.transport import child_wire as wire
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.child_worker import NAP_S, SAY_EVERY_S, SPINS, Channel, live
from pdserve.kvd.transport.mori_devices import Opens
from pdserve.kvd.transport.mori_engine import HOST, Engine
from pdserve.kvd.transport.mori_jobs import Begin, Done, Job, Peer
from pdserve.kvd.transport.mori_pieces import split
from pdserve.kvd.transport.mori_wire import (
    DRAIN_S,
    Asked,
    Leave,
    MapDevice,
    MapOwn,
    Reach,
    Registered,
    decode_asked,
    encode_parts,
)
from pdserve.kvd.types import Piece
from pdserve.rpc.errors import TransferFailed

_LISTENING: Final = "0A"
"""In the kernel's list of connections."""


@dataclass(frozen=True, slots=True)
class Region:
    """A region as this process has it mapped: the parts that are registered, and how it is unmapped."""

    parts: Sequence[Registered]
    memory: Sequence[Any]
    """Each part, as the engine knows it."""
    unmap: Callable[[], None]


@dataclass(slots=True)
class Session:
    """The ways from a peer's memory to a region: by part of each, made when a copy first needs it."""

    peer: Peer
    src: Sequence[Registered]
    dst: Region
    ways: dict[tuple[int, int], Any]


@dataclass(slots=True)
class Ending:
    """That the process ends soon."""

    reason: str
    until: float


@dataclass(frozen=True, slots=True)
class Nap:
    """How it waits while something is in flight."""

    spins: int = SPINS
    """Looks without news before it sleeps between them."""
    seconds: float = NAP_S


@dataclass(frozen=True, slots=True)
class Order:
    """What it is to be."""

    name: str
    backend: str
    host: str
    stall: float


class Worker:
    """See the module."""

    def __init__(self, engine: Engine, devices: Opens, kvd: Channel, stall: float, nap: Nap) -> None:
        self._engine = engine
        self._devices = devices
        self._kvd = kvd
        self._stall = stall
        self._nap = nap
        self._regions: dict[str, Region] = {}
        self._sessions: dict[tuple[str, str], Session] = {}
        self._peers: dict[str, Peer] = {}
        self._ending: Ending | None = None

    def run(self) -> None:
        """Serves until kvd is gone.

        Raises:
            TransferFailed: a read failed, and the process must end.
        """
        idle = 0
        while self._kvd.open:
            busy = [peer for peer in self._peers.values() if peer.busy]
            self._hear(self._nap.seconds if idle > self._nap.spins else 0.0 if busy else None)
            news = False
            for peer in busy:
                if not peer.failed:
                    news |= self._step(peer)
            idle = 0 if news or not busy else idle + 1
            if busy and time.monotonic() - self._kvd.said > SAY_EVERY_S:
                self._look_around()
            self._end_if_due()

    def _step(self, peer: Peer) -> bool:
        try:
            news, ended = peer.step(time.monotonic())
        except TransferFailed as error:
            self._fail(peer, error.message)
            return True
        for done in ended:
            self._ended(done)
        return news

    def _ended(self, done: Done) -> None:
        self._kvd.say(wire.Ended(done.copy_id, done.nbytes, max(1, int(done.seconds * 1e9)), done.cancelled))

    def _look_around(self) -> None:
        for key, reason in self._engine.lost_peers():
            if key in self._peers:
                self._fail(self._peers[key], f"mori gave {key} up: {reason}")
        self._kvd.say(wire.Moving(0))

    def _fail(self, peer: Peer, reason: str) -> None:
        peer.failed = peer.failed or reason
        self._retire(reason)

    def _retire(self, reason: str) -> None:
        if self._ending is None:
            self._ending = Ending(reason, time.monotonic() + DRAIN_S)
            self._kvd.say(wire.Retiring(reason))

    def _end_if_due(self) -> None:
        if self._ending is None:
            return
        drained = not any(peer.busy and not peer.failed for peer in self._peers.values())
        if drained or time.monotonic() >= self._ending.until:
            raise TransferFailed(self._ending.reason)

    def _hear(self, wait: float | None) -> None:
        if self._ending is not None:
            wait = self._nap.seconds
        for message in self._kvd.hear(wait):
            match message:
                case wire.Call(call_id, what):
                    self._kvd.say(self._answer(call_id, decode_asked(what)))
                case wire.Copy() as asked:
                    self._begin(asked)
                case wire.Cancel(copy_id):
                    for peer in self._peers.values():
                        done = peer.cancel(copy_id)
                        if done is not None:
                            self._ended(done)
                case wire.Retire(reason):
                    self._retire(reason)

    def _begin(self, asked: wire.Copy) -> None:
        session = self._sessions[asked.peer, asked.region]
        runs = Runs(*(np.frombuffer(column, np.uint64) for column in (asked.src, asked.dst, asked.length)))
        stretches = split(runs, [part.size for part in session.src], [part.size for part in session.dst.parts])
        parts = [(self._reads(session, stretch.src, stretch.dst), stretch.runs) for stretch in stretches]
        session.peer.add(Job(asked.copy_id, parts), time.monotonic())

    def _reads(self, session: Session, src: int, dst: int) -> Begin:
        return lambda *columns: self._engine.read(self._way(session, src, dst), *columns)

    def _way(self, session: Session, src: int, dst: int) -> Any:
        way = session.ways.get((src, dst))
        if way is None:
            with self._nobody_looks():
                way = self._engine.session(session.dst.memory[dst], session.src[src].memory)
            session.ways[src, dst] = way
        return way

    @contextlib.contextmanager
    def _nobody_looks(self) -> Iterator[None]:
        """Around what blocks: no peer is to be called silent for that."""
        began = time.monotonic()
        try:
            yield
        finally:
            for peer in self._peers.values():
                peer.waited(time.monotonic() - began)

    def _answer(self, call_id: int, what: Asked) -> wire.Answer:
        try:
            match what:
                case wire.Map(name, size):
                    region = self._regions[name] = self._map(size)
                    return wire.Answer(call_id, encode_parts(region.parts))
                case MapDevice(name, bus_id, pieces):
                    region = self._regions[name] = self._map_device(bus_id, pieces)
                    return wire.Answer(call_id, encode_parts(region.parts))
                case MapOwn(name, bus_id, size):
                    region = self._regions[name] = self._map_own(bus_id, size)
                    return wire.Answer(call_id, encode_parts(region.parts))
                case wire.Unmap(name):
                    gone = self._regions.pop(name, None)
                    if gone is not None:
                        self._deregister(gone.memory)
                        gone.unmap()
                case Reach(name, dst, engine, memory):
                    key = self._engine.meet(engine)
                    peer = self._peers.setdefault(key, Peer(key, self._stall))
                    session = Session(peer, memory, self._region_of(dst), {})
                    self._way(session, 0, 0)  # a peer that is not there is to be noticed now
                    self._sessions[name, dst] = session
                case Leave(name, region):
                    self._sessions.pop((name, region), None)
        except (TransferFailed, OSError, ValueError) as error:
            return wire.Answer(call_id, error=str(error) or type(error).__name__)
        return wire.Answer(call_id)

    @functools.cached_property
    def _arena(self) -> Arena:
        """Where files are mapped; not made in a rank, which has none."""
        return Arena(readable=True)

    def _region_of(self, name: str) -> Region:
        region = self._regions.get(name)
        if region is None:
            raise TransferFailed(f"the region {name} is not mapped")
        return region

    def _map(self, size: int) -> Region:
        fd = self._kvd.file()
        try:
            offset = self._arena.map(fd, size)
        finally:
            os.close(fd)
        return self._region([(self._arena.address(offset), size)], HOST, lambda: self._arena.unmap(offset))

    def _map_device(self, bus_id: str, pieces: Sequence[Piece]) -> Region:
        device, addresses = self._devices.open(bus_id, pieces)
        sizes = [piece.size for piece in pieces]
        return self._region(list(zip(addresses, sizes, strict=True)), device, lambda: self._devices.close(pieces))

    def _map_own(self, bus_id: str, size: int) -> Region:
        device, address = self._devices.make(bus_id, size)
        return self._region([(address, size)], device, lambda: None)  # it ends with the process, which is soon

    def _region(self, places: Sequence[tuple[int, int]], device: int, unmap: Callable[[], None]) -> Region:
        memory: list[Any] = []
        try:
            with self._nobody_looks():
                for address, size in places:
                    memory.append(self._engine.register(address, size, device))
        except TransferFailed:
            self._deregister(memory)
            unmap()
            raise
        sizes = [size for _, size in places]
        parts = [Registered(size, self._engine.describe(one)) for size, one in zip(sizes, memory, strict=True)]
        return Region(parts, memory, unmap)

    def _deregister(self, memory: Sequence[Any]) -> None:
        for one in memory:
            self._engine.deregister(one)


def control_socket(port: int, host: str) -> int:
    """The descriptor at which the library listens.

    Raises:
        TransferFailed: there is none, or it can be reached at another address than the one that it was told.
    """
    ours = dict(_sockets())
    for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
        address, _, bound = local.partition(":")
        if state != _LISTENING or int(bound, 16) != port or int(inode) not in ours:
            continue
        at = socket.inet_ntoa(struct.pack("=I", int(address, 16)))
        if at != host:
            raise TransferFailed(f"mori's control port is bound to {at}, not to {host}")
        return ours[int(inode)]
    raise TransferFailed(f"mori does not listen at {host}:{port}, as it says")


def _sockets() -> Iterator[tuple[int, int]]:
    """The inode and the descriptor of each of this process's."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was closed meanwhile
            found = os.fstat(int(name))
            if stat.S_ISSOCK(found.st_mode):
                yield found.st_ino, int(name)


def serve(kvd: Channel, engine: Engine, devices: Opens, order: Order, nap: Nap = Nap()) -> None:
    """Tells kvd of the engine, and serves until kvd is gone.

    Raises:
        TransferFailed: a read failed, and the engine must end.
    """
    if order.backend == "RDMA":
        kvd.give_file(control_socket(engine.port, order.host))
    kvd.say(wire.Answer(0, engine.card, engine.port))
    Worker(engine, devices, kvd, order.stall, nap).run()


def work(kvd: Channel, args: Sequence[str]) -> None:
    """`NAME LIBRARY DEVICES BACKEND HOST STALL`; the second and third are modules."""
    name, library, devices, backend, host, stall = args
    engine = Engine(library, name, backend, host)
    opens: Opens = importlib.import_module(devices).open_devices()
    serve(kvd, engine, opens, Order(name, backend, host, float(stall)))


if __name__ == "__main__":
    sys.exit(live(sys.argv[1:], work))

"""Mori's API used by itself, in a process that it may end: `python -m ... LIBRARY ROW PARENT FD` writes to a descriptor
what was seen.

One function for each row of `Row`, so that what the fake does, and what kvd is built around, is said once, and can be
asked of the real library too. Other processes (`Server`) have the memory that is read.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np

SIZE = 1 << 20
HOST = "127.0.0.1"
_MOST_SERVERS = 3
_PR_SET_PDEATHSIG = 1


class Side:
    """An engine with one region: at the reader's zeros, at the server's sevens."""

    def __init__(self, io: Any, key: str, fill: int, *, notify: bool = False) -> None:
        self.io = io
        self.memory = np.full(SIZE, fill, np.uint8)
        self.engine = io.IOEngine(key, io.IOEngineConfig(host=HOST, port=0))
        self.port_before = self.engine.get_engine_desc().port
        settings = io.RdmaBackendConfig(poll_cq_mode=io.PollCqMode.POLLING, enable_notification=notify)
        self.engine.create_backend(io.BackendType.RDMA, settings)
        self.local = self.register()

    def register(self) -> Any:
        """Its memory, once more."""
        return self.engine.register_memory(self.memory.ctypes.data, SIZE, -1, self.io.MemoryLocationType.CPU)

    def meets(self, server: "Server") -> Any:
        """A session from a server's memory to its own."""
        self.engine.register_remote_engine(self.io.EngineDesc.unpack(server.engine))
        return self.engine.create_session(self.local, self.io.MemoryDesc.unpack(server.memory))

    def reads(self, session: Any, at: int = 0, size: int = 4096, *, seconds: float = 5.0) -> str:
        """Reads, waits, and tells how it went."""
        status = session.batch_read([at], [0], [size], session.allocate_transfer_uid())
        kept.append(status)
        until = time.monotonic() + seconds
        while status.InProgress() and time.monotonic() < until:
            time.sleep(0.001)
        return f"{status.Code().name} {status.Message()}".strip()


kept: list[Any] = []


class Spare:
    """A process that was forked before the library was loaded, which survives no fork, and waits to be a server."""

    def __init__(self, library: str) -> None:
        (there, self._to), (self._from, back) = os.pipe(), os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == parent:
                serve(library, os.fdopen(there), os.fdopen(back, "w", buffering=1))
            os._exit(0)
        os.close(there)
        os.close(back)
        self._answers = os.fdopen(self._from)

    def asks(self, what: str) -> str:
        """Has it do something, and gets what it says."""
        os.write(self._to, f"{what}\n".encode())
        return self._answers.readline().strip()

    def kill(self) -> None:
        """At once."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


spares: list[Spare] = []


class Server:
    """The process that has the memory."""

    def __init__(self, key: str, *, notify: bool = False) -> None:
        self._process = spares.pop()
        self.asks, self.kill = self._process.asks, self._process.kill
        self.engine, self.memory = (bytes.fromhex(word) for word in self.asks(f"be {key} {notify:d}").split())


def serve(library: str, asked: TextIO, answers: TextIO) -> None:
    """Does what it is told: first to be somebody, of whom it then says what he has."""
    side: Side | None = None
    for line in asked:
        what, *words = line.split()
        if what == "be":
            side = Side(importlib.import_module(library), words[0], 7, notify=words[1] == "1")
            print(side.engine.get_engine_desc().pack().hex(), side.local.pack().hex(), file=answers)
        elif what == "deregister" and side is not None:
            side.engine.deregister_memory(side.local)
            print("done", file=answers)
        elif what == "pop" and side is not None:
            status = side.engine.pop_inbound_transfer_status(words[0], int(words[1]))
            print("none" if status is None else status.Code().name, file=answers)


def made(io: Any, backend: str) -> str:
    """What becomes of a backend: its port, or the error."""
    engine = io.IOEngine("e", io.IOEngineConfig(host=HOST, port=0))
    try:
        engine.create_backend(getattr(io.BackendType, backend))
    except (RuntimeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return f"port {engine.get_engine_desc().port}"


def no_tcp(io: Any) -> Any:
    return made(io, "TCP")


def rdma(io: Any) -> Any:
    return made(io, "RDMA")


def fallback(io: Any) -> Any:
    seen = []
    for value in ("0", "1", None):
        os.environ.pop("MORI_DISABLE_AUTO_XGMI", None)
        if value is not None:
            os.environ["MORI_DISABLE_AUTO_XGMI"] = value
        seen.append(made(io, "RDMA"))
    return seen


def xgmi(io: Any) -> Any:
    engine = io.IOEngine("x", io.IOEngineConfig(host=HOST, port=0))
    engine.create_backend(io.BackendType.XGMI)
    engine.register_remote_engine(engine.get_engine_desc())
    memory = np.zeros(SIZE, np.uint8)
    local = engine.register_memory(memory.ctypes.data, SIZE, -1, io.MemoryLocationType.CPU)
    return engine.create_session(local, local) is None


def session(io: Any) -> Any:
    side, server = Side(io, "r", 0), Server("s")
    return side.reads(side.meets(server)), int(side.memory.sum())


def poison(io: Any) -> Any:
    side, server = Side(io, "r", 0, notify=True), Server("s")
    way = side.meets(server)
    return [side.reads(way) for _ in range(8)][-1]


def environment(io: Any) -> Any:
    os.environ["MORI_IO_ENABLE_NOTIFICATION"] = "1"
    side, server = Side(io, "r", 0, notify=False), Server("s")
    way = side.meets(server)
    return [side.reads(way) for _ in range(8)][-1]


def notifications(io: Any) -> Any:
    side, server = Side(io, "r", 0, notify=True), Server("s", notify=True)
    way = side.meets(server)
    uid = way.allocate_transfer_uid()
    status = way.batch_read([0], [0], [64], uid)
    while status.InProgress():
        time.sleep(0.001)
    time.sleep(0.05)
    return [server.asks(f"pop r {n}") for n in (uid, uid, uid + 1000)]


def out_of_range(io: Any) -> Any:
    side, server = Side(io, "r", 0), Server("s")
    way = side.meets(server)
    return side.reads(way, at=SIZE - 10, size=11), side.reads(way)


def remote_error(io: Any) -> Any:
    side, server = Side(io, "r", 0), Server("s")
    way = side.meets(server)
    first = side.reads(way)
    server.asks("deregister")
    failed = side.reads(way)
    flushed, alive, again = side.reads(way), way.alive(), side.meets(server)
    return first, failed, flushed, alive, again is not None and side.reads(again)


def silence(io: Any) -> Any:
    side, server = Side(io, "r", 0), Server("s")
    way = side.meets(server)
    server.kill()
    return side.reads(way, seconds=0.5), side.engine.pop_peer_failure() is None


def stale_key(io: Any) -> Any:
    side, server = Side(io, "r", 0), Server("s")
    side.reads(side.meets(server))
    server.kill()
    side.engine.deregister_remote_engine(io.EngineDesc.unpack(server.engine))
    again, fresh = Server("s"), Server("t")
    return side.reads(side.meets(again), seconds=0.5), side.reads(side.meets(fresh))


def runnable_ns() -> int:
    """Nanoseconds that all threads of this process have run or waited for a core (sched-stats.rst): what they want of
    the processor, however busy the machine is."""
    fields = (path.read_text().split() for path in Path("/proc/self/task").glob("*/schedstat"))
    return sum(int(run) + int(wait) for run, wait, _ in fields)


def spins(io: Any) -> Any:
    side = Side(io, "r", 0)
    before, began = runnable_ns(), time.monotonic_ns()
    time.sleep(0.3)
    wanted = (runnable_ns() - before) / (time.monotonic_ns() - began)
    del side
    return wanted


def late_port(io: Any) -> Any:
    side = Side(io, "r", 0)
    return side.port_before, side.engine.get_engine_desc().port > 1


def bare_pointer(io: Any) -> Any:
    side, server = Side(io, "r", 0), Server("s")
    way = side.meets(server)
    server.kill()
    way.batch_read([0], [0], [4096], way.allocate_transfer_uid())
    time.sleep(0.2)
    return "lives"


def no_cancel(io: Any) -> Any:
    names = [*dir(io.TransferStatus), *dir(io.IOEngine), *dir(io.IOEngineSession)]
    return [name for name in names if "ancel" in name]


def unregistered(io: Any) -> Any:
    side, server = Side(io, "r", 0), Server("s")
    seen = []
    remote = io.MemoryDesc.unpack(server.memory)
    try:
        seen.append(str(side.engine.create_session(side.local, remote)))
    except RuntimeError:
        seen.append("raises")
    side.engine.register_remote_engine(io.EngineDesc.unpack(server.engine))
    remote.size = SIZE - 1
    try:
        seen.append(str(side.engine.create_session(side.local, remote)))
    except RuntimeError:
        seen.append("raises")
    return seen


def lazy(io: Any) -> Any:
    side, server = Side(io, "r", 0), Server("s")
    server.kill()
    side.engine.register_remote_engine(io.EngineDesc.unpack(server.engine))
    try:
        side.engine.create_session(side.local, io.MemoryDesc.unpack(server.memory))
    except RuntimeError:
        return "raises with the session"
    return "does not raise"


def sq_full(io: Any) -> Any:
    side, server = Side(io, "r", 0), Server("s")
    way, columns = side.meets(server), [[n * 64 for n in range(200)]] * 2 + [[64] * 200]
    statuses = [way.batch_read(*columns, way.allocate_transfer_uid()) for _ in range(2)]
    kept.extend(statuses)
    return [f"{status.Code().name} {status.Message()}" for status in statuses][1]


def partial(io: Any) -> Any:
    side, server = Side(io, "r", 0), Server("s")
    way, columns = side.meets(server), [[n * 64 for n in range(200)]] * 2 + [[64] * 200]
    kept.append(way.batch_read(*columns, way.allocate_transfer_uid()))
    return f"{kept[-1].Code().name} {kept[-1].Message()}"


def too_long(io: Any) -> Any:
    side, server = Side(io, "r", 0), Server("s")
    return side.reads(side.meets(server), size=1 << 32)


def holds_lock(io: Any) -> Any:
    side, server = Side(io, "r", 0), Server("s")
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.wait(0.01):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    time.sleep(0.05)
    before = ticks[0]
    side.meets(server)
    during = ticks[0] - before
    stop.set()
    thread.join()
    return during


def binds_host(io: Any) -> Any:
    side = Side(io, "r", 0)
    port = f"{side.engine.get_engine_desc().port:04X}"
    listening = [line.split()[1] for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:] if " 0A " in line]
    return [address for address, _, at in (name.partition(":") for name in listening) if at == port]


def removes(io: Any) -> Any:
    side, server = Side(io, "r", 0), Server("s")
    way, threads = side.meets(server), len(os.listdir("/proc/self/task"))
    for at in (0, 4096):
        kept.append(way.batch_read([at], [0], [4096], way.allocate_transfer_uid()))
    while kept[0].InProgress():
        time.sleep(0.001)
    side.engine.remove_backend(io.BackendType.RDMA)
    ended = threads - len(os.listdir("/proc/self/task"))
    time.sleep(0.7)
    return kept[1].Code().name, not side.memory[4096:].any(), int(ended > 0)


def peer_failures(io: Any) -> Any:
    side, server = Side(io, "r", 0), Server("s")
    side.meets(server)
    event = side.engine.pop_peer_failure()
    return None if event is None else [event.remoteEngineKey, event.reason]


ROWS: dict[str, Callable[[Any], Any]] = {
    "NO_TCP": no_tcp,
    "NEEDS_DEVICE": rdma,
    "FALLBACK": fallback,
    "XGMI_NEEDS_GPUS": xgmi,
    "EXITS": rdma,
    "HANGS": rdma,
    "ABORTS": session,
    "NOTIFICATIONS_POISON": poison,
    "NOTIFICATIONS_STAY": notifications,
    "OUT_OF_RANGE": out_of_range,
    "REMOTE_ERROR": remote_error,
    "ALIVE_LIES": remote_error,
    "SILENCE": silence,
    "STALE_KEY": stale_key,
    "SPINS": spins,
    "LATE_PORT": late_port,
    "BARE_POINTER": bare_pointer,
    "NO_CANCEL": no_cancel,
    "UNREGISTERED": unregistered,
    "LAZY": lazy,
    "ENVIRONMENT": environment,
    "SQ_FULL": sq_full,
    "PARTIAL": partial,
    "TOO_LONG": too_long,
    "HOLDS_LOCK": holds_lock,
    "BINDS_HOST": binds_host,
    "REMOVES": removes,
    "PEER_FAILURES": peer_failures,
}


def main(library: str, row: str, _parent: str, fd: str) -> None:
    """Ends without a library's destructors."""
    spares.extend(Spare(library) for _ in range(_MOST_SERVERS))
    seen = json.dumps(ROWS[row](importlib.import_module(library)))
    os.write(int(fd), seen.encode())
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])

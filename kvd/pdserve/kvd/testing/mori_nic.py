"""The hardware below the fake mori: memory regions that others may read, queue pairs that read them, a control port.

A region's keys lie in a file of memory that its process shares, so that a peer learns that memory was deregistered
without that process doing anything, and also while it is stopped: as a NIC would. Bytes go by process_vm_readv.
"""

import collections
import contextlib
import json
import mmap
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from pdserve.kvd.plan import Offsets
from pdserve.kvd.testing.mori_switches import Machine, Row, Switches
from pdserve.kvd.transport import vm

TABLE: Final = 1 << 16
"""Bytes of what a process shares: one for each of its regions, and from the middle on one for each notification."""
_SLICE: Final = 1 << 20
_NOTIFIED: Final = TABLE // 2
_SPIN_S: Final = 20e-6
"""Between two looks at the queue pairs: a quarter of a core; the library takes all of one."""
_POISON_AFTER: Final = 4
"""Transfers of a queue pair with notifications, before they begin to fail."""

Finish = Callable[[str], None]
"""Told how a transfer ended: empty, or the words of its error."""


class Table:
    """What a process's device knows of its regions, as this or another process sees it."""

    def __init__(self, path: str | None = None) -> None:
        self.fd = os.memfd_create("fake-nic") if path is None else os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if path is None:
            os.ftruncate(self.fd, TABLE)
        self._bytes = mmap.mmap(self.fd, TABLE)

    def set(self, region: int, valid: bool) -> None:
        """Whether a region may be read."""
        self._bytes[region] = int(valid)

    def valid(self, region: int) -> bool:
        """Whether it may."""
        return bool(self._bytes[region])

    def notify(self, uid: int) -> None:
        """A transfer is done."""
        self._bytes[_NOTIFIED + uid % _NOTIFIED] = 1

    def notified(self, uid: int, *, forget: bool) -> bool:
        """Whether it is."""
        at = _NOTIFIED + uid % _NOTIFIED
        found = bool(self._bytes[at])
        if forget:
            self._bytes[at] = 0
        return found


@dataclass(frozen=True, slots=True)
class Remote:
    """A region of a peer: what its control port answered."""

    pid: int
    table: Table
    region: int
    address: int
    size: int


@dataclass(slots=True)
class Work:
    """A transfer under way: runs of addresses, and where it stands."""

    remote: Remote
    to: Offsets
    at: Offsets
    length: Offsets
    uid: int
    finish: Finish
    forget: Callable[[], None] = lambda: None
    """Told that it never ends."""
    done: int = 0


class QueuePair:
    """A connection to one peer: transfers one behind the other."""

    def __init__(self, switches: Switches, notifies: bool) -> None:
        self._switches = switches
        self._notifies = notifies
        self._work: collections.deque[Work] = collections.deque()
        self._carried = 0
        self._next = 0.0
        self.requests = 0
        """Work requests that are not done."""
        self.dead = False

    def room(self, requests: int) -> bool:
        """Whether there is any for so many more."""
        full = self._switches.on(Row.SQ_FULL) and self.requests + requests > self._switches.machine.queue
        return not full

    def post(self, work: Work) -> None:
        """Behind the others."""
        self.requests += len(work.length)
        self._work.append(work)

    def destroy(self) -> None:
        """It carries nothing any more."""
        for work in self._work:
            work.forget()
        self._work.clear()

    def turn(self) -> None:
        """Carries a little, as the device's thread."""
        machine = self._switches.machine
        if not self._work or time.monotonic() < self._next or (machine.silent and Path(machine.silent).exists()):
            return
        work = self._work[0]
        if self.dead:
            self._end(work, "Work Request Flushed Error")
        elif not work.remote.table.valid(work.remote.region):
            if self._switches.on(Row.REMOTE_ERROR):
                self.dead = True
                self._end(work, "remote access error")
            else:
                self._end(work, "")
        elif self._carry(work):
            self._carried += 1
            poisoned = self._notifies and self._switches.on(Row.NOTIFICATIONS_POISON) and self._carried > _POISON_AFTER
            if self._notifies:
                work.remote.table.notify(work.uid)
            self._end(work, "ENOMEM: Cannot allocate memory" if poisoned else "")

    def _carry(self, work: Work) -> bool:
        """Whether all of it has been."""
        ends = np.cumsum(work.length[work.done :])
        high = work.done + max(1, int(np.searchsorted(ends, np.uint64(_SLICE), side="right")))
        part = slice(work.done, high)
        try:
            vm.read(work.remote.pid, work.to[part], work.at[part], work.length[part])
        except OSError:
            if not self._switches.on(Row.SILENCE):
                self._end(work, "transport retry counter exceeded")
            return False  # nobody answers, and the device goes on asking
        if self._switches.machine.rate:
            now = time.monotonic()
            self._next = max(now, self._next) + int(work.length[part].sum()) / self._switches.machine.rate
        work.done = high
        return high >= len(work.length)

    def _end(self, work: Work, error: str) -> None:
        self._work.popleft()
        self.requests -= len(work.length)
        work.finish(error)


class Device:
    """The thread that looks at every queue pair, for ever. `pairs` is asked each time."""

    def __init__(self, switches: Switches, pairs: Callable[[], Sequence[QueuePair]]) -> None:
        self._pause = _SPIN_S if switches.on(Row.SPINS) else 0.005
        self._pairs = pairs
        self._running = True
        self._thread = threading.Thread(target=self._run, args=(weakref.ref(self),), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and waits for that."""
        self._running = False
        self._thread.join()

    @staticmethod
    def _run(device: "weakref.ref[Device]") -> None:
        while (this := device()) is not None and this._running:
            for pair in this._pairs():
                pair.turn()
            pause = this._pause
            del this
            time.sleep(pause)


class ControlPort:
    """Tells any caller of any region, without asking who it is. `register` is called before a region is told of."""

    def __init__(self, host: str, machine: Machine, tell: Callable[[int], dict[str, int] | None]) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self._socket.listen(128)
        self.port: Final = int(self._socket.getsockname()[1])
        self._machine = machine
        self._tell = tell
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Answers nobody any more."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            with caller, contextlib.suppress(OSError, ValueError):
                asked = json.loads(caller.recv(4096))
                time.sleep(self._machine.handshake)
                caller.sendall(json.dumps(self._tell(int(asked["region"]))).encode())


def call(host: str, port: int, region: int, timeout: float, wait: Callable[[int, float], bool]) -> Any:
    """Asks a control port of a region; None where there is none. `wait` waits for a descriptor to be readable.

    Raises:
        RuntimeError: nobody is there, or nothing is answered in time.
    """
    try:
        with socket.create_connection((host, port), timeout) as peer:
            peer.sendall(json.dumps({"region": region}).encode())
            if not wait(peer.fileno(), timeout):
                raise RuntimeError("the peer's control port did not answer")
            answer = peer.recv(4096)
            if not answer:
                raise RuntimeError("the peer's control port hung up")
            return json.loads(answer)
    except OSError as error:
        raise RuntimeError(f"the peer's control port cannot be reached: {error}") from error

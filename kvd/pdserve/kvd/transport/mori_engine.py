"""MORI-IO's API behind types: one engine, its memory, its sessions, its reads. The only importer of mori.

Runs in a process of its own (mori_worker) wherever that can be: the library ends its process where it finds no way on
(`exit`, `abort`), hangs in its constructor on some machines, and blocks under the interpreter lock. What its words mean
was found by trying 1.2.4 and reading it; docs/decisions/0015-mori.md has the list. What this file is built around:

- The library keeps a bare pointer to a `TransferStatus`: whoever drops one too early has memory written that is no
  longer its. So `Engine` holds each until it is terminal, and one that failed for longer: its work may not be over.
- A queue that is full is told by words in a failed status alone, and so is how much was posted before it was: what
  those words do not prove not to have been posted may be under way, and ends with the process (`nothing_posted`).
- `alive()` says yes of a dead peer, and a session that is made again after an error is as dead as the first one.
"""

import collections
import importlib
import itertools
import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from pdserve.kvd.plan import Offsets
from pdserve.kvd.transport.mori_jobs import Full
from pdserve.rpc.errors import TransferFailed

HOST: Final = -1
"""The device number of host memory."""
_FALLBACK_PORT: Final = 1
"""The port of an engine that found no RDMA device and would do without, between GPUs only."""
_NO_ROOM: Final = re.compile(r"SQ full \(\w+\):.* requested=(\d+) max=(\d+)")
"""Of the queue's books, before the device is asked: work requests of this posting, and what the queue has room for."""
_NO_MEMORY: Final = re.compile(r"Cannot allocate memory \(posted (\d+)/(\d+) WRs\)")
"""Of the device: work requests of this posting that it has taken, and all of them."""
_FAILED_KEPT: Final = 1 << 16
"""Failed statuses that are still held. At the first failure but for want of room the process ends soon; of that there
may be many, and nothing of theirs is under way."""


class Engine:
    """One MORI engine with one backend. Not for several threads."""

    def __init__(self, library: str, name: str, backend: str, host: str) -> None:
        """`library`: the module that has the API, "mori.io" but for tests. `name` is never used twice: a peer that
        sees a key again takes up connections of the dead engine, and its reads then never end. `backend`: "RDMA" or
        "XGMI". `host`: address that the control port is bound to.

        Raises:
            TransferFailed: the library is not there, or cannot work on this machine.
        """
        try:
            self._io: Any = importlib.import_module(library)
        except (ImportError, OSError) as error:  # without ROCm's libraries it is the loader that fails
            raise TransferFailed(f"mori cannot be loaded: {error}") from error
        self._backend = getattr(self._io.BackendType, backend)
        self._held: set[Read] = set()
        self._failed: collections.deque[Any] = collections.deque(maxlen=_FAILED_KEPT)
        try:
            self._engine = self._io.IOEngine(name, self._io.IOEngineConfig(host=host, port=0))
            self._engine.create_backend(self._backend, self._settings(backend))
            self._desc = self._engine.get_engine_desc()  # before there is a backend it has no port
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            raise TransferFailed(f"mori has no {backend} backend here: {error}") from error
        if backend == "RDMA" and self._desc.port in (0, _FALLBACK_PORT):
            self.close()
            raise TransferFailed(f"mori has no RDMA device in use: its engine's port is {self._desc.port}")

    @property
    def port(self) -> int:
        """Of the control port."""
        return int(self._desc.port)

    @property
    def card(self) -> bytes:
        """How another engine calls this one."""
        return bytes(self._desc.pack())

    def register(self, address: int, size: int, device: int = HOST) -> Any:
        """Registers memory, of a GPU where `device` is not -1; what `deregister`, `describe` and `session` take.

        Raises:
            TransferFailed: it cannot be registered. More often the process ends here, or with the first session.
        """
        where = self._io.MemoryLocationType.CPU if device == HOST else self._io.MemoryLocationType.GPU
        try:
            return self._engine.register_memory(address, size, device, where)
        except (RuntimeError, ValueError) as error:
            raise TransferFailed(f"mori cannot register {size} bytes: {error}") from error

    def describe(self, registered: Any) -> bytes:
        """What another engine needs to read this memory."""
        return bytes(registered.pack())

    def deregister(self, registered: Any) -> None:
        """Takes a registration back. A peer's read of it fails, and with it that peer's connection.

        Raises:
            TransferFailed: the library would not.
        """
        try:
            self._engine.deregister_memory(registered)
        except RuntimeError as error:
            raise TransferFailed(f"mori cannot deregister: {error}") from error

    def meet(self, card: bytes) -> str:
        """Makes another engine known; its key.

        Raises:
            TransferFailed: it is no card of an engine.
        """
        try:
            desc = self._io.EngineDesc.unpack(card)
            self._engine.register_remote_engine(desc)
            return str(desc.key)
        except (RuntimeError, ValueError, TypeError) as error:
            raise TransferFailed(f"mori cannot reach the other side: {error}") from error

    def session(self, local: Any, remote: bytes) -> Any:
        """A channel from a peer's memory to memory of this process. Blocks: it is here that the peer is called.

        Raises:
            TransferFailed: there is none.
        """
        try:
            made = self._engine.create_session(local, self._io.MemoryDesc.unpack(remote))
        except (RuntimeError, ValueError, TypeError) as error:
            raise TransferFailed(f"mori cannot open a session: {error}") from error
        if made is None:
            raise TransferFailed("mori finds no way between the two memories: No available backend found")
        return made

    def read(self, session: Any, src: Offsets, dst: Offsets, length: Offsets) -> "Read":
        """Begins to read `length[i]` bytes from offset `src[i]` of the session's peer to offset `dst[i]`.

        Raises:
            Full: there is no room now.
            TransferFailed: it was not begun, or has failed at once; the memory may still be written.
        """
        try:
            status = session.batch_read(dst.tolist(), src.tolist(), length.tolist(), session.allocate_transfer_uid())
        except (RuntimeError, ValueError, TypeError) as error:
            raise TransferFailed(f"mori cannot read: {error}") from error
        read = Read(self, status, int(length.sum(dtype=np.uint64)), len(length))
        self._held.add(read)
        if status.Failed():
            read.done()
        return read

    def close(self) -> None:
        """Takes the backend down, where this process is to go on without. With RDMA nothing of it reads or writes after
        this: mori ends its threads, destroys its queue pairs and takes its registrations back, in this order, before it
        returns. Blocks, under the interpreter lock. Safe twice.

        Raises:
            TransferFailed: the library would not.
        """
        try:
            self._engine.remove_backend(self._backend)
        except RuntimeError as error:
            raise TransferFailed(f"mori cannot take its backend down: {error}") from error
        self._held.clear()  # nobody writes to a status any more
        self._failed.clear()

    def lost_peers(self) -> Sequence[tuple[str, str]]:
        """Engines that it has given up since the last time: key and reason."""
        found = []
        for _ in itertools.repeat(None, 64):
            event = self._engine.pop_peer_failure()
            if event is None:
                break
            found.append((str(event.remoteEngineKey), f"{event.reason} {event.detail}".strip()))
        return found

    def let_go(self, read: "Read", status: Any) -> None:
        """A read is terminal."""
        self._held.discard(read)
        if status.Failed():
            self._failed.append(status)

    def _settings(self, backend: str) -> Any:
        if backend == "XGMI":
            return self._io.XgmiBackendConfig()
        return self._io.RdmaBackendConfig(
            qp_per_transfer=1,
            poll_cq_mode=self._io.PollCqMode.POLLING,
            enable_notification=False,  # with many at once they fail, and with them the transfers
        )


class Read:
    """One read that was begun."""

    __slots__ = ("_engine", "_requests", "_status", "nbytes")

    def __init__(self, engine: Engine, status: Any, nbytes: int, requests: int) -> None:
        self._engine = engine
        self._status = status
        self._requests = requests
        self.nbytes = nbytes

    def done(self) -> bool:
        """Whether every byte is in place.

        Raises:
            Full: there was no room, and nothing of it is under way; it is to be begun again.
            TransferFailed: it failed. Its memory may still be written.
        """
        if self._status.Succeeded():
            self._engine.let_go(self, self._status)
            return True
        if not self._status.Failed():
            return False
        message = str(self._status.Message())
        self._engine.let_go(self, self._status)
        if nothing_posted(message, self._requests):
            raise Full(message)
        raise TransferFailed(f"mori: {message or self._status.Code()}")


def nothing_posted(message: str, requests: int) -> bool:
    """Whether these words of a failure are that there was no room, and prove that none of so many requests was posted.

    mori merges requests that are adjacent, and posts what is longer than the queue in parts: its words are then of one
    part, with others before it on their way."""
    if refused := _NO_ROOM.search(message):
        asked, most = map(int, refused.groups())
        return asked >= requests or most >= requests
    if failed := _NO_MEMORY.search(message):
        posted, asked = map(int, failed.groups())
        return posted == 0 and asked >= requests
    return False

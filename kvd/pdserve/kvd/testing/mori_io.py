"""A fake of `mori.io` 1.2.4: its API and what it does (mori_switches.Row), with real bytes between processes of a host.

A module of its own so that it is loaded where the real one would be: in a process of kvd's, by its name.
"""

import ctypes
import itertools
import os
import select
import socket
import weakref
from collections.abc import Sequence
from typing import Any, Final, cast

import msgspec
import numpy as np

from pdserve.kvd.testing.mori_devices import is_foreign
from pdserve.kvd.testing.mori_nic import ControlPort, Device, QueuePair, Remote, Table, Work, call
from pdserve.kvd.testing.mori_switches import Row
from pdserve.kvd.testing.mori_values import (
    SWITCHES,
    BackendType,
    EngineDesc,
    IOEngineConfig,
    MemoryDesc,
    MemoryLocationType,
    PeerFailure,
    PollCqMode,
    RdmaBackendConfig,
    StatusCode,
    TransferStatus,
    XgmiBackendConfig,
)

__all__ = [
    "BackendType",
    "EngineDesc",
    "IOEngine",
    "IOEngineConfig",
    "IOEngineSession",
    "MemoryDesc",
    "MemoryLocationType",
    "PollCqMode",
    "RdmaBackendConfig",
    "StatusCode",
    "TransferStatus",
    "XgmiBackendConfig",
]

_S: Final = SWITCHES
_LONGEST: Final = (1 << 32) - 1
_holding_the_lock: Final = ctypes.PyDLL(None)


class IOEngineSession:
    """See mori."""

    def __init__(self, engine: "IOEngine", pair: QueuePair, local: MemoryDesc, remote: Remote) -> None:
        self._engine, self._pair, self._local, self._remote = engine, pair, local, remote

    def allocate_transfer_uid(self) -> int:
        """See mori."""
        return self._engine.allocate_transfer_uid()

    def alive(self) -> bool:
        """See mori."""
        return _S.on(Row.ALIVE_LIES) or not self._pair.dead

    def read(self, local: int, remote: int, size: int, uid: int) -> TransferStatus:
        """See mori."""
        return self.batch_read([local], [remote], [size], uid)

    def batch_read(self, local: Sequence[int], remote: Sequence[int], size: Sequence[int], uid: int) -> TransferStatus:
        """See mori."""
        status = TransferStatus()
        to, at, length = (np.array(column, np.uint64) for column in (local, remote, size))
        if _S.on(Row.TOO_LONG) and any(n > _LONGEST for n in size):
            status.Update(StatusCode.ERR_INVALID_ARGS, "a work request is too long")
        elif any(a + n > self._local.size for a, n in zip(local, size, strict=True)):
            if _S.on(Row.OUT_OF_RANGE):
                status.Update(StatusCode.ERR_INVALID_ARGS, "length out of range")
            else:
                self._pair.dead = True
                status.Update(StatusCode.ERR_RDMA_OP, "local protection error")
        elif not self._pair.room(len(size)):
            asked = f"depth={self._pair.requests} requested={len(size)} max={_S.machine.queue}"
            status.Update(StatusCode.ERR_RDMA_OP, f"SQ full (batch): ep=0 {asked}")
        elif len(size) > _S.machine.takes:
            taken = _S.machine.takes if _S.on(Row.PARTIAL) else 0
            at, to = at + np.uint64(self._remote.address), to + np.uint64(self._local.data)
            if taken:
                self._pair.post(Work(self._remote, to[:taken], at[:taken], length[:taken], uid, lambda _: None))
            words = f"ibv_post_send failed with 12: Cannot allocate memory (posted {taken}/{len(size)} WRs)"
            status.Update(StatusCode.ERR_RDMA_OP, words)
        else:
            status.Update(StatusCode.IN_PROGRESS, "")
            pointer = weakref.ref(status)

            def finish(error: str) -> None:
                held = pointer()
                if held is not None:
                    held.Update(StatusCode.ERR_RDMA_OP if error else StatusCode.SUCCESS, error)

            at += np.uint64(self._remote.address)
            to += np.uint64(self._local.data)

            def forget() -> None:
                held = pointer()
                if held is not None:
                    held.forgotten = True

            self._pair.post(Work(self._remote, to, at, length, uid, finish, forget))
        return status


class IOEngine:
    """See mori."""

    def __init__(self, key: str, config: IOEngineConfig) -> None:
        self._key, self._config = key, config
        self._desc = EngineDesc(key, "node", socket.gethostname(), config.host, config.port, os.getpid())
        self._backends: set[BackendType] = set()
        self._notifies = False
        self._memory: dict[int, MemoryDesc] = {}
        self._remotes: dict[str, EngineDesc] = {}
        self._pairs: dict[str, QueuePair] = {}
        self._known: dict[tuple[str, int], Remote] = {}
        self._table = Table()
        self._ids, self._uids = itertools.count(1), itertools.count(1)
        self._given_up: set[str] = set()
        if not _S.on(Row.LATE_PORT):
            self._listen()

    def get_engine_desc(self) -> EngineDesc:
        """See mori."""
        return msgspec.structs.replace(self._desc)

    def create_backend(self, type: BackendType, config: Any = None) -> None:
        """See mori."""
        if type is BackendType.RDMA:
            self._create_rdma(config or RdmaBackendConfig())
        elif type is BackendType.XGMI:
            self._device = Device(_S, lambda: tuple(self._pairs.values()))
        elif _S.on(Row.NO_TCP):
            raise NotImplementedError("backend not implemented yet")
        self._backends.add(type)

    def _create_rdma(self, config: RdmaBackendConfig) -> None:
        if _S.machine.devices == 0 and _S.on(Row.NEEDS_DEVICE):
            if os.environ.get("MORI_DISABLE_AUTO_XGMI") != "0" or not _S.on(Row.FALLBACK):
                raise RuntimeError(
                    "no active RDMA device on that host; set MORI_DISABLE_AUTO_XGMI=0 to enable XGMI-only fallback"
                )
            self._desc.port = 1
            return
        if not _S.machine.rocm and _S.on(Row.EXITS):
            os._exit(255)
        while _S.machine.virtual and _S.on(Row.HANGS):
            pass
        asked = os.environ.get("MORI_IO_ENABLE_NOTIFICATION") if _S.on(Row.ENVIRONMENT) else None
        self._notifies = config.enable_notification if asked is None else asked == "1"
        if _S.on(Row.LATE_PORT):
            self._listen()
        self._device = Device(_S, lambda: tuple(self._pairs.values()))

    def _listen(self) -> None:
        host = self._config.host if _S.on(Row.BINDS_HOST) else "0.0.0.0"
        self._control = ControlPort(host, _S.machine, self._tell)
        self._desc.port = self._control.port

    def remove_backend(self, type: BackendType) -> None:
        """See mori."""
        if type not in self._backends:
            return
        self._backends.discard(type)
        if type is BackendType.RDMA and self._desc.port != 1:
            self._control.close()
            if not _S.on(Row.REMOVES):
                return
            self._device.stop()
            while self._pairs:
                self._pairs.popitem()[1].destroy()
            for region in self._memory:
                self._table.set(region, False)

    def register_remote_engine(self, desc: EngineDesc) -> None:
        """See mori."""
        if not _S.on(Row.LAZY):
            call(desc.host, desc.port, 0, 1.0, _wait)
        if not _S.on(Row.STALE_KEY):
            self._pairs.pop(desc.key, None)
            self._known = {key: known for key, known in self._known.items() if key[0] != desc.key}
        self._remotes[desc.key] = desc

    def deregister_remote_engine(self, desc: EngineDesc) -> None:
        """See mori: its queue pair stays."""
        self._remotes.pop(desc.key, None)

    def register_memory(self, ptr: int, size: int, device_id: int, mem_loc: MemoryLocationType) -> MemoryDesc:
        """See mori: the device takes the memory when a session first needs it."""
        handle = b"" if mem_loc is MemoryLocationType.CPU else str(self._table.fd).encode()
        made = MemoryDesc(self._key, next(self._ids), device_id, ptr, size, mem_loc.name, handle)
        self._memory[made.id] = made
        if BackendType.RDMA not in self._backends:
            _register(self._table, made)
        return made

    def deregister_memory(self, memory: MemoryDesc) -> None:
        """See mori."""
        self._memory.pop(memory.id, None)
        self._table.set(memory.id, False)

    def create_session(self, local: MemoryDesc, remote: MemoryDesc) -> IOEngineSession | None:
        """See mori."""
        between_gpus = BackendType.RDMA not in self._backends or self._desc.port == 1
        if between_gpus and _S.on(Row.XGMI_NEEDS_GPUS) and "CPU" in (local.loc, remote.loc):
            return None
        peer = self._remotes.get(remote.engine_key)
        if peer is None:
            if _S.on(Row.UNREGISTERED):
                raise RuntimeError(f"remote engine {remote.engine_key} is not registered")
            return None
        _register(self._table, local)
        known = self._known.get((peer.key, remote.id))
        if known is None:
            known = self._opened(peer, remote) if between_gpus else self._ask(peer, remote)
            self._known[peer.key, remote.id] = known
        pair = self._pairs.get(peer.key)
        if pair is None or (pair.dead and not _S.on(Row.ALIVE_LIES)):
            pair = self._pairs[peer.key] = QueuePair(_S, self._notifies)
        return IOEngineSession(self, pair, local, known)

    def _ask(self, peer: EngineDesc, remote: MemoryDesc) -> Remote:
        timeout = int(os.environ.get("MORI_IO_CP_TIMEOUT_MS", "5000")) / 1000
        told = call(peer.host, peer.port, remote.id, timeout, _wait)
        if told is None or told["size"] != remote.size:
            raise RuntimeError(f"memory {remote.id} of {peer.key} is not of {remote.size} bytes there")
        table = Table(f"/proc/{told['pid']}/fd/{told['table']}")
        return Remote(told["pid"], table, remote.id, told["address"], told["size"])

    def _opened(self, peer: EngineDesc, remote: MemoryDesc) -> Remote:
        table = Table(f"/proc/{peer.pid}/fd/{remote.ipc_handle.decode()}")
        return Remote(peer.pid, table, remote.id, remote.data, remote.size)

    def _tell(self, region: int) -> dict[str, int] | None:
        memory = self._memory.get(region)
        if memory is None:
            return None
        _register(self._table, memory)
        return {"pid": os.getpid(), "table": self._table.fd, "address": memory.data, "size": memory.size}

    def allocate_transfer_uid(self) -> int:
        """See mori."""
        return next(self._uids)

    def batch_read(self, *columns: Sequence[Any]) -> list[TransferStatus]:
        """See mori: one status for each pair of memories."""
        made = []
        for local, local_at, remote, remote_at, size, uid in zip(*columns, strict=True):
            session = self.create_session(local, remote)
            if session is None:
                made.append(TransferStatus())
                made[-1].Update(StatusCode.ERR_BAD_STATE, "No available backend found")
            else:
                made.append(session.batch_read(local_at, remote_at, size, uid))
        return made

    def pop_inbound_transfer_status(self, remote_key: str, uid: int) -> TransferStatus | None:
        """See mori."""
        if not self._table.notified(uid, forget=not _S.on(Row.NOTIFICATIONS_STAY)):
            return None
        status = TransferStatus()
        status.Update(StatusCode.SUCCESS, "")
        return status

    def pop_peer_failure(self) -> PeerFailure | None:
        """See mori."""
        if not _S.machine.given_up or not _S.on(Row.PEER_FAILURES) or not os.path.exists(_S.machine.given_up):
            return None
        with open(_S.machine.given_up) as file:
            key = file.read()
        if key in self._given_up or key not in self._pairs:
            return None
        self._given_up.add(key)
        return PeerFailure(key, "PEER_UNREACHABLE", "retry exceeded")


def _register(table: Table, memory: MemoryDesc) -> None:
    takes = _S.machine.registers and (memory.loc == "CPU" or _S.machine.foreign or not is_foreign(memory.data))
    if not takes and _S.on(Row.ABORTS):
        os.abort()
    table.set(memory.id, True)


def _wait(fd: int, seconds: float) -> bool:
    if not _S.on(Row.HOLDS_LOCK):
        return bool(select.select([fd], [], [], seconds)[0])
    asked = (ctypes.c_int32 * 2)(fd, select.POLLIN)  # struct pollfd
    return cast("int", _holding_the_lock.poll(asked, ctypes.c_ulong(1), int(seconds * 1000))) > 0

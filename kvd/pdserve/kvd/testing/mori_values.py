"""The values of the fake mori (mori_io): descriptions, settings, and the status of a transfer."""

import enum
import os
from dataclasses import dataclass
from typing import Final

import msgspec

from pdserve.kvd.testing.mori_switches import Row, from_env

SWITCHES: Final = from_env()
"""What this process's fake does."""

BackendType = enum.Enum("BackendType", "Unknown XGMI RDMA TCP")
MemoryLocationType = enum.Enum("MemoryLocationType", "Unknown CPU GPU")
PollCqMode = enum.Enum("PollCqMode", "POLLING EVENT")


class StatusCode(enum.IntEnum):
    """See mori."""

    SUCCESS = 0
    INIT = 1
    IN_PROGRESS = 2
    ERR_INVALID_ARGS = 11
    ERR_NOT_FOUND = 12
    ERR_RDMA_OP = 13
    ERR_BAD_STATE = 14
    ERR_GPU_OP = 15


@dataclass
class IOEngineConfig:
    """See mori."""

    host: str = ""
    port: int = 0


@dataclass
class RdmaBackendConfig:
    """See mori."""

    qp_per_transfer: int = 1
    post_batch_size: int = -1
    num_worker_threads: int = -1
    poll_cq_mode: PollCqMode = PollCqMode.POLLING
    enable_notification: bool = True


@dataclass
class XgmiBackendConfig:
    """See mori."""

    num_streams: int = 64
    num_events: int = 64


class EngineDesc(msgspec.Struct, array_like=True):
    """See mori."""

    key: str
    node_id: str
    hostname: str
    host: str
    port: int
    pid: int

    def pack(self) -> bytes:
        """See mori."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def unpack(data: bytes) -> "EngineDesc":
        """See mori."""
        return msgspec.msgpack.decode(data, type=EngineDesc)


class MemoryDesc(msgspec.Struct, array_like=True):
    """See mori."""

    engine_key: str
    id: int
    device_id: int
    data: int
    size: int
    loc: str
    ipc_handle: bytes = b""

    def pack(self) -> bytes:
        """See mori."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def unpack(data: bytes) -> "MemoryDesc":
        """See mori."""
        return msgspec.msgpack.decode(data, type=MemoryDesc)


class TransferStatus:
    """See mori. What the device writes to when a transfer ends, whether it is still there or not."""

    def __init__(self) -> None:
        self._code, self._message = StatusCode.INIT, ""
        self.forgotten = False
        """Not in mori: no device writes to it any more."""

    def __del__(self) -> None:
        if not self.forgotten and self._code is StatusCode.IN_PROGRESS and SWITCHES.on(Row.BARE_POINTER):
            os.abort()

    def Code(self) -> StatusCode:
        """See mori."""
        return self._code

    def Message(self) -> str:
        """See mori."""
        return self._message

    def InProgress(self) -> bool:
        """See mori."""
        return self._code is StatusCode.IN_PROGRESS

    def Succeeded(self) -> bool:
        """See mori."""
        return self._code is StatusCode.SUCCESS

    def Failed(self) -> bool:
        """See mori."""
        return self._code > StatusCode.IN_PROGRESS

    def Update(self, code: StatusCode, message: str) -> None:
        """See mori."""
        self._code, self._message = code, message

    if not SWITCHES.on(Row.NO_CANCEL):

        def Cancel(self) -> None:
            """Not in mori."""


class PeerFailure(msgspec.Struct):
    """See mori."""

    remoteEngineKey: str
    reason: str
    detail: str

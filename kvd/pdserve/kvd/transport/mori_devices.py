"""Device memory of other processes, opened in a mori process by HIP's IPC handles: the pointers for mori to register.

Whether it can, nobody has shown: that is found out for each device, in processes that are there for it (mori.py).
"""

import sys
from collections.abc import Sequence
from typing import Final, Protocol

from pdserve.kvd.transport.device.port import DeviceFailed
from pdserve.kvd.transport.device.runtime import Runtime
from pdserve.kvd.types import MemoryKind, Piece
from pdserve.rpc.errors import TransferFailed

KIND: Final = MemoryKind.ROCM
"""Of the memory."""


class Opens(Protocol):
    """What a mori process needs of devices; `open_devices` of the module that has it makes one."""

    def open(self, bus_id: str, pieces: Sequence[Piece]) -> tuple[int, list[int]]:
        """The device's number, and the address of each piece; for `close`.

        Raises:
            TransferFailed: nothing is open.
        """
        ...

    def close(self, pieces: Sequence[Piece]) -> None:
        """Lets go of them."""
        ...

    def make(self, bus_id: str, size: int) -> tuple[int, int]:
        """The device's number, and the address of memory of one's own on it.

        Raises:
            TransferFailed: there is none.
        """
        ...


def open_devices() -> Opens:
    """The devices that this process sees."""
    return HipDevices()


class HipDevices:
    """See Opens. Each allocation is opened once, as HIP demands."""

    def __init__(self) -> None:
        self._runtime: Runtime | None = None
        self._open: dict[bytes, list[int]] = {}
        """Handle -> address, and how many pieces have it."""

    def open(self, bus_id: str, pieces: Sequence[Piece]) -> tuple[int, list[int]]:
        """See Opens."""
        held: list[Piece] = []
        try:
            runtime = self._loaded()
            device = runtime.index_of(bus_id)
            runtime.use(device)
            addresses = []
            for piece in pieces:
                if piece.handle not in self._open:
                    self._open[piece.handle] = [runtime.open_memory(piece.handle), 0]
                self._open[piece.handle][1] += 1
                held.append(piece)
                base, size = runtime.range_of(self._open[piece.handle][0])
                if piece.size <= 0 or piece.offset < 0 or piece.offset + piece.size > size:
                    raise DeviceFailed(f"{piece.size} bytes from {piece.offset} on in an allocation of {size}")
                addresses.append(base + piece.offset)
        except DeviceFailed as error:
            self.close(held)
            raise TransferFailed(f"device {bus_id}: {error}") from error
        return device, addresses

    def close(self, pieces: Sequence[Piece]) -> None:
        """See Opens."""
        for piece in pieces:
            opened = self._open[piece.handle]
            opened[1] -= 1
            if not opened[1]:
                del self._open[piece.handle]
                try:
                    self._loaded().close_memory(opened[0])
                except DeviceFailed as error:  # of a process that has died, say: there is nothing else to do about it
                    sys.stderr.write(f"device memory was not closed: {error}\n")

    def make(self, bus_id: str, size: int) -> tuple[int, int]:
        """See Opens."""
        try:
            runtime = self._loaded()
            device = runtime.index_of(bus_id)
            runtime.use(device)
            return device, runtime.allocate(size)
        except DeviceFailed as error:
            raise TransferFailed(f"device {bus_id}: {error}") from error

    def _loaded(self) -> Runtime:
        if self._runtime is None:
            version = getattr(sys.modules.get("torch"), "version", None)  # mori has imported it
            hip = getattr(version, "hip", None)
            if hip is None:
                raise DeviceFailed("the torch that mori loads is not built for ROCm")
            self._runtime = Runtime(KIND, str(hip))
        return self._runtime

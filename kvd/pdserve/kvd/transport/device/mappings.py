"""What is mapped on one device: each allocation once, however many regions and sessions use it."""

from collections.abc import Sequence
from typing import Final

import structlog

from pdserve.kvd.transport.device.parts import ALIGNMENT, Place
from pdserve.kvd.transport.device.port import Device, DeviceFailed
from pdserve.kvd.types import DeviceMemory

log = structlog.get_logger(__name__)

_LARGE_PAGE: Final = 2 << 20
"""An allocation of another size is mapped in small pages, in this process but not in its own (seen on an H200 with CUDA
13): its copies reach a third of the speed. PyTorch's allocator makes whole large pages of all but small tensors."""


class Mappings:
    """Used by the device's thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._open: dict[bytes, list[int]] = {}
        """Handle -> address, bytes, and how many hold it."""

    def __len__(self) -> int:
        return len(self._open)

    def map(self, memory: DeviceMemory) -> Place:
        """Where the memory is on this device.

        Raises:
            DeviceFailed: a piece that cannot be mapped or is not in its allocation. Nothing of it stays mapped.
        """
        held: list[bytes] = []
        try:
            addresses: list[int] = []
            for piece in memory.pieces:
                address, size = self._hold(piece.handle)
                held.append(piece.handle)
                if piece.size <= 0 or piece.offset < 0 or piece.offset + piece.size > size:
                    raise DeviceFailed(f"{piece.size} bytes from {piece.offset} on in an allocation of {size}")
                if (address + piece.offset) % ALIGNMENT or piece.size % ALIGNMENT:
                    raise DeviceFailed(f"a piece that is not aligned to {ALIGNMENT} bytes")
                addresses.append(address + piece.offset)
            if not addresses:
                raise DeviceFailed("no pieces")
            return Place(addresses, [piece.size for piece in memory.pieces])
        except DeviceFailed:
            self._release(held)
            raise

    def map_all(self, memories: Sequence[DeviceMemory]) -> list[Place]:
        """Each, or none of them where one cannot be mapped (DeviceFailed)."""
        places: list[Place] = []
        try:
            for memory in memories:
                places.append(self.map(memory))
        except DeviceFailed:
            for memory in memories[: len(places)]:
                self.unmap(memory)
            raise
        return places

    def unmap(self, memory: DeviceMemory) -> None:
        """What `map` mapped; nothing may copy from or to it any more. Raises DeviceFailed where an allocation could
        not be unmapped; the others are."""
        self._release([piece.handle for piece in memory.pieces])

    def _hold(self, handle: bytes) -> tuple[int, int]:
        found = self._open.get(handle)
        if found is None:
            found = self._open[handle] = [*self._device.open(handle), 0]
            if found[1] % _LARGE_PAGE:
                log.warning("device_memory_maps_slowly", device=self._device.bus_id, allocation_bytes=found[1])
        found[2] += 1
        return found[0], found[1]

    def _release(self, handles: Sequence[bytes]) -> None:
        failed: DeviceFailed | None = None
        for handle in handles:
            found = self._open[handle]
            found[2] -= 1
            if not found[2]:
                del self._open[handle]
                try:
                    self._device.close(found[0])
                except DeviceFailed as error:
                    failed = error
        if failed is not None:
            raise failed

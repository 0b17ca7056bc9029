"""What the process that has device memory for a measurement asks of a runtime, which is a fake of host memory here."""

import ctypes
from typing import Any

import numpy as np
import pytest

from pdserve.kvd.probing import device_memory
from pdserve.kvd.probing.device_memory import Owned, own_devices
from pdserve.kvd.transport.device import export
from pdserve.kvd.transport.device.port import DeviceFailed
from pdserve.kvd.types import MemoryKind
from pdserve.rpc.errors import TransferFailed

MIB = 1 << 20
BUSES = ("0000:1b:00.0", "0000:2c:00.0")


class FakeRuntime:
    """See transport.device.runtime.Runtime. A copy is there when its event has been waited for, and not before."""

    free = 4 << 30
    broken = ""

    def __init__(self, kind: MemoryKind, version: str) -> None:
        self.index = -1
        self.made: list[np.ndarray[Any, Any]] = []
        self.copies: list[tuple[int, int, int]] = []

    def count(self) -> int:
        """Devices."""
        return len(BUSES)

    def bus_id(self, index: int) -> str:
        """Of a device."""
        return BUSES[index]

    def use(self, index: int) -> None:
        """The thread's device."""
        self.index = index

    def free_memory(self) -> int:
        """Of that device: the second one has less."""
        assert self.index >= 0
        return self.free >> (2 * self.index)

    def allocate(self, nbytes: int) -> int:
        """Of that device."""
        self.made.append(np.full(nbytes, 0xEE, np.uint8))
        return int(self.made[-1].ctypes.data)

    def range_of(self, address: int) -> tuple[int, int]:
        """An allocation."""
        (found,) = [one for one in self.made if one.ctypes.data == address]
        return address, found.nbytes

    def export_memory(self, address: int) -> bytes:
        """A handle."""
        return address.to_bytes(8, "little") * 8

    def make_stream(self) -> int:
        """Any."""
        return 1

    def make_event(self, *, shared: bool) -> int:
        """Any."""
        return 2

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        """Begins."""
        if self.broken:
            raise DeviceFailed(self.broken)
        self.copies.append((dst, src, nbytes))

    def record(self, event: int, stream: int) -> None:
        """A mark."""

    def wait(self, event: int) -> None:
        """It is passed."""
        for dst, src, nbytes in self.copies:
            ctypes.memmove(dst, src, nbytes)
        self.copies.clear()


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> type[FakeRuntime]:
    """Instead of CUDA's, for exports too: it lends its memory, and no handle of it opens anything."""

    class OneRuntime(FakeRuntime):
        made_one: FakeRuntime | None = None

        def __new__(cls, *_: Any) -> Any:
            """The same for both, as the process has one device context."""
            cls.made_one = cls.made_one or super().__new__(cls)
            return cls.made_one

        def __init__(self, *args: Any) -> None:
            if not hasattr(self, "made"):
                super().__init__(*args)

    monkeypatch.setattr(device_memory, "Runtime", OneRuntime)
    monkeypatch.setattr(export, "Runtime", OneRuntime)
    return OneRuntime


def test_memory_is_made_written_and_read() -> None:
    """On the device that was asked for, in one piece; what was written is there when that returns."""
    owned = Owned(MemoryKind.CUDA, "13.0")
    assert tuple(owned.buses()) == BUSES
    memory = owned.make(BUSES[0], MIB)
    assert (memory.bus_id, [piece.size for piece in memory.pieces], memory.events) == (BUSES[0], [MIB], ())
    owned.write(memory, 4096, b"abcdefgh")
    assert owned.read(memory, 4094, 12) == b"\xee\xeeabcdefgh\xee\xee"


def test_only_where_enough_is_free() -> None:
    """A gibibyte stays: the second device has no more than that."""
    owned = Owned(MemoryKind.CUDA, "13.0")
    with pytest.raises(TransferFailed, match=f"1024 MiB of {BUSES[1]} are free, and 1025 MiB are to be"):
        owned.make(BUSES[1], MIB)
    owned.make(BUSES[0], MIB)


def test_what_fails_is_typed(runtime: type[FakeRuntime], monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is not there, and one that fails."""
    owned = Owned(MemoryKind.CUDA, "13.0")
    with pytest.raises(TransferFailed, match="no such device"):
        owned.make("0000:ff:00.0", MIB)
    memory = owned.make(BUSES[0], MIB)
    monkeypatch.setattr(runtime, "broken", "an illegal memory access was encountered")
    with pytest.raises(TransferFailed, match="illegal memory access"):
        owned.write(memory, 0, bytes(16))


def test_a_host_without_a_device_says_what_is_missing() -> None:
    """This one: torch, Triton, or what they would use."""
    with pytest.raises(TransferFailed, match=r"torch|libcudart|device"):
        own_devices(MemoryKind.ROCM)

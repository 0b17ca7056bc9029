"""What CUDA's runtime is asked, in which order and on which device. The library is fake: it takes down the calls."""

import ctypes
from collections.abc import Callable

import pytest

from pdserve.kvd.config import GpuCopy
from pdserve.kvd.transport.device.gpu import GpuDevice
from pdserve.kvd.transport.device.port import DeviceFailed
from pdserve.kvd.transport.device.runtime import HANDLE_BYTES, Runtime
from pdserve.kvd.types import MemoryKind

NOT_READY = 600
REACHED_ALREADY = 704
UNREACHABLE = 217


class Library:
    """Every function answers with its code in `codes`, or 0."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...]]] = []
        self.codes: dict[str, int] = {}

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*args: object) -> object:
            if name == "cudaGetErrorString":
                return b"peer access is not supported between these two devices"
            self.calls.append((name, tuple(getattr(arg, "value", arg) for arg in args)))
            return self.codes.get(name, 0)

        setattr(self, name, call)
        return call

    @property
    def names(self) -> list[str]:
        """Of the calls so far."""
        return [name for name, _ in self.calls]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Whatever library is loaded from now on."""
    fake = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
    return fake


@pytest.fixture
def runtime(library: Library) -> Runtime:
    """On it."""
    return Runtime(MemoryKind.CUDA, "13.0")


def test_an_event_is_asked_about_on_its_own_device(library: Library, runtime: Runtime) -> None:
    """Its device becomes the asking thread's before each look: with another one, or none, the runtime would begin to
    use the first device of all."""
    device = GpuDevice(runtime, 1, "0000:2c:00.0", GpuCopy.KERNEL, None)
    event = device.open_event(bytes(HANDLE_BYTES))
    runtime.use(0)
    library.calls.clear()
    library.codes["cudaEventQuery"] = NOT_READY
    assert not event.done()
    library.codes["cudaEventQuery"] = 0
    assert event.done()
    assert library.names == ["cudaSetDevice", "cudaEventQuery"] * 2
    assert library.calls[0] == library.calls[2] == ("cudaSetDevice", (1,))


def test_a_device_is_reached_once_or_again(library: Library, runtime: Runtime) -> None:
    """That it is reached already is no failure, and no error is left behind for who looks at the last one."""
    runtime.reach(1)
    library.codes["cudaDeviceEnablePeerAccess"] = REACHED_ALREADY
    runtime.reach(1)
    assert library.calls == [
        ("cudaDeviceEnablePeerAccess", (1, 0)),
        ("cudaDeviceEnablePeerAccess", (1, 0)),
        ("cudaGetLastError", ()),
    ]


def test_a_device_that_cannot_be_reached_is_said_in_the_runtimes_words(library: Library, runtime: Runtime) -> None:
    """DeviceFailed, and no error is left behind."""
    library.codes["cudaDeviceEnablePeerAccess"] = UNREACHABLE
    with pytest.raises(DeviceFailed, match="cudaDeviceEnablePeerAccess: peer access is not supported"):
        runtime.reach(1)
    assert library.names == ["cudaDeviceEnablePeerAccess", "cudaGetLastError"]

"""Processes with device memory, as engines have it, on one device or on two of a host."""

import contextlib
from collections.abc import Sequence
from types import TracebackType
from typing import Final

from pdserve.kvd.testing.device_process import DeviceProcess, RemoteMemory
from pdserve.kvd.transport.device.runtime import Runtime

PLACES: Final = ((0, 0), (0, 1), (1, 0))
"""Devices of what is read and of what is written: one; two, either way."""


def devices() -> int:
    """That this process sees."""
    from pdserve.kvd.transport.device.kernel import built_for  # torch and Triton

    return Runtime(*built_for()).count()


class Engines:
    """What DeviceProcess does, with sources (odd seeds) on one device and destinations (even seeds) on another or the
    same one: a process for each device."""

    def __init__(self, source: int = 0, target: int = 0) -> None:
        self._stack = contextlib.ExitStack()
        started = {
            device: self._stack.enter_context(DeviceProcess(device)) for device in dict.fromkeys((source, target))
        }
        self._of = {1: started[source], 0: started[target]}

    def __enter__(self) -> "Engines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def make(self, sizes: Sequence[int], seed: int, layers: int = 0) -> RemoteMemory:
        """See DeviceProcess.make."""
        return self._of[seed % 2].make(sizes, seed, layers)

    def kill(self) -> None:
        """Ends them at once; safe twice."""
        for process in self._of.values():
            process.kill()

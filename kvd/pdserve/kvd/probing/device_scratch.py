"""Memory of devices that is measured with: a process has it, for as long as a measurement takes."""

import contextlib
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from pdserve.kvd.plan import Runs
from pdserve.kvd.probing import device_wire as wire
from pdserve.kvd.probing.scratch import looks, word
from pdserve.kvd.probing.slot import whole
from pdserve.kvd.transport.child import Child, Launch
from pdserve.kvd.transport.start import Start, interpreter
from pdserve.kvd.types import DeviceMemory, MemoryKind

_START_S = 60.0
"""Longest wait for an answer of the process, that of its start included: torch is imported before it. A survey has a
bound of its own."""


class DeviceScratch(Protocol):
    """Devices, and memory of them."""

    @property
    def buses(self) -> Sequence[str]:
        """PCI bus ids."""
        ...

    async def make(self, bus_id: str, nbytes: int, seed: int | None) -> DeviceMemory:
        """Memory with the pattern of a seed, or with zeros; it stays until the end.

        Raises:
            TransferFailed: too little is free, or the device failed.
        """
        ...

    async def landed(self, dst: DeviceMemory, runs: Runs, seed: int) -> bool:
        """Whether the runs of a copy hold what its source held: the first and the last word of some of them.

        Raises:
            TransferFailed: it cannot be looked at.
        """
        ...


OpenScratch = Callable[[MemoryKind], AbstractAsyncContextManager[DeviceScratch]]
"""While the block runs. Raises TransferFailed where there is no device of that kind, or nothing to use it by."""


@contextlib.asynccontextmanager
async def device_scratch(
    kind: MemoryKind, module: str = "pdserve.kvd.probing.device_memory", start: Start = interpreter
) -> AsyncIterator[DeviceScratch]:
    """See OpenScratch. `module`: see device_worker.Owns; another one, and another start, in tests."""
    process = await ScratchProcess.launch(
        Launch(
            library="scratch",
            module="pdserve.kvd.probing.device_worker",
            name=f"scratch-{os.urandom(4).hex()}",
            args=(module, kind.value),
            env=os.environ,
            stall=_START_S,
            call=_START_S,
            start=start,
        )
    )
    try:
        yield process
    finally:
        process.end("the measurement is over")
        await whole(process.gone())


class ScratchProcess(Child):
    """See DeviceScratch."""

    buses: Sequence[str] = ()
    """See DeviceScratch."""
    _names: dict[DeviceMemory, str]

    async def make(self, bus_id: str, nbytes: int, seed: int | None) -> DeviceMemory:
        """See DeviceScratch."""
        name = str(len(self._names))
        memory = wire.decode_memory((await self.call(wire.Make(name, bus_id, nbytes, seed))).data)
        self._names[memory] = name
        return memory

    async def landed(self, dst: DeviceMemory, runs: Runs, seed: int) -> bool:
        """See DeviceScratch."""
        expected = looks(runs)
        asked = wire.Look(self._names[dst], tuple(to for _, to in expected))
        found = wire.decode_words((await self.call(asked)).data)
        return list(found) == [word(seed, page) for page, _ in expected]

    async def _ready(self) -> None:
        self._names = {}
        self.buses = wire.decode_buses((await self._answer(0)).data)

"""A Rig on fake accelerators."""

import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from pdserve.kvd.testing.device import BUS_ID, FakeDeviceMemory, FakeGpu, FakeGpus
from pdserve.kvd.transport.gpu_ipc import GpuIpcTransport
from pdserve.kvd.types import MemoryKind
from tests.contract.kvd.gpu_suite import MIB, Rig

OTHER_BUS = "0000:2c:00.0"
BUSES = (BUS_ID, OTHER_BUS)
PLACES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "on one device": ((BUS_ID,), (BUS_ID,)),
    "from device to device": ((BUS_ID,), (OTHER_BUS,)),
    "ranks on both devices": (BUSES, BUSES),
}
"""Devices of sources and of destinations: of the ranks in turn."""


@dataclass
class FakeRig(Rig):
    """Real threads and bytes; the accelerator, its handles and its events are fake."""

    gpus: FakeGpus = None  # type: ignore[assignment]

    @property
    def device(self) -> FakeGpu:
        """The first one."""
        return self.gpus.find(BUS_ID)


class FakeMakes:
    """See Rig.make: memory of sources (odd seeds) and of destinations, on the devices of their places in turn."""

    def __init__(self, gpus: FakeGpus, sources: Sequence[str] = (BUS_ID,), targets: Sequence[str] = (BUS_ID,)) -> None:
        self._gpus = gpus
        self._places = (itertools.cycle(targets), itertools.cycle(sources))

    def __call__(self, sizes: Sequence[int], seed: int) -> FakeDeviceMemory:
        """One rank's."""
        return FakeDeviceMemory(self._gpus, sizes, seed, bus_id=next(self._places[seed % 2]))


@contextlib.asynccontextmanager
async def fake_rig(sources: Sequence[str] = (BUS_ID,), targets: Sequence[str] = (BUS_ID,)) -> AsyncIterator[FakeRig]:
    """Whatever was mapped is unmapped in the end."""
    gpus = FakeGpus(BUSES)
    transport = GpuIpcTransport(gpus, batch_bytes=MIB)
    yield FakeRig(transport, FakeMakes(gpus, sources, targets), MemoryKind.CUDA, gpus=gpus)
    await transport.aclose()
    all_unmapped(gpus)


def all_unmapped(gpus: FakeGpus) -> None:
    """Raises AssertionError where a device has something mapped, or was called from this thread but for launches."""
    for bus_id in BUSES:
        assert not gpus.find(bus_id).opened
        assert threading.get_ident() not in gpus.find(bus_id).threads
    assert all(event.opened == 0 for event in gpus.events.values())

"""An engine's side of device memory: handles by which kvd opens what the engine allocated, and events that tell when
a layer is in it."""

from collections.abc import Sequence

from pdserve.kvd.transport.device.parts import ALIGNMENT
from pdserve.kvd.transport.device.port import DeviceFailed
from pdserve.kvd.transport.device.runtime import Runtime
from pdserve.kvd.types import DeviceMemory, MemoryKind, Piece
from pdserve.rpc.errors import ConfigError


class Exported:
    """The memory of one rank as kvd may open it. Used by the thread that runs the steps; the memory itself stays the
    engine's."""

    def __init__(
        self, kind: MemoryKind, version: str, device: int, ranges: Sequence[tuple[int, int]], layers: int = 0
    ) -> None:
        """`ranges`: address and bytes of each piece, in the region's order. `version`: of the runtime, as the engine's
        framework was built for. `layers`: for how many there are events; 0: none.

        Raises:
            ConfigError: memory that another process cannot open.
        """
        try:
            self._runtime = Runtime(kind, version)
            self._runtime.use(device)
            pieces = tuple(self._piece(address, size) for address, size in ranges)
            self._events = [self._runtime.make_event(shared=True) for _ in range(2 * (layers + 1) if layers else 0)]
            handles = tuple(self._runtime.export_event(event) for event in self._events)
            self.memory = DeviceMemory(self._runtime.bus_id(device), pieces, handles)
        except DeviceFailed as error:
            raise ConfigError(
                f"the KV memory cannot be shared with kvd: {error}; expandable segments and other virtual memory "
                "cannot, so PYTORCH_CUDA_ALLOC_CONF must not ask for them"
            ) from error

    def record(self, step: int, layer: int | None, stream: int) -> None:
        """Behind what the stream has been given lies the KV of a layer of a step, or (None) of all of them. Call it
        before the notice that says so.

        Raises:
            DeviceFailed: the device does not work any more.
        """
        slot = self.memory.slot(step, layer)
        if slot is not None:
            self._runtime.record(self._events[slot], stream)

    def close(self) -> None:
        """Lets go of the events; safe twice."""
        while self._events:
            self._runtime.destroy_event(self._events.pop())

    def _piece(self, address: int, size: int) -> Piece:
        base, _ = self._runtime.range_of(address)
        if address % ALIGNMENT or size % ALIGNMENT:
            raise DeviceFailed(f"a piece of {size} bytes at {address:#x} is not aligned to {ALIGNMENT} bytes")
        return Piece(self._runtime.export_memory(address), address - base, size)

"""The KV memory of one rank on an accelerator: vLLM's own allocations, which kvd opens by their IPC handles.

vLLM gives each layer a storage of its own, or one to several layers; the region is these storages, one behind the
other, each at its offset in an allocation of torch's:

    region       |<---- storage 0 ---->|<---- storage 1 ---->|
    allocations    ..[== storage 0 ==]..    [== storage 1 ==]..

The device runs behind the host: when vLLM tells of a layer, the layer has only been given to the device. So behind each
layer that kvd is told of, an event is recorded on the stream that computes it, before the notice is sent; kvd reads the
layer once the event has passed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from pdserve.engine.handoff.worker import NoticeSink
from pdserve.engine.vllm.layout import TensorShape
from pdserve.kvd.client import Memory
from pdserve.kvd.notices import LayerReady, Notice, StepEnd
from pdserve.kvd.transport.device.export import Exported
from pdserve.kvd.transport.device.port import DeviceFailed
from pdserve.kvd.types import DeviceMemory, Layout, MemoryKind
from pdserve.rpc.errors import ConfigError, EngineDied


class Export(Protocol):
    """What `kvd.transport.device.export.Exported` does."""

    @property
    def memory(self) -> DeviceMemory:
        """As kvd opens it."""
        ...

    def record(self, step: int, layer: int | None, stream: int) -> None:
        """Marks what the stream has been given so far. Raises DeviceFailed."""
        ...

    def close(self) -> None:
        """Lets go of the events; safe twice."""
        ...


MakeExport = Callable[[MemoryKind, int, Sequence[tuple[int, int]], int], Export]
"""Kind of memory, number of the device, address and bytes of each piece, layers. Raises ConfigError."""


class DeviceKvMemory:
    """See rank_memory.RankMemory. Used by the thread that runs the steps."""

    def __init__(
        self, kind: MemoryKind, export: MakeExport | None = None, stream: Callable[[], int] | None = None
    ) -> None:
        """`export` and `stream` stand in for the accelerator; None: it is there."""
        self._kind = kind
        self._make_export = export or _export
        self._stream = stream or _current_stream
        self._device = -1
        self._pieces: list[tuple[int, int]] = []
        """Address and bytes of each storage, in the region's order."""
        self._exported: Export | None = None
        self.size = 0

    def allocating(self) -> None:
        """See RankMemory: vLLM allocates as it always does."""

    def shapes(self, tensors: Mapping[str, Any]) -> dict[str, TensorShape]:
        """See RankMemory.

        Raises:
            ConfigError: tensors of other memory, or of more than one device.
        """
        starts: dict[int, int] = {}
        shapes: dict[str, TensorShape] = {}
        for name, tensor in tensors.items():
            if tensor.device.type != "cuda":  # torch calls HIP's devices so too
                raise ConfigError(f"the KV cache of {name} lies on {tensor.device}, not on an accelerator as said")
            if self._device not in (-1, tensor.device.index):
                raise ConfigError(f"the KV cache of {name} lies on {tensor.device}, others on device {self._device}")
            self._device = tensor.device.index
            storage = tensor.untyped_storage()
            base = storage.data_ptr()
            if base not in starts:
                starts[base] = self.size
                self._pieces.append((base, storage.nbytes()))
                self.size += storage.nbytes()
            offset = starts[base] + tensor.data_ptr() - base
            shapes[name] = TensorShape(tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size(), offset)
        return shapes

    def give(self, layout: Layout) -> Memory:
        """See RankMemory."""
        self._exported = self._make_export(self._kind, self._device, self._pieces, len(layout.layers))
        return Memory(-1, self.size, layout, self._kind, self._exported.memory)

    def marking(self, notices: NoticeSink) -> NoticeSink:
        """See RankMemory."""
        assert self._exported is not None
        return Marking(self._exported, self._stream, notices)

    def close(self) -> None:
        """See RankMemory."""
        if self._exported is not None:
            self._exported.close()


class Marking:
    """A NoticeSink that records the event of what a notice tells of, and then sends it."""

    def __init__(self, exported: Export, stream: Callable[[], int], notices: NoticeSink) -> None:
        self._exported = exported
        self._stream = stream
        self._notices = notices

    def send(self, notice: Notice) -> bool:
        """See NoticeSink.

        Raises:
            EngineDied: the device does not work any more.
        """
        if isinstance(notice, LayerReady | StepEnd):
            layer = notice.layer if isinstance(notice, LayerReady) else None
            try:
                self._exported.record(notice.step, layer, self._stream())
            except DeviceFailed as error:
                raise EngineDied(f"the device failed under a step: {error}") from error
        return self._notices.send(notice)


def _export(kind: MemoryKind, device: int, pieces: Sequence[tuple[int, int]], layers: int) -> Export:
    version = torch.version.hip if kind is MemoryKind.ROCM else torch.version.cuda
    if version is None:
        raise ConfigError(f"this PyTorch was not built for {kind.value} devices")
    return Exported(kind, version, device, pieces, layers)


def _current_stream() -> int:
    stream: int = torch.cuda.current_stream().cuda_stream
    return stream

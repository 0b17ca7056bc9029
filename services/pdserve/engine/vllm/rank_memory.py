"""What the worker's half needs of the memory that holds a rank's KV, wherever that is."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from pdserve.engine.handoff.worker import NoticeSink
from pdserve.engine.vllm.layout import TensorShape
from pdserve.kvd.client import Memory
from pdserve.kvd.types import Layout, MemoryKind


class RankMemory(Protocol):
    """Asked in this order; owned by the connector of one worker."""

    @property
    def size(self) -> int:
        """Bytes of the region; 0 before `shapes`."""
        ...

    def allocating(self) -> AbstractContextManager[Any] | None:
        """The context in which vLLM allocates its KV cache; None: vLLM's own."""
        ...

    def shapes(self, tensors: Mapping[str, Any]) -> dict[str, TensorShape]:
        """The layers' tensors, with their offsets in the region.

        Raises:
            ConfigError: tensors that kvd cannot be given.
        """
        ...

    def give(self, layout: Layout) -> Memory:
        """As kvd takes it; what it names stays this object's.

        Raises:
            ConfigError: memory that kvd cannot open.
        """
        ...

    def marking(self, notices: NoticeSink) -> NoticeSink:
        """Where the notices of layers go, so that kvd reads none before it is in memory; after `give`."""
        ...

    def close(self) -> None:
        """Lets go of what was made for kvd; the KV stays vLLM's. Safe twice."""
        ...


def memory_of(kind: MemoryKind) -> RankMemory:
    """That of a rank whose KV lies in this kind of memory."""
    if kind is MemoryKind.HOST:
        from pdserve.engine.vllm.memory import KvMemory

        return KvMemory()
    from pdserve.engine.vllm.device_memory import DeviceKvMemory

    return DeviceKvMemory(kind)

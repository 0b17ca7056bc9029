"""The KV memory of one rank: a sealed memfd that vLLM computes in and kvd maps.

vLLM allocates the KV of all layers by one `torch.zeros` inside the context that its connector
gives; `KvMemory.allocating` answers that call with a tensor over the memfd, so nothing is copied
and kvd sees each byte as it is written.
"""

import fcntl
import math
import mmap
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pdserve.engine.handoff.worker import NoticeSink
from pdserve.engine.vllm.layout import TensorShape
from pdserve.kvd.client import Memory
from pdserve.kvd.types import Layout
from pdserve.rpc.errors import ConfigError

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class KvMemory:
    """The memfd and its mapping; owned by the connector of one worker. See rank_memory.RankMemory.

    `fd` and `size` are -1 and 0 until vLLM has allocated. The mapping lives as long as vLLM's
    tensors do; `close` gives the descriptor back only.
    """

    def __init__(self) -> None:
        self.fd = -1
        self.size = 0
        self._base = 0

    def allocating(self) -> AbstractContextManager[Any]:
        """The context in which vLLM allocates its KV cache."""
        return _FirstZeros(self)

    def take(self, size: int) -> torch.Tensor:
        """Zeroed int8 memory of `size` bytes in a fresh memfd.

        Raises:
            ConfigError: asked twice: vLLM has more than one KV allocation.
        """
        if self.fd >= 0:
            raise ConfigError("vLLM allocates its KV cache in more than one piece; kvd takes one region a rank")
        self.fd = os.memfd_create("pdserve-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)  # kvd need not fear SIGBUS
        tensor = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.int8)  # keeps the mapping alive
        self.size, self._base = size, tensor.data_ptr()
        return tensor

    def shapes(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorShape]:
        """The layers' tensors, with their offsets in this memory.

        Raises:
            ConfigError: a tensor that does not lie wholly in it.
        """
        shapes: dict[str, TensorShape] = {}
        for name, tensor in tensors.items():
            offset = tensor.data_ptr() - self._base
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            end = offset + (last + 1) * tensor.element_size()
            if self.fd < 0 or tensor.device.type != "cpu" or offset < 0 or end > self.size:
                raise ConfigError(f"the KV cache of {name} on {tensor.device} is not in the memory that kvd maps")
            shapes[name] = TensorShape(tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size(), offset)
        return shapes

    def give(self, layout: Layout) -> Memory:
        """As kvd takes it; the descriptor stays this object's."""
        return Memory(self.fd, self.size, layout)

    def marking(self, notices: NoticeSink) -> NoticeSink:
        """A layer is in host memory when its notice is sent: nothing to add."""
        return notices

    def close(self) -> None:
        """Gives the descriptor back; safe twice."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class _FirstZeros(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """Answers vLLM's one `torch.zeros(bytes, dtype=int8)`; every other call goes through."""

    def __init__(self, memory: KvMemory) -> None:
        super().__init__()
        self._memory = memory

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        device = torch.device(kwargs.get("device") or "cpu")
        if function is torch.zeros and kwargs.get("dtype") is torch.int8 and device.type == "cpu":
            shape = args[0] if args else kwargs["size"]
            return self._memory.take(shape if isinstance(shape, int) else math.prod(shape))
        return function(*args, **kwargs)

"""NIXL's bindings behind types: one agent, its memory, its reads. The only importer of nixl.

Runs in a process of its own (nixl_worker), because UCX below it ends its process where it finds no way on.
The bindings are used instead of `nixl_agent` of the package's `_api`, which sets the progress thread's
`pthrDelay` to 0: that thread then never sleeps. The package `nixl` itself imports torch to choose between
the builds for CUDA 12 and 13, which differ in device memory alone, so the builds are asked for by name.

What its words mean, found by trying (1.5.1, UCX 1.23; docs/decisions/0013-nixl.md):
- a request that reports an error, or is released before it is done, may still be written by UCX;
- only the end of the agent's process ends that for certain.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pdserve.kvd.plan import Offsets
from pdserve.rpc.errors import TransferFailed

try:
    import nixl_cu12._bindings as _nixl
except ImportError:
    try:
        import nixl_cu13._bindings as _nixl
    except ImportError:
        import nixl_rocm._bindings as _nixl

_BACKEND: Final = "UCX"
_ERRORS: Final = tuple(
    error for name, error in vars(_nixl).items() if name.startswith("nixl") and name.endswith("Error")
)


class Agent:
    """One agent with UCX. Not for several threads."""

    def __init__(self, name: str, poll: float | None) -> None:
        """`poll`: it has a thread that serves other agents' reads, which looks at least every so many seconds;
        None: it has none, and moves only while a read is asked about.

        Raises:
            TransferFailed: UCX cannot be set up.
        """
        config = _nixl.nixlAgentConfig()
        config.useProgThread = poll is not None
        config.useListenThread = False
        config.syncMode = _nixl.NIXL_THREAD_SYNC_NONE if poll is None else _nixl.NIXL_THREAD_SYNC_RW
        config.pthrDelay = 0 if poll is None else max(1000, int(poll * 1e6))  # microseconds; below 1 ms it spins
        config.captureTelemetry = False
        try:
            self._agent = _nixl.nixlAgent(name, config)
            self._backends = [self._agent.createBackend(_BACKEND, {})]
        except _ERRORS as error:
            raise TransferFailed(f"nixl has no {_BACKEND} backend: {error}") from error

    def register(self, address: int, size: int) -> Any:
        """Registers host memory; what `deregister` and `metadata` take.

        Raises:
            TransferFailed: it cannot be registered.
        """
        listed = _nixl.nixlRegDList(_nixl.DRAM_SEG, [(address, size, 0, "")])
        try:
            self._agent.registerMem(listed, self._backends)
        except _ERRORS as error:
            raise TransferFailed(f"nixl cannot register {size} bytes: {error}") from error
        return listed

    def deregister(self, registered: Any) -> None:
        """Takes a registration back.

        Raises:
            TransferFailed: nixl does not know it.
        """
        try:
            self._agent.deregisterMem(registered, self._backends)
        except _ERRORS as error:
            raise TransferFailed(f"nixl cannot deregister: {error}") from error

    def metadata(self, registered: Any) -> bytes:
        """What another agent must load to read this memory.

        Raises:
            TransferFailed: nixl does not know it.
        """
        try:
            made: bytes = self._agent.getLocalPartialMD(registered, True, self._backends)
        except _ERRORS as error:
            raise TransferFailed(f"nixl has no metadata: {error}") from error
        return made

    def load(self, metadata: bytes) -> str:
        """Makes another agent's memory known; that agent's name.

        Raises:
            TransferFailed: it is no metadata, or there is no way to that agent.
        """
        try:
            name: bytes = self._agent.loadRemoteMD(metadata)
        except _ERRORS as error:
            raise TransferFailed(f"nixl cannot reach the other side: {error}") from error
        return name.decode()

    def read(self, peer: str, src: Offsets, dst: Offsets, length: Offsets) -> "Read":
        """Begins to read `length[i]` bytes from address `src[i]` of the peer to address `dst[i]` of this process.

        Raises:
            TransferFailed: it was not begun.
        """
        nbytes = int(length.sum())  # before the bytes push what counts them out of the processor's caches
        try:
            handle = self._agent.createXferReq(
                _nixl.NIXL_READ, _described(dst, length), _described(src, length), peer, "", self._backends
            )
            return Read(self._agent, handle, nbytes, self._agent.postXferReq(handle))
        except _ERRORS as error:
            raise TransferFailed(f"nixl cannot read: {error}") from error


class Read:
    """One read that was begun."""

    __slots__ = ("_agent", "_handle", "_state", "at_once", "nbytes")

    def __init__(self, agent: Any, handle: int, nbytes: int, state: Any) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state
        self.at_once = state != _nixl.NIXL_IN_PROG
        """Whether it was over when it was begun: UCX's cma lane copies then and there."""
        self.nbytes = nbytes

    def done(self) -> bool:
        """Whether every byte is in place; once it is, nothing is held any more. It is this that moves the bytes.

        Raises:
            TransferFailed: the read failed. Its memory may still be written.
        """
        try:
            if self._state == _nixl.NIXL_IN_PROG:
                self._state = self._agent.getXferStatus(self._handle)
            if self._state == _nixl.NIXL_IN_PROG:
                return False
            self._agent.releaseXferReq(self._handle)
        except _ERRORS as error:
            raise TransferFailed(f"nixl: {error}") from error
        return True


def _described(at: Offsets, length: Offsets) -> Any:
    rows: NDArray[np.uint64] = np.zeros((len(length), 3), np.uint64)  # address, bytes, device
    rows[:, 0] = at
    rows[:, 1] = length
    return _nixl.nixlXferDList(_nixl.DRAM_SEG, rows)

"""Makes the transports that a configuration names."""

from collections.abc import Callable, Sequence

from pdserve.kvd.config import KvdConfig, TransportName
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.device.gpu import GpuDevices
from pdserve.kvd.transport.gpu_ipc import GpuIpcTransport
from pdserve.kvd.transport.mori import MoriTransport
from pdserve.kvd.transport.nixl import NixlTransport
from pdserve.kvd.transport.port import Transport
from pdserve.kvd.transport.shm import ShmTransport
from pdserve.kvd.transport.sim import SimTransport

MakeTransports = Callable[[KvdConfig, Arena], Sequence[Transport]]


def make_transports(config: KvdConfig, arena: Arena) -> Sequence[Transport]:
    """In order of preference; at least one.

    Raises:
        ConfigError: what it needs is not installed.
    """
    if config.transport is TransportName.SIM:
        return (SimTransport(arena, config.sim.bandwidth, config.sim.delay),)
    if config.transport is TransportName.NIXL:
        return (ShmTransport(arena), NixlTransport(arena, config.nixl))
    if config.transport is TransportName.MORI:
        return (ShmTransport(arena), MoriTransport(arena, config.mori))
    if config.transport is TransportName.GPU_IPC:
        return (ShmTransport(arena), GpuIpcTransport(GpuDevices(config.gpu_copy)))
    return (ShmTransport(arena),)

"""Test doubles that ship with kvd.

    async with running_kvd(lease=0.3) as kvd:          # a daemon inside the test's process
        async with FakeEngine(kvd) as engine: ...      # an engine's memory and streams, by hand

There everything but the engine is real: gRPC, SCM_RIGHTS, ZMQ and the copies. `kvd_process` starts
the daemon as a process of its own. `running_node` is a daemon with peers, behind a `Wire` that a
test can cut. `CoreDriver` moves the core alone, with time and copies by hand.
`FaultPlan` and `Fault` script a simulated link.
"""

from pdserve.kvd.testing.core import CoreDriver
from pdserve.kvd.testing.daemon import SHORT, RunningKvd, running_kvd
from pdserve.kvd.testing.engine import FakeEngine, FakeMemory, KvdAddress, plain_layout
from pdserve.kvd.testing.nodes import RunningNode, running_node
from pdserve.kvd.testing.process import KvdProcess, kvd_process
from pdserve.kvd.testing.wire import Wire
from pdserve.kvd.transport.sim import Fault, FaultPlan

__all__ = [
    "SHORT",
    "CoreDriver",
    "FakeEngine",
    "FakeMemory",
    "Fault",
    "FaultPlan",
    "KvdAddress",
    "KvdProcess",
    "RunningKvd",
    "RunningNode",
    "Wire",
    "kvd_process",
    "plain_layout",
    "running_kvd",
    "running_node",
]

"""What copies stands still for a moment, so that a copy and its cancelling arrive together.

The process that says both may be held up between the two, for longer than a copy takes.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterable, Iterator

from pdserve.kvd.transport.child import Child
from pdserve.kvd.transport.far import FarTransport
from pdserve.kvd.transport.port import Transport
from pdserve.kvd.transport.shm import ShmTransport


@contextlib.contextmanager
def standing(processes: Iterable[Child]) -> Iterator[None]:
    """None of them does a thing meanwhile."""
    pids = [process.pid for process in processes]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def standing_still(transport: Transport) -> Iterator[None]:
    """No copy begins meanwhile; the simulated link's would not before its delay."""
    if isinstance(transport, FarTransport):
        with standing(transport.processes()):
            yield
        return
    go_on = threading.Event()
    if isinstance(transport, ShmTransport):
        transport._thread.submit(go_on.wait, 10)
    try:
        yield
    finally:
        go_on.set()

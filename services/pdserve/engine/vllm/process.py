"""Ties an engine's processes to the service that started them."""

import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def belong_to_parent() -> None:
    """Called in each of an engine's processes: it ends when its parent does, and only then.

    A core whose service was killed would go on, unreachable, with its memory and its KV leased. A
    terminal's Ctrl-C is the service's to hear: it drains first.

    Raises:
        OSError: the kernel refuses.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), signal.SIGKILL)

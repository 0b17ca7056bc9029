"""What mori's processes are forked from: all but the library, imported. See tests.forked.zygote.

Not the fake itself: it asks its environment what it does when it is loaded.
"""

import os
import runpy
import sys
from collections.abc import Sequence

import numpy as np  # noqa: F401  # its import is what costs most

import pdserve.kvd.client.mori_host
import pdserve.kvd.testing.mori_devices
import pdserve.kvd.testing.mori_nic
import pdserve.kvd.transport.mori_worker  # noqa: F401
import tests.contract.kvd.mori_raw  # noqa: F401
from tests.forked.zygote import become


def run(args: Sequence[str], fds: Sequence[int]) -> int:
    """A module, run as `python -m` would; see transport.start.Command."""
    module, *rest = args
    become([module, *rest, str(os.getppid()), *map(str, fds)])
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0

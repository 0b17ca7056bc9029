"""A kvd for negative controls: it says LANDED as always, and has copied nothing. Takes kvd's own arguments."""

import sys

import numpy as np

from pdserve.kvd.__main__ import main
from pdserve.kvd.plan import Runs
from pdserve.kvd.transport.device.gpu import GpuDevice, GpuLaunch
from pdserve.kvd.transport.device.parts import ALIGNMENT, Place

_launch = GpuDevice.launch


def _onto_itself(self: GpuDevice, runs: Runs, src: Place, dst: Place) -> GpuLaunch:
    """A launch as short as one can be, which changes no byte."""
    start = np.zeros(1, np.uint64)
    return _launch(self, Runs(start, start, start + np.uint64(ALIGNMENT)), src, src)


if __name__ == "__main__":
    GpuDevice.launch = _onto_itself  # type: ignore[method-assign]
    sys.exit(main())

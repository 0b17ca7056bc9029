"""The fake mori, for `MoriTransport(arena, config, FAKE, to_env(...))`: real processes, real bytes, no RDMA device.

What it does is in `mori_switches`: each row there is something that mori 1.2.4 was seen, or read, to do.
"""

from typing import Final

from pdserve.kvd.testing.mori_switches import Machine, Row, to_env
from pdserve.kvd.transport.mori_process import Library

__all__ = ["FAKE", "Machine", "Row", "to_env"]

FAKE: Final = Library("pdserve.kvd.testing.mori_io", "pdserve.kvd.testing.mori_devices")

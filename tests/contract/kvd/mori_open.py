"""The fake mori with a second socket, at every address: what a library that is not as it was thought to be might do."""

import socket
from typing import Any

from pdserve.kvd.testing import mori_io
from pdserve.kvd.testing.mori_io import *  # noqa: F403
from pdserve.kvd.testing.mori_io import BackendType


class Open(mori_io.IOEngine):
    """See the module."""

    def create_backend(self, type: BackendType, config: Any = None) -> None:
        """Listens at the address that it was told, and at every other one."""
        super().create_backend(type, config)
        self._beside = socket.create_server(("0.0.0.0", 0))


IOEngine = Open  # type: ignore[misc]  # instead of the one that was imported

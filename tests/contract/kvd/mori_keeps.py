"""The fake mori whose backend cannot be taken down: what a library that is not as it was thought to be might do."""

from pdserve.kvd.testing import mori_io
from pdserve.kvd.testing.mori_io import *  # noqa: F403
from pdserve.kvd.testing.mori_io import BackendType


class Keeps(mori_io.IOEngine):
    """See the module."""

    def remove_backend(self, type: BackendType) -> None:
        """Refuses."""
        raise RuntimeError("a queue pair is busy")


IOEngine = Keeps  # type: ignore[misc]  # instead of the one that was imported

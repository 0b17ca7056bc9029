"""Settings that vLLM refuses only in its core, which looks at the model, its kernels and the memory.

vLLM says of a failed start that it failed, and its log why. On CPU the core is forked from the service and takes this
wrapper along; where it is spawned it does not, and the log has to do.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pdserve.engine.vllm.startup import StartReport
from pdserve.rpc.errors import ConfigError


@contextmanager
def heard(report: StartReport) -> Iterator[None]:
    """A core that is started inside the block reports what it refuses before it ends."""
    from vllm.v1.engine.core import EngineCoreProc

    original = EngineCoreProc.__init__

    def told(self: Any, *args: Any, **named: Any) -> None:
        try:
            original(self, *args, **named)
        except ValueError as error:  # as vLLM says it of settings, and of no failure
            with report.errors("core"):
                raise ConfigError(f"vLLM refuses the configuration: {error}") from error

    EngineCoreProc.__init__ = told
    try:
        yield
    finally:
        EngineCoreProc.__init__ = original

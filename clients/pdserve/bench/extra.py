"""What is said where a command needs a part of pdserve that is not installed."""

import contextlib
from collections.abc import Iterator

from pdserve.rpc.errors import ConfigError


@contextlib.contextmanager
def needs(extra: str, command: str) -> Iterator[None]:
    """Imports within it may lack a library of this extra.

    Raises:
        ConfigError: one does; it says what to install for `command`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pdserve"):
            raise
        said = f"`pdserve {command}` needs {error.name}: install pdserve with the extra `{extra}`"
        raise ConfigError(said) from error

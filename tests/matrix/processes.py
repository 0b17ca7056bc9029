"""The fleet's processes, forked from program.py."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.forked.forks import Forked, Zygote

KIND = "tests.matrix.program"


def spawn(
    zygote: Zygote, program: str, argv: Sequence[str], environ: Mapping[str, str], log: Path, planted: str = ""
) -> Forked:
    """A new process. `program`: one of program.PROGRAMS; `environ`: beside this process's own; `log`: is appended to by
    every process of this name; `planted`: a bug out of planted.py that is put in before the program starts.

    Raises:
        OSError: the zygote has died, or does not answer.
    """
    words = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        return zygote.fork([planted, program, *argv], {**os.environ, **environ}, words)
    finally:
        os.close(words)

"""The file of a cluster's key: read, where nobody else can.

Whoever reads the key can sign as the cluster. So a file of ours that others may open is refused, with what mends it.
One that we cannot mend (another user's, or on a file system that is mounted read-only, as orchestrators give secrets:
often root's, mode 0444) is used all the same, since that is how these secrets come; `exposed` says so.
"""

import os
import shlex
import stat
from pathlib import Path

from pdserve.rpc.errors import ConfigError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def read_key_file(path: Path) -> bytes:
    """What is in it.

    Raises:
        ConfigError: it cannot be read, or others than its owner have rights to it and we could take them away.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            ours = status.st_uid == os.geteuid() and not os.fstatvfs(file.fileno()).f_flag & os.ST_RDONLY
            if ours and status.st_mode & _OTHERS:
                raise ConfigError(f"{_said(path, status)}: chmod 600 {shlex.quote(str(path))}")
            return file.read()
    except OSError as error:
        raise ConfigError(f"cluster key file {path}: {error.strerror}") from error


def exposed(path: Path) -> str:
    """What is to be said of a file that was read all the same; empty where only its owner may open it.

    Raises:
        ConfigError: it is not there.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"cluster key file {path}: {error.strerror}") from error
    return f"{_said(path, status)}, and we cannot change that" if status.st_mode & _OTHERS else ""


def _said(path: Path, status: os.stat_result) -> str:
    mode = stat.S_IMODE(status.st_mode)
    return f"cluster key file {path} has mode {mode:04o}: others than its owner may open it"

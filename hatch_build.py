"""Compiles kvd's copy loop when the package is built; hatchling calls it, for wheels and editable installs."""

import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = "kvd/pdserve/kvd/transport"
_SOURCE = f"{_FOLDER}/copy.c"
_LIBRARY = f"{_FOLDER}/libcopy.so"
_FLAGS = ("-std=c11", "-O2", "-fPIC", "-shared")
_COMPILE_S = 120.0
"""Longest wait for the compiler."""


def compiler() -> list[str]:
    """The command of a C compiler that is here, or nothing."""
    for command in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc"):
        words = shlex.split(command or "")
        if words and shutil.which(words[0]):
            return words
    return []


def compile_library(root: Path) -> str:
    """Puts the library beside its source; why it could not, or nothing."""
    source, library = root / _SOURCE, root / _LIBRARY
    library.unlink(missing_ok=True)  # an old one must not get into the wheel
    command = compiler()
    if not command:
        return "there is no C compiler (CC, or cc)"
    made = library.with_name(f".{library.name}.{os.getpid()}")  # a daemon may have the other one mapped
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    arguments = [*command, *_FLAGS, f'-DPDSERVE_COPY_SOURCE="{digest}"', "-o", str(made), str(source)]
    try:
        subprocess.run(arguments, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
        made.replace(library)
    except subprocess.CalledProcessError as error:
        return f"{command[0]} failed: {error.stderr.strip() or error}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} failed: {error}"
    finally:
        made.unlink(missing_ok=True)
    return ""


class CopyLoop(BuildHookInterface):  # type: ignore[misc]  # hatchling is there only while building
    """See the module. Without a compiler the wheel stays pure Python, and kvd copies more slowly."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a build."""
        failed = compile_library(Path(self.root))
        if failed:
            self.app.display_warning(
                f"pdserve: kvd's copy loop was not compiled: {failed}. kvd will copy from Python, at little more "
                "than half the speed and holding the interpreter lock; install again where there is a C compiler."
            )
            return
        if version == "editable":  # its wheel holds paths, not files
            return
        build_data["artifacts"].append(_LIBRARY)  # it is git-ignored, and would be left out
        build_data["pure_python"] = False
        # Plain C behind ctypes: bound to the platform, to no version of Python.
        build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")

    def clean(self, versions: list[str]) -> None:
        """Called by `hatch clean`."""
        (Path(self.root) / _LIBRARY).unlink(missing_ok=True)

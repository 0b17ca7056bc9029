"""How the process that a library lives in comes to be: a new interpreter, or what a test has instead."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


class Process(Protocol):
    """One that was started."""

    @property
    def pid(self) -> int:
        """Its id, which is no other process's until `wait` has returned."""
        ...

    async def wait(self) -> int:
        """Its status, once it is gone; negative: the signal that ended it."""
        ...


@dataclass(frozen=True, slots=True)
class Command:
    """A module to run, and what its process has."""

    module: str
    args: tuple[str, ...]
    """After them it is given its parent's id, and the numbers of `fds`."""
    fds: tuple[int, ...]
    words: int
    """File that it writes to as its stdout and stderr."""
    env: Mapping[str, str]


Start = Callable[[Command], Awaitable[Process]]


async def interpreter(command: Command) -> Process:
    """A child of this process. Cancelled, it leaves none."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", command.module, *command.args, str(os.getpid()), *map(str, command.fds)),
        pass_fds=command.fds,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=command.words,
        stderr=command.words,
        env=command.env,
    )

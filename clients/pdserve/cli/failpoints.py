"""Failpoints of a deployment: the variable names the process that each entry is for. Pure.

    PDSERVE_FAILPOINTS="kvd:kvd.post=1*error(TRANSFER_FAILED);decode-0:sim.step=2*delay(100)" pdserve up

A service that is started by itself takes entries without a name. Under `pdserve up` all processes inherit the variable,
and each would count the terms for itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pdserve.cli.plan import Process
from pdserve.rpc.errors import ConfigError

TERMS_VARIABLE = "PDSERVE_FAILPOINTS"
SOCKET_VARIABLE = "PDSERVE_FAILPOINTS_SOCKET"


def addressed(processes: Sequence[Process], environ: Mapping[str, str]) -> tuple[Process, ...]:
    """The processes, each with the entries that name it and with no other.

    Raises:
        ConfigError: an entry that names no process of theirs, or a socket, which only one process could have.
    """
    if environ.get(SOCKET_VARIABLE):
        raise ConfigError(f"{SOCKET_VARIABLE} is one process's, and a deployment has {len(processes)}: unset it")
    if TERMS_VARIABLE not in environ:
        return tuple(processes)
    names = [process.name for process in processes if process.kind != "traces"]  # which has no points
    terms: dict[str, list[str]] = {name: [] for name in names}
    for entry in filter(None, (part.strip() for part in environ[TERMS_VARIABLE].split(";"))):
        name, colon, rest = entry.partition(":")
        if not colon or name.strip() not in terms:
            raise ConfigError(
                f"{TERMS_VARIABLE}: {entry!r} names no process of the deployment: it is NAME:POINT=TERMS, and NAME is "
                f"one of {', '.join(names)}"
            )
        terms[name.strip()].append(rest.strip())
    return tuple(
        replace(process, env={**process.env, TERMS_VARIABLE: ";".join(terms.get(process.name, ()))})
        for process in processes
    )

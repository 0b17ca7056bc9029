"""Starts the fleet's processes by fork, with everything imported: a start costs milliseconds, not a second.

Run as `python -m tests.matrix.zygote`. One JSON line in, one out:

    {"program": "kvd", "argv": [...], "environ": {...}, "log": "path", "planted": "" }  ->  {"pid": 123}

It has no thread and no gRPC channel, so that a fork is whole. Its children die with it, and it ends
when its input ends.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final

PROGRAMS: Final = {
    "kvd": "pdserve.kvd.__main__",
    "proxy": "pdserve.proxy.__main__",
    "prefill": "pdserve.prefill.__main__",
    "decode": "pdserve.decode.__main__",
}
_ALSO: Final = ("pdserve.engine.sim", "pdserve.kvd.transport.sim", "tests.matrix.planted")
_PR_SET_PDEATHSIG: Final = 1


def main() -> int:
    """Forks until its input ends."""
    mains: dict[str, Callable[[], int]] = {name: importlib.import_module(path).main for name, path in PROGRAMS.items()}
    for path in _ALSO:
        importlib.import_module(path)
    gc.collect()
    gc.freeze()  # what is shared stays shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are reaped by themselves; their ends are seen by pidfd
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while line := sys.stdin.buffer.readline():
        order = json.loads(line)
        pid = os.fork()
        if not pid:
            os._exit(_run(order, mains[order["program"]]))
        sys.stdout.write(json.dumps({"pid": pid}) + "\n")
        sys.stdout.flush()
    return 0


def _run(order: dict[str, Any], program: Callable[[], int]) -> int:
    """The child: a process as its command line would have made it; its exit status."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(order["environ"])
    sys.argv = [f"pdserve-{order['program']}", *order["argv"]]
    status = 1
    try:
        if order["planted"]:
            importlib.import_module("tests.matrix.planted").PLANTED[order["planted"]].plant()
        status = program()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except BaseException:  # noqa: BLE001  # nobody else would say it
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())

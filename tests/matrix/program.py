"""What the fleet's processes are forked from: all of its programs, imported. See tests.forked.zygote."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import pdserve.decode.__main__
import pdserve.engine.sim
import pdserve.kvd.__main__
import pdserve.kvd.transport.sim
import pdserve.prefill.__main__
import pdserve.proxy.__main__
from tests.forked.zygote import become
from tests.matrix.planted import PLANTED

PROGRAMS: Final[Mapping[str, Callable[[], int]]] = {
    "kvd": pdserve.kvd.__main__.main,
    "proxy": pdserve.proxy.__main__.main,
    "prefill": pdserve.prefill.__main__.main,
    "decode": pdserve.decode.__main__.main,
}


def run(args: Sequence[str], _: Sequence[int]) -> int:
    """A process as its command line would have made it: a planted bug, or none, the program's name, and its
    arguments."""
    planted, name, *argv = args
    become([f"pdserve-{name}", *argv])
    if planted:
        PLANTED[planted].plant()
    return PROGRAMS[name]()

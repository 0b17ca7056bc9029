"""Children that say what they are, wait, or fail."""

import signal
import sys
from collections.abc import Sequence

from tests.forked.zygote import become


def run(args: Sequence[str], fds: Sequence[int]) -> int:
    """The first argument says which."""
    become(["a-child", *args])
    match args[0]:
        case "say":
            print(*args[1:], len(fds), flush=True)
            return 3
        case "wait":
            print("waits", flush=True)
            signal.pause()
        case "leave":
            sys.exit()
    raise ValueError(f"no such child: {args[0]}")

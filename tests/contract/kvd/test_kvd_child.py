"""The start of a process that a library lives in, given up: nothing of it stays."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from pdserve.kvd.transport.child import Child, Launch

LAUNCH = Launch("nixl", "pdserve.kvd.transport.nixl_worker", "starts", ("-",), os.environ, stall=1.0)


def held() -> tuple[list[str], list[str]]:
    """This process's descriptors, and its children."""
    fds = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sorted(fd for fd in fds if not fd.startswith("/proc")), [
        child for path in Path("/proc/self/task").glob("*/children") for child in path.read_text().split()
    ]


@pytest.mark.parametrize("step", ["open_connection", "create_subprocess_exec"])
async def test_a_start_that_is_given_up_leaves_no_process_and_no_descriptor(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while its socket is connected, and while the process is made."""
    reached, real = asyncio.Event(), getattr(asyncio, step)

    async def held_up(*args: Any, **kwargs: Any) -> Any:
        reached.set()
        await asyncio.Event().wait()
        return await real(*args, **kwargs)

    monkeypatch.setattr(asyncio, step, held_up)
    before = held()
    starting = asyncio.create_task(Child.launch(LAUNCH))
    await asyncio.wait_for(reached.wait(), 10)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await asyncio.sleep(0)  # a transport closes its socket with the loop's next turn
    assert held() == before


def test_a_loop_that_ends_before_a_process_is_known_to_be_gone_leaves_no_descriptor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What waits for that is cancelled with all else: the sockets to the process are closed all the same."""
    over = Child._over

    async def never(self: Child) -> int:
        await over(self)
        reached.set()
        await asyncio.Event().wait()
        return 0

    async def ends_early() -> None:
        child = await Child.launch(LAUNCH)
        child.end("it is not wanted")
        await asyncio.wait_for(reached.wait(), 10)

    monkeypatch.setattr(Child, "_over", never)
    reached, before = asyncio.Event(), held()
    asyncio.run(ends_early())
    assert held() == before

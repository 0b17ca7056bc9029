"""A MORI engine in the process of the rank whose memory it reads into or serves, as kvd sees it: placement 2.

It is asked and given copies like a process of kvd's (`MoriProcess`). What differs is its end:

    end ──▶ kvd says no more ──▶ the rank takes the backend down ──▶ its last word ──▶ calls and copies fail
                └─ not within 30 s ──▶ the rank's process is killed, and is dead ──▶ the same

Sockets that are closed without that word prove nothing: a process that ends closes what it has open in an order that
nobody knows, and the NIC's part may come last. Then it is waited for.
"""

import asyncio
import signal
from typing import ClassVar, Final

import structlog

from pdserve.kvd.transport.mori_process import MoriProcess

log = structlog.get_logger(__name__)

LET_GO_S: Final = 30.0
"""What a rank has to take a backend down. mori does this under the interpreter lock, so a rank that does not is one
that cannot go on either."""


class MoriHosted(MoriProcess):
    """See the module. It cannot be stopped while it has nothing to do, since the rank has."""

    sleeps: ClassVar[bool] = False
    let_go: float = LET_GO_S

    _letting_go: asyncio.TimerHandle | None = None
    _ended = False
    _free = False
    """It has let go."""

    async def _ready(self) -> None:
        # The sockets may be in processes that the rank has forked, and are not closed with it then.
        asyncio.get_running_loop().add_reader(self._pidfd, self._writer.transport.abort)
        await super()._ready()

    def _kill(self) -> None:
        if self._ended:
            return
        self._ended = True
        if not self._reader.at_eof():
            self._writer.write_eof()
            self._letting_go = asyncio.get_running_loop().call_later(self.let_go, self._end_rank)

    def _let_go(self) -> None:
        self._free = True

    async def _over(self) -> int:
        if not self._free:
            dead, loop = asyncio.Event(), asyncio.get_running_loop()
            loop.add_reader(self._pidfd, dead.set)  # in place of the other reader
            self._letting_go = self._letting_go or loop.call_later(self.let_go, self._end_rank)
            await dead.wait()  # for as long as it takes: until then nobody knows that its memory is free
        return await super()._over()

    def _end_rank(self) -> None:
        log.error("mori_worker_killed", engine=self.name, process=self.pid, seconds=self.let_go, why=self.failure)
        self._signal(signal.SIGKILL)

    def _left(self, status: int, wrote: str) -> str:
        return f"the engine's process {self.pid} that it was in has ended"

    def _buried(self) -> None:
        super()._buried()
        asyncio.get_running_loop().remove_reader(self._pidfd)
        if self._letting_go is not None:
            self._letting_go.cancel()

"""A MORI engine in the process of the rank whose memory it reads into or serves, as kvd sees it: placement 2.

It is asked and given copies like a process of kvd's (`MoriProcess`), and is as certainly over when its sockets are
closed there: the rank closes them once the library's backend is down (client.mori_host). What differs is its end:

    end ──▶ kvd says no more ──▶ the rank takes the backend down ──▶ sockets closed: calls and copies fail
                └─ not within 30 s ──▶ the rank's process is killed, the engine's epoch ends ──▶ the same
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

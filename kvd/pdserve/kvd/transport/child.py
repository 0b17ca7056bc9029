"""A process that a transport's library lives in, as kvd sees it: started, asked, given copies, and ended.

Whatever is asked of it is over once it is gone: calls and copies fail then, and not before it has been waited for, so
that nothing of them writes any more. It is ended where nothing is heard of it for too long: a library that hangs, or
whose peer is silent, has no other way to be stopped for certain.
"""

import asyncio
import contextlib
import fcntl
import itertools
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

import msgspec
import structlog

from pdserve.kvd.plan import Runs
from pdserve.kvd.transport import child_wire as wire
from pdserve.kvd.transport.port import Moved
from pdserve.kvd.transport.start import Command, Process, Start, interpreter
from pdserve.rpc.errors import TransferFailed

log = structlog.get_logger(__name__)

_CALL_S: Final = 30.0
"""Longest wait for an answer: registering much memory with a NIC takes seconds."""
_OVERDUE_S: Final = 0.02
"""What a word that is overdue still has."""
_RECEIVE_BYTES: Final = 1 << 16
_WORDS_BYTES: Final = 1 << 20
"""What the process may write before the file is emptied."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A region that a process has mapped and registered."""

    metadata: bytes
    address: int


@dataclass(frozen=True, slots=True)
class Launch:
    """How such a process is started."""

    library: str
    """What lives in it, for people."""
    module: str
    """That it runs; it is given its name, `args`, its parent's id, and two sockets."""
    name: str
    args: tuple[str, ...]
    env: Mapping[str, str]
    stall: float
    """Seconds without a word while copies are under way, until it is ended."""
    call: float = _CALL_S
    """Seconds until an answer must have come, that of its start included."""
    start: Start = interpreter


@dataclass(frozen=True, slots=True)
class Beside:
    """What kvd shares with the process beside the socket of their words."""

    files: socket.socket
    words: int
    """File that it writes to instead of kvd's log."""

    def close(self) -> None:
        """Both."""
        self.files.close()
        os.close(self.words)


class Child:
    """See the module. Made by `launch`; each library's own class says what it is asked beyond this."""

    def __init__(
        self,
        launch: Launch,
        process: Process,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        beside: Beside,
    ) -> None:
        self.name = launch.name
        self.pid = process.pid
        self.failure = ""
        """Why it was ended, or ended by itself; empty while it runs."""
        self.retiring = ""
        """Why it takes no new copies, though it may still carry some; empty else."""
        self._launch = launch
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)  # asyncio's `kill` would take the exit status from its own watcher
        self._reader, self._writer = streams
        self._beside = beside
        self._ids = itertools.count(1)
        loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Future[wire.Answer]] = {0: loop.create_future()}
        self._copies: dict[int, asyncio.Future[Moved]] = {}
        self._heard = loop.time()
        self._overdue = 0.0
        """When the last word came, once there should have been another."""
        self._watch: asyncio.TimerHandle | None = None
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def launch(cls, launch: Launch) -> Self:
        """A process that is ready. Cancelled, it leaves nothing.

        Raises:
            TransferFailed: it did not get ready; with what it wrote.
        """
        control, theirs = socket.socketpair()
        files, their_files = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = os.memfd_create(f"{launch.library}-words")
        fcntl.fcntl(words, fcntl.F_SETFL, os.O_APPEND)  # so that it can be emptied under the writer
        beside = Beside(files, words)
        with theirs, their_files:
            try:
                streams = await asyncio.open_connection(sock=control)  # first: what is given up here is no process yet
            except BaseException:
                control.close()
                beside.close()
                raise
            try:
                given = (theirs.fileno(), their_files.fileno())
                process = await launch.start(
                    Command(launch.module, (launch.name, *launch.args), given, words, launch.env)
                )
            except BaseException:  # it is no process, or has been ended
                streams[1].close()
                beside.close()
                raise
        made = cls(launch, process, streams, beside)
        try:
            await made._ready()
        except BaseException:
            made.end("it was not wanted any more")
            await made.gone()
            raise
        return made

    async def map(self, region: str, fd: int, size: int) -> Mapped:
        """Has it map and register a file.

        Raises:
            TransferFailed: it cannot.
        """
        self._before()
        if not self.failure:
            with contextlib.suppress(OSError):  # it is gone: the call will say so
                socket.send_fds(self._beside.files, [b"f"], [fd])
        answer = await self.call(wire.Map(region, size))
        return Mapped(answer.data, answer.address)

    async def unmap(self, region: str) -> None:
        """Takes a region back.

        Raises:
            TransferFailed: the process is gone, or the library would not.
        """
        await self.call(wire.Unmap(region))

    async def call(self, what: msgspec.Struct) -> wire.Answer:
        """Asks and waits for the answer.

        Raises:
            TransferFailed: what was asked failed, or the process is gone.
        """
        self._check()
        self._before()
        call_id = next(self._ids)
        self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._writer.write(wire.framed(wire.Call(call_id, msgspec.Raw(wire.encode(what)))))
        try:
            return await self._answer(call_id)
        finally:
            self._after()

    def copy(self, region: str, peer: str, base: int, runs: Runs) -> tuple[int, asyncio.Future[Moved]]:
        """Begins a copy; its id, and its end.

        Raises:
            TransferFailed: the process is gone, or takes no more.
        """
        self._check()
        if self.retiring:
            raise TransferFailed(f"the {self._launch.library} process {self.name} takes no more: {self.retiring}")
        self._before()
        loop = asyncio.get_running_loop()
        copy_id = next(self._ids)
        future: asyncio.Future[Moved] = loop.create_future()
        columns = (runs.src.tobytes(), runs.dst.tobytes(), runs.length.tobytes())
        self._writer.write(wire.framed(wire.Copy(copy_id, region, peer, base, *columns)))
        if not self._copies:
            self._heard = loop.time()
        self._copies[copy_id] = future
        if self._watch is None:
            self._watch = loop.call_later(self._launch.stall, self._look)
        return copy_id, future

    def cancel(self, copy_id: int) -> None:
        """Asks a copy to end early."""
        if copy_id in self._copies and not self.failure:
            self._writer.write(wire.framed(wire.Cancel(copy_id)))

    def end(self, reason: str) -> None:
        """Kills it; safe twice. Its calls and copies fail once it is gone."""
        self.failure = self.failure or reason
        self._kill()

    def give_up(self, reason: str) -> None:
        """Has it end, since copies that are not wanted do not."""
        self.end(reason)

    async def gone(self) -> None:
        """Waits until it is gone; it was ended before."""
        await asyncio.shield(self._listening)

    @property
    def running(self) -> bool:
        """Whether it can still be asked something."""
        # It is gone before it is known why.
        return not self.failure and not self.retiring and not self._reader.at_eof()

    # -- what a library's own class may change ----------------------------------------------

    async def _ready(self) -> None:
        """Waits until it is ready. Raises TransferFailed."""
        await self._answer(0)

    def _carried(self, nbytes: int) -> str:
        """What carried a copy of so many bytes; empty where that is not told."""
        return ""

    def _plain(self, words: str) -> str:
        """What it wrote, without what is no message to people."""
        return words

    def _left(self, status: int, wrote: str) -> str:
        """Why it is gone, where nobody has said so: its status, and what it wrote."""
        return f"it ended by itself ({status}): {wrote or 'without a word'}"

    def _kill(self) -> None:
        """Ends it at once, also again."""
        self._signal(signal.SIGKILL)

    def _let_go(self) -> None:
        """It has said that it holds nothing any more; only a process that goes on says so."""

    async def _over(self) -> int:
        """Waits, after the end of its words, until nothing of it can write any more; its status."""
        return await self._process.wait()

    def _before(self) -> None:
        """It is about to be given something."""

    def _after(self) -> None:
        """Something that it was given is over."""

    def _buried(self) -> None:
        """It is gone."""

    # ---------------------------------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        return bool(self._calls or self._copies)

    def _write(self, message: wire.ToWorker) -> None:
        if not self.failure:
            self._writer.write(wire.framed(message))

    async def _answer(self, call_id: int) -> wire.Answer:
        try:
            answer = await asyncio.wait_for(self._calls[call_id], self._launch.call)
        except TimeoutError:
            self.end(f"it did not answer within {self._launch.call:g} s")
            raise TransferFailed(self._told()) from None
        finally:
            self._calls.pop(call_id, None)
        if answer.error:
            raise TransferFailed(answer.error)
        return answer

    def _check(self) -> None:
        if self.failure:
            raise TransferFailed(self._told())

    def _told(self) -> str:
        return f"the {self._launch.library} process {self.name} was ended: {self.failure}"

    def _look(self) -> None:
        self._watch = None
        if not self._copies:
            return
        loop = asyncio.get_running_loop()
        left = self._heard + self._launch.stall - loop.time()
        if left > 0:
            self._watch = loop.call_later(left, self._look)
        elif self._overdue != self._heard:
            # Where the loop itself was held up, what has come meanwhile is heard after this.
            self._overdue = self._heard
            self._watch = loop.call_later(_OVERDUE_S, self._look)
        else:
            self.end(f"no byte came for {self._launch.stall:g} s")

    async def _listen(self) -> None:
        frames = wire.Frames()
        try:
            while data := await self._reader.read(_RECEIVE_BYTES):
                self._heard = asyncio.get_running_loop().time()
                for body in frames.feed(data):
                    self._take(wire.decode_from_worker(body))
        except ConnectionError as error:
            self.failure = self.failure or str(error)
        finally:
            burying = asyncio.create_task(self._bury())
            burying.add_done_callback(lambda _: self._close())  # also where the loop ends before it has begun
            await asyncio.shield(burying)

    def _take(self, message: wire.FromWorker) -> None:
        match message:
            case wire.Answer(call_id):
                call = self._calls.get(call_id)
                if call is not None and not call.done():
                    call.set_result(message)
            case wire.Ended(copy_id, nbytes, ns, cancelled):
                self._copies.pop(copy_id).set_result(Moved(nbytes, ns, cancelled, self._carried(nbytes)))
                self._after()
            case wire.Moving():
                pass  # that it came is what counts
            case wire.Retiring(reason):
                self.retiring = self.retiring or reason
            case wire.Broken(error):
                self.failure = self.failure or error
            case wire.LetGo():
                self._let_go()

    async def _bury(self) -> None:
        """After the end of its words: waits for the process, then fails what it left."""
        self._kill()
        status = await self._over()
        if not self.failure:
            wrote = self._plain(self._said())
            self.failure = self._left(status, wrote[-400:])
            log.error(f"{self._launch.library}_process_died", process=self.name, status=status, wrote=wrote[-2000:])
        self._close()
        left: list[asyncio.Future[Any]] = [*self._calls.values(), *self._copies.values()]
        for waiting in left:
            if not waiting.done():
                waiting.set_exception(TransferFailed(self._told()))
                waiting.exception()  # whoever waits hears of it; nobody has to
        self._copies.clear()

    def _close(self) -> None:
        if self._pidfd < 0:
            return
        if self._watch is not None:
            self._watch.cancel()
        self._buried()
        self._writer.close()
        self._beside.close()
        os.close(self._pidfd)
        self._pidfd = -1

    def _signal(self, number: signal.Signals) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _said(self) -> str:
        words = self._beside.words
        size = os.fstat(words).st_size
        said = os.pread(words, _WORDS_BYTES, max(0, size - _WORDS_BYTES)).decode(errors="replace")
        if size > _WORDS_BYTES:
            os.ftruncate(words, 0)
        return said

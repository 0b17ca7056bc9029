"""A nixl process as kvd sees it: started, asked, given copies, and ended.

Whatever is asked of it is over once it is gone: calls and copies fail then, and not before it has been waited for, so
that nothing of them writes any more. It is ended where a peer is silent for too long: a stalled peer cannot be told
from a dead one, and nixl has no other way to end a read for certain.
"""

import asyncio
import contextlib
import fcntl
import itertools
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog

from pdserve.kvd.config import NixlConfig
from pdserve.kvd.plan import Runs
from pdserve.kvd.transport import nixl_wire as wire
from pdserve.kvd.transport.nixl_lanes import plain_words, read_lanes
from pdserve.kvd.transport.port import Moved
from pdserve.rpc.errors import TransferFailed

log = structlog.get_logger(__name__)

_CALL_S: Final = 30.0
"""Longest wait for an answer: registering much memory with a NIC takes seconds."""
_RECEIVE_BYTES: Final = 1 << 16
_WORDS_BYTES: Final = 1 << 20
"""What the process may write before the file is emptied."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A region that a process has mapped and registered."""

    metadata: bytes
    address: int


class NixlProcess:
    """See the module. Made by `start`."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        files: socket.socket,
        words: int,
        stall: float,
    ) -> None:
        self.name = name
        self.pid = process.pid
        self.failure = ""
        """Why it was ended, or ended by itself; empty while it runs."""
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)  # asyncio's `kill` would take the exit status from its own watcher
        self._reader = reader
        self._writer = writer
        self._files = files
        self._words = words
        self._stall = stall
        self._ids = itertools.count(1)
        loop = asyncio.get_running_loop()
        self._calls: dict[int, asyncio.Future[wire.Answer]] = {0: loop.create_future()}
        self._copies: dict[int, asyncio.Future[Moved]] = {}
        self._heard = loop.time()
        self._watch: asyncio.TimerHandle | None = None
        self._lanes = ""
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, name: str, config: NixlConfig, *, serves: bool) -> "NixlProcess":
        """A process that is ready: one that `serves` what others read, or one that reads. Cancelled, it leaves nothing.

        Raises:
            TransferFailed: it did not get ready; with what it wrote.
        """
        control, theirs = socket.socketpair()
        files, their_files = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = os.memfd_create("nixl-words")
        fcntl.fcntl(words, fcntl.F_SETFL, os.O_APPEND)  # so that it can be emptied under the writer
        with theirs, their_files:
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    "pdserve.kvd.transport.nixl_worker",
                    *(name, str(config.poll) if serves else "-", str(os.getpid())),
                    *(str(theirs.fileno()), str(their_files.fileno())),
                    pass_fds=(theirs.fileno(), their_files.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=words,
                    stderr=words,
                    env=environment(config, os.environ),
                )
            except BaseException:
                control.close()
                files.close()
                os.close(words)
                raise
        reader, writer = await asyncio.open_connection(sock=control)
        made = cls(name, process, reader, writer, files, words, config.stall)
        try:
            await made._answer(0)
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
        if not self.failure:
            with contextlib.suppress(OSError):  # it is gone: the call will say so
                socket.send_fds(self._files, [b"f"], [fd])
        answer = await self._call(wire.Map(region, size))
        return Mapped(answer.data, answer.address)

    async def unmap(self, region: str) -> None:
        """Takes a region back.

        Raises:
            TransferFailed: the process is gone, or nixl would not.
        """
        await self._call(wire.Unmap(region))

    async def load(self, metadata: bytes) -> None:
        """Makes another agent's memory known to it.

        Raises:
            TransferFailed: it is no metadata, or there is no way to that agent.
        """
        await self._call(wire.Load(metadata))

    def copy(self, region: str, peer: str, base: int, runs: Runs) -> tuple[int, asyncio.Future[Moved]]:
        """Begins a copy; its id, and its end.

        Raises:
            TransferFailed: the process is gone.
        """
        self._check()
        loop = asyncio.get_running_loop()
        copy_id = next(self._ids)
        future: asyncio.Future[Moved] = loop.create_future()
        columns = (runs.src.tobytes(), runs.dst.tobytes(), runs.length.tobytes())
        self._writer.write(wire.framed(wire.Copy(copy_id, region, peer, base, *columns)))
        if not self._copies:
            self._heard = loop.time()
        self._copies[copy_id] = future
        if self._watch is None:
            self._watch = loop.call_later(self._stall, self._look)
        return copy_id, future

    def cancel(self, copy_id: int) -> None:
        """Asks a copy to end early."""
        if copy_id in self._copies and not self.failure:
            self._writer.write(wire.framed(wire.Cancel(copy_id)))

    def end(self, reason: str) -> None:
        """Kills it; safe twice. Its calls and copies fail once it is gone."""
        self.failure = self.failure or reason
        self._kill()

    async def gone(self) -> None:
        """Waits until it is gone; it was ended before."""
        await asyncio.shield(self._listening)

    @property
    def running(self) -> bool:
        """Whether it can still be asked something."""
        return not self.failure and not self._reader.at_eof()  # it is gone before it is known why

    @property
    def lanes(self) -> str:
        """What reads are carried by; empty before the first."""
        return self._lanes

    async def _call(self, what: wire.Map | wire.Unmap | wire.Load) -> wire.Answer:
        self._check()
        call_id = next(self._ids)
        self._calls[call_id] = asyncio.get_running_loop().create_future()
        self._writer.write(wire.framed(wire.Call(call_id, what)))
        return await self._answer(call_id)

    async def _answer(self, call_id: int) -> wire.Answer:
        try:
            answer = await asyncio.wait_for(self._calls[call_id], _CALL_S)
        except TimeoutError:
            self.end(f"it did not answer within {_CALL_S:g} s")
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
        return f"the nixl process {self.name} was ended: {self.failure}"

    def _look(self) -> None:
        self._watch = None
        if not self._copies:
            return
        loop = asyncio.get_running_loop()
        left = self._heard + self._stall - loop.time()
        if left <= 0:
            self.end(f"no byte came for {self._stall:g} s")
        else:
            self._watch = loop.call_later(left, self._look)

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
            await asyncio.shield(asyncio.create_task(self._bury()))

    def _take(self, message: wire.FromWorker) -> None:
        match message:
            case wire.Answer(call_id):
                call = self._calls.get(call_id)
                if call is not None and not call.done():
                    call.set_result(message)
            case wire.Ended(copy_id, nbytes, ns, cancelled):
                if nbytes and not self._lanes:
                    self._lanes = read_lanes(self._said())
                    log.info("nixl_lanes", process=self.name, lanes=self._lanes)
                self._copies.pop(copy_id).set_result(Moved(nbytes, ns, cancelled, self._lanes))
            case wire.Moving():
                pass  # that it came is what counts
            case wire.Broken(error):
                self.failure = self.failure or error

    async def _bury(self) -> None:
        """After the end of its words: waits for the process, then fails what it left."""
        self._kill()
        status = await self._process.wait()
        if not self.failure:
            wrote = plain_words(self._said())
            self.failure = f"it ended by itself ({status}): {wrote[-400:] or 'without a word'}"
            log.error("nixl_process_died", process=self.name, status=status, wrote=wrote[-2000:])
        if self._watch is not None:
            self._watch.cancel()
        self._writer.close()
        self._files.close()
        os.close(self._words)
        os.close(self._pidfd)
        self._pidfd = -1
        left: list[asyncio.Future[Any]] = [*self._calls.values(), *self._copies.values()]
        for waiting in left:
            if not waiting.done():
                waiting.set_exception(TransferFailed(self._told()))
                waiting.exception()  # whoever waits hears of it; nobody has to
        self._copies.clear()

    def _kill(self) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _said(self) -> str:
        size = os.fstat(self._words).st_size
        words = os.pread(self._words, _WORDS_BYTES, max(0, size - _WORDS_BYTES)).decode(errors="replace")
        if size > _WORDS_BYTES:
            os.ftruncate(self._words, 0)
        return words


def environment(config: NixlConfig, around: Mapping[str, str]) -> dict[str, str]:
    """The process's environment: UCX's settings from the configuration before those around it."""
    made = dict(around)
    made |= {"UCX_LOG_FILE": "stderr", "UCX_PROTO_INFO": "y"}
    if config.tls:
        made["UCX_TLS"] = config.tls
    if config.net_devices:
        made["UCX_NET_DEVICES"] = config.net_devices
    return made

"""The process that draws a proxy's traces and sends them, so that no request waits for either.

    python -m pdserve.proxy.tracing.child     started by the proxy alone (apart.py), with their socket for its stdin

It takes records until the proxy closes the socket or is gone, sends what it has for at most two seconds, and ends. A
signal that ends the whole group does not end it before that.
"""

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Final

import structlog

from pdserve.proxy.tracing.drawing import draw
from pdserve.proxy.tracing.undrawn import Undrawn
from pdserve.proxy.tracing.wire import LARGEST, Report, pack_report, unpack
from pdserve.runtime.clock import Clock
from pdserve.runtime.log import LogFormat, LogLevel, setup
from pdserve.runtime.telemetry import settings
from pdserve.runtime.telemetry.export import ExportSettings, OtlpExport

log = structlog.get_logger(__name__)

NICE: Final = 10
"""Of an urgent one: the proxy and the engines are served ten times as well, and still it gets a tenth of a full
processor, enough to draw some hundred requests a second."""
PAUSE: Final = 0.1
"""Seconds that a record waits in the socket for others, at most: code that has just run takes half as long the next
time. The first after a pause is taken at once."""
MOST: Final = 64
"""Records that are drawn before the loop has its turn again."""


def stand_back(*, urgent: bool) -> None:
    """Whatever else the machine has to do comes first, and at once: what becomes ready takes the processor from
    SCHED_IDLE, where a nice process would finish its turn. `urgent`: with a share of a full machine all the same; the
    proxy starts such a one when there is nothing left over (relief.py). Who has given up its share cannot take it back
    itself, without rights that a service does not have."""
    os.nice(NICE)
    with contextlib.suppress(OSError):  # a container may forbid the call; the rest holds without it
        os.sched_setscheduler(0, os.SCHED_BATCH if urgent else os.SCHED_IDLE, os.sched_param(0))


class Drawer:
    """Draws what comes in, and says what has become of it. On one loop."""

    def __init__(self, sock: socket.socket, endpoint: str, delay: float) -> None:
        """`endpoint`, `delay`: see OtlpExport.

        Raises:
            Exception: one of OpenTelemetry's variables makes no sense; the SDK has no class of its own for that.
        """
        self._sock = sock
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._drawn = 0
        self._undrawn = Undrawn(Clock())
        self._spans = 0
        self._said: Report | None = None
        self._again: asyncio.TimerHandle | None = None
        self._exporter = OtlpExport(endpoint, ExportSettings(delay=delay), self._tell)

    async def run(self) -> None:
        """Until there will be no more records, and what there was has been sent, or was given up."""
        self._tell()
        self._listen()
        await self._over.wait()
        await self._exporter.aclose()
        self._tell()

    def _listen(self) -> None:
        self._loop.add_reader(self._sock, self._read)

    def _read(self) -> None:
        """Draws what is there, and looks again when others have come together."""
        self._loop.remove_reader(self._sock)
        for _ in range(MOST):
            try:
                parcel = self._sock.recv(LARGEST)
            except BlockingIOError:
                self._loop.call_later(PAUSE, self._listen)
                break
            except ConnectionResetError:
                continue  # said once, where the proxy was killed with a report of ours unread: its records come after
            if not parcel:
                self._over.set()
                break
            self._draw(parcel)
            os.sched_yield()  # who has become ready meanwhile need not wait until all are drawn
        else:
            self._loop.call_soon(self._listen)
        self._tell()

    def _draw(self, parcel: bytes) -> None:
        self._drawn += 1
        try:
            got = unpack(parcel)
        except Exception as defect:  # noqa: BLE001 - one that is not understood must not end the others
            self._undrawn.add(defect)
        else:
            self._spans += draw(got.ended, got.offset_ns, self._exporter.send, self._undrawn)

    def _tell(self) -> None:
        """Says the numbers where one has changed; later, where the proxy does not read just now."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        counts = self._exporter.counts
        report = Report(
            self._drawn, self._spans, counts.exported, counts.dropped, counts.failed, undrawn=self._undrawn.count
        )
        if report == self._said:
            return
        if say(self._sock, report):
            self._said = report
        else:
            self._again = self._loop.call_later(PAUSE, self._tell)


def say(sock: socket.socket, report: Report) -> bool:
    """Whether it is said; False where there is no room for it now. To a proxy that is gone anything is."""
    try:
        sock.send(pack_report(report))
    except BlockingIOError:
        return False
    except OSError as gone:
        log.debug("traces_reader_gone", because=gone.strerror)
    return True


async def serve(sock: socket.socket, endpoint: str, delay: float) -> int:
    """Draws until the proxy closes; the exit status."""
    try:
        drawer = Drawer(sock, endpoint, delay)
    except Exception as error:  # noqa: BLE001 - see Drawer
        say(sock, Report(refused=str(error) or repr(error)))
        return 2
    gc.freeze()  # what was imported stays
    await drawer.run()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 when the proxy has closed, 2 for variables that make no sense."""
    # Those who signal the proxy's group mean the proxy: it closes the socket when it has ended its requests.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="pdserve.proxy.tracing.child")
    parser.add_argument("--urgent", action="store_true")
    parser.add_argument("--delay", type=float, required=True)
    parser.add_argument("--log-format", required=True)
    parser.add_argument("--log-level", required=True)
    args = parser.parse_args(argv)
    stand_back(urgent=args.urgent)
    setup("proxy", LogFormat(args.log_format), LogLevel(args.log_level))
    with socket.socket(fileno=0) as sock:
        return asyncio.run(serve(sock, settings.endpoint(os.environ), args.delay))


if __name__ == "__main__":
    sys.exit(main())

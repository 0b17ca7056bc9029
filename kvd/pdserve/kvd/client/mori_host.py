"""MORI in a rank's own process, on kvd's orders: for drivers that register no memory of another process.

    rank = Rank(engine_id, index, memory, hosts=MoriHost(memory.device, device, addresses))

kvd decides whether it uses that, and stays the owner of all else. Each order begins an engine in a thread, which does
what a process of kvd's would do (transport.mori_worker), over the two sockets that came with the order, with this
rank's memory and no other. Where it must end, the library's backend is taken down, which makes certain that nothing is
written any more; kvd waits for the word that says so, and the sockets are closed. Where the library does not let go,
they stay open, kvd keeps the blocks fenced, and ends this process.

What it costs an engine: docs/decisions/0015-mori.md. Nothing of the library is loaded before the first order.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import structlog

from pdserve.kvd.transport import child_wire as wire
from pdserve.kvd.transport.child_worker import Channel
from pdserve.kvd.transport.mori_engine import Engine
from pdserve.kvd.transport.mori_wire import IGNORED
from pdserve.kvd.transport.mori_worker import Nap, Order, serve
from pdserve.kvd.types import DeviceMemory, Piece
from pdserve.rpc.errors import KvdUnavailable, TransferFailed

log = structlog.get_logger(__name__)

_NAP: Final = Nap(spins=0, seconds=0.001)
"""A chunk takes some 4 ms, two are in flight, and each look takes the interpreter lock from the engine."""
_ORDER_BYTES: Final = 1 << 16
_CLOSE_S: Final = 10.0
"""Longest wait for what was ordered before."""

_environment: Final = threading.Lock()


class MoriHost:
    """See the module; client.rank.Hosts."""

    def __init__(
        self,
        memory: DeviceMemory,
        device: int,
        addresses: Sequence[int],
        *,
        use: Callable[[], None] = lambda: None,
        library: str = "mori.io",
    ) -> None:
        """`addresses`: of each piece of `memory`, which must outlive this. `device`: the number by which this process
        knows the device. `use`: makes it the one of the thread that calls this. `library`: another one in tests."""
        self._own = _Own(memory, device, addresses)
        self._use = use
        self._library = library
        self._lock = threading.Lock()
        self._engines: dict[threading.Thread, tuple[socket.socket, socket.socket]] = {}
        """Each with its sockets to kvd."""
        self._orders: tuple[threading.Thread, socket.socket] | None = None
        self._stuck: list[Engine] = []
        """Whose backends are still there: the library may write to what they hold."""
        self._closed = False

    def offer(self) -> socket.socket:
        """The socket at which orders are taken from now on, until kvd closes it; the caller gives it to kvd and closes
        its own. Blocks for what a kvd before has ordered.

        Raises:
            KvdUnavailable: that is not over, or the rank has ended.
        """
        if self._closed:
            raise KvdUnavailable("the rank has ended")
        if not self._end():
            raise KvdUnavailable(f"mori has not let go of this rank's memory within {_CLOSE_S:g} s")
        orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener = threading.Thread(target=self._listen, args=(orders,), name="mori-orders", daemon=True)
        self._orders = (listener, orders)
        listener.start()
        return theirs

    def close(self) -> None:
        """Takes no orders any more, and ends what was ordered: before the memory is freed. Blocks. Safe twice."""
        with self._lock:
            self._closed = True
        if not self._end():
            log.error("mori_still_there", seconds=_CLOSE_S)

    def _end(self) -> bool:
        """Whether nothing that was ordered is left."""
        until = time.monotonic() + _CLOSE_S
        if self._orders is not None:
            listener, orders = self._orders
            with contextlib.suppress(OSError):  # kvd has closed it
                orders.shutdown(socket.SHUT_RDWR)
            listener.join(_CLOSE_S)
        with self._lock:
            engines = dict(self._engines)
        for control, _ in engines.values():
            with contextlib.suppress(OSError):  # it is closed
                control.shutdown(socket.SHUT_RD)  # as if kvd said no more
        for thread in engines:
            thread.join(max(0.0, until - time.monotonic()))
        return not self._stuck and not any(thread.is_alive() for thread in engines)

    def _listen(self, orders: socket.socket) -> None:
        with orders:
            while True:
                try:
                    data, fds, _, _ = socket.recv_fds(orders, _ORDER_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
                except OSError:
                    return
                if not data:
                    return
                self._begin(data, fds)

    def _begin(self, data: bytes, fds: Sequence[int]) -> None:
        sockets = [socket.socket(fileno=fd) for fd in fds]
        try:
            control, files = sockets
            order = wire.decode_engage(data)
        except ValueError as error:
            log.error("mori_order_refused", error=str(error))
            for one in sockets:
                one.close()
            return
        thread = threading.Thread(target=self._run, args=(order, control, files), name="mori", daemon=True)
        with self._lock:
            if self._closed:
                control.close()
                files.close()
                return
            self._engines[thread] = (control, files)
            thread.start()

    def _run(self, order: wire.Engage, control: socket.socket, files: socket.socket) -> None:
        channel = Channel(control, files)
        try:
            failure = self._serve(order, channel)
        except TransferFailed as error:
            # Not closed: others may still write to the memory, until this process ends.
            log.critical("mori_did_not_let_go", error=error.message)
            return
        with contextlib.suppress(OSError):  # kvd is gone
            if failure:
                channel.say(wire.Broken(failure))
            channel.say(wire.LetGo())
        with self._lock:
            del self._engines[threading.current_thread()]
        control.close()
        files.close()

    def _serve(self, order: wire.Engage, kvd: Channel) -> str:
        """One engine's life; why it ended, empty where kvd wanted that.

        Raises:
            TransferFailed: it has not: its backend is still there.
        """
        try:
            if order.version != wire.ENGAGE_VERSION:
                raise TransferFailed(f"kvd orders in version {order.version}, this rank takes {wire.ENGAGE_VERSION}")
            name, _, _, backend, host, stall = order.args
            _prepare(order.settings)
            self._use()
            with _on_one_core(self._own.device):
                engine = Engine(self._library, name, backend, host)
        except (TransferFailed, ValueError) as error:
            return str(error)
        try:
            serve(kvd, engine, self._own, Order(name, backend, host, float(stall)), _NAP)
        except TransferFailed as error:
            return error.message
        except (BrokenPipeError, ConnectionResetError):
            return "kvd is gone"
        except Exception as error:  # a defect: kvd hears of it, and the backend goes all the same
            log.exception("mori_defect")
            return f"{type(error).__name__}: {error}"
        else:
            return ""
        finally:
            try:
                engine.close()
            except TransferFailed:
                self._stuck.append(engine)
                raise


class _Own:
    """This rank's memory, where kvd asks for it by its handles; mori_devices.Opens."""

    def __init__(self, memory: DeviceMemory, device: int, addresses: Sequence[int]) -> None:
        self.device = device
        self._memory = memory
        self._addresses = list(addresses)
        if len(self._addresses) != len(memory.pieces):
            raise ValueError(f"{len(self._addresses)} addresses of {len(memory.pieces)} pieces")

    def open(self, bus_id: str, pieces: Sequence[Piece]) -> tuple[int, list[int]]:
        """See Opens."""
        if (bus_id, tuple(pieces)) != (self._memory.bus_id, self._memory.pieces):
            raise TransferFailed("this rank has not given that memory")
        return self.device, self._addresses

    def close(self, pieces: Sequence[Piece]) -> None:
        """See Opens: it stays the engine's."""

    def make(self, bus_id: str, size: int) -> tuple[int, int]:
        """See Opens."""
        raise TransferFailed("a rank allocates no memory for kvd")


def _prepare(settings: Mapping[str, str]) -> None:
    """This process's environment: mori's variables go before its configuration."""
    with _environment:
        for name in IGNORED:
            if os.environ.pop(name, None) is not None:
                log.warning("mori_variable_ignored", variable=name)
        os.environ.update(settings)


@contextlib.contextmanager
def _on_one_core(number: int) -> Iterator[None]:
    """What is started meanwhile stays on one core, however many engines there are: mori's threads never sleep. Ranks of
    a node differ in their device, and so in the core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[-1 - number % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)

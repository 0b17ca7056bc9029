"""The synchronous attachment, for processes without an asyncio loop (an engine's core and ranks).

One background thread per process runs the loop of all its attachments; callers never wait for it
except in `start`, `wait_fenced` and `close`.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine
from typing import Any, TypeVar

from pdserve.kvd.client.aio import AsyncAttachment, Welcomed
from pdserve.kvd.client.config import AttachConfig
from pdserve.kvd.client.messages import End, Hello, Request, Welcome
from pdserve.rpc.errors import KvdUnavailable

_T = TypeVar("_T")
_MARGIN_S = 1.0
"""How much longer than its own deadline a call waits for the background thread."""


class _LoopThread:
    """A loop in a thread, shared by the process's attachments; ends with the last of them."""

    _shared: "_LoopThread | None" = None
    _lock = threading.Lock()

    def __init__(self) -> None:
        self._users = 0
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="pdserve-kvd-client", daemon=True)
        self._thread.start()

    @classmethod
    def borrow(cls) -> "_LoopThread":
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
            cls._shared._users += 1
            return cls._shared

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
            type(self)._shared = None
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=5.0)

    def call(self, coroutine: Coroutine[Any, Any, _T], timeout: float) -> _T:
        """Runs a coroutine there and waits for its result.

        Raises:
            KvdUnavailable: the thread did not answer in time.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise KvdUnavailable(f"the kvd client did not answer within {timeout:g} s") from None

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()


class Attachment:
    """Safe to use from any thread. The contract is AsyncAttachment's: exactly one end per handle.

    `send` and `drain_ends` are meant for one thread, in whose order things happen.
    """

    def __init__(
        self,
        socket: str,
        hello: Hello,
        *,
        on_welcome: Welcomed | None = None,
        config: AttachConfig | None = None,
    ) -> None:
        """`socket` is the path of kvd's gRPC socket; `on_welcome` runs on the background loop."""
        self._ends: deque[End] = deque()
        self._available = threading.Event()
        self._thread = _LoopThread.borrow()
        self._closed = False
        self._inner = AsyncAttachment(socket, hello, on_welcome=on_welcome, on_end=self._ended, config=config)

    @property
    def welcome(self) -> Welcome | None:
        """The last welcome; None before the first."""
        return self._inner.welcome

    @property
    def attached(self) -> bool:
        """Whether the stream stands now."""
        return self._inner.attached

    @property
    def open_handles(self) -> int:
        """Handles that wait for their end."""
        return self._inner.open_handles

    @property
    def ends_available(self) -> threading.Event:
        """Set when an end has come; `drain_ends` clears it."""
        return self._available

    def start(self, timeout: float) -> Welcome:
        """Attaches.

        Raises:
            KvdUnavailable: no kvd within `timeout` seconds.
            PdserveError: kvd refused the hello; its own class.
        """
        return self._thread.call(self._inner.start(timeout), timeout + _MARGIN_S)

    def send(self, message: Request) -> None:
        """Sends in order; never blocks. After `close` a message is dropped."""
        self._soon(self._inner.send, message)

    def drain_ends(self) -> list[End]:
        """The ends since the last call."""
        if not self._available.is_set():
            return []
        self._available.clear()  # before the look: an end that comes now sets it again
        ends: list[End] = []
        while self._ends:
            ends.append(self._ends.popleft())
        # After whatever was sent before: an offer that crossed its end is still recognised.
        self._soon(self._inner.forget, [end.handle for end in ends])
        return ends

    def wait_fenced(self, handle: str, attempt: int, timeout: float) -> bool:
        """Whether kvd has fenced the attempt, or is gone; False after `timeout` seconds."""
        try:
            return self._thread.call(self._inner.wait_fenced(handle, attempt, timeout), timeout + _MARGIN_S)
        except KvdUnavailable:
            return False

    def close(self) -> None:
        """Ends the stream; handles that are still open end with KVD_UNAVAILABLE. Safe twice."""
        if self._closed:
            return
        self._closed = True
        try:
            self._thread.call(self._inner.aclose(), 5.0)
        finally:
            self._thread.give_back()

    def _soon(self, function: Any, argument: Any) -> None:
        if not self._closed:
            self._thread.loop.call_soon_threadsafe(function, argument)

    def _ended(self, end: End) -> None:
        self._ends.append(end)
        self._available.set()

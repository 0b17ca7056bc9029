"""Sends a rank's per-step notices to kvd without ever making the step wait."""

import threading

import zmq

from pdserve.kvd.notices import Notice, encode
from pdserve.runtime.failpoints import Point, passing_now

_HIGH_WATER = 10_000


class NoticeSender:
    """One ZMQ PUSH socket. What cannot be sent at once is dropped and counted: it costs overlap,
    never a transfer."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]] | None = None, high_water: int = _HIGH_WATER) -> None:
        """`high_water`: notices that may wait for kvd."""
        self._context = context or zmq.Context.instance()
        self._high_water = high_water
        # A ZMQ socket is one thread's at a time: `connect` comes from the client's loop.
        self._lock = threading.Lock()
        self._socket: zmq.Socket[bytes] | None = None
        self._endpoint = ""
        self._closed = False
        self.dropped = 0
        """Notices that were not sent."""

    def connect(self, endpoint: str) -> None:
        """Sends to this endpoint from now on; again for a kvd that was restarted."""
        with self._lock:
            if self._closed or endpoint == self._endpoint:
                return  # ZMQ itself comes back to an endpoint that it knows
            self._close_socket()
            self._socket = self._context.socket(zmq.PUSH)
            self._socket.setsockopt(zmq.SNDHWM, self._high_water)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.connect(endpoint)
            self._endpoint = endpoint

    def send(self, notice: Notice) -> bool:
        """Sends, or drops at once; whether it was sent."""
        arriving = passing_now(Point.CONNECTOR_NOTICE, encode(notice))
        with self._lock:
            if self._socket is not None:
                try:
                    for frame in arriving:
                        self._socket.send(frame, zmq.NOBLOCK)
                    return True
                except zmq.Again:
                    pass  # kvd does not keep up; counted below
            self.dropped += 1
        return False

    def close(self) -> None:
        """Drops what was not sent. Safe twice."""
        with self._lock:
            self._closed = True
            self._close_socket()

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

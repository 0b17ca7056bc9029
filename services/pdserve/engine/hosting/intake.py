"""What a service refuses before its engine is asked: request ids that spoil the log, transfers used twice."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.engine.checks import check_transfer_id
from pdserve.rpc.errors import InvalidRequest, TransferUsed

REMEMBERED = 65_536
"""Ended transfer ids that are still refused; kvd remembers them too."""


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequest where it would spoil a log line."""
    if len(request_id) > 256 or not request_id.isprintable():
        raise InvalidRequest("request_id must be at most 256 printable characters")


class OneShot:
    """Transfer ids that this service has seen: each is good once."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._seen: set[bytes] = set()
        self._ended: deque[bytes] = deque()
        self._remembered = remembered

    @contextmanager
    def claim(self, transfer_id: bytes) -> Iterator[None]:
        """Holds an id for one request.

        Raises:
            InvalidRequest: it is not 16 bytes.
            TransferUsed: another request has it, or had it.
        """
        check_transfer_id(transfer_id)
        if transfer_id in self._seen:
            raise TransferUsed(f"transfer {transfer_id.hex()} has been used", transfer_id=transfer_id.hex())
        self._seen.add(transfer_id)
        try:
            yield
        finally:
            self._ended.append(transfer_id)
            if len(self._ended) > self._remembered:
                self._seen.discard(self._ended.popleft())

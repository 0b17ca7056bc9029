"""How much a stranger may ask of a daemon that listens for peers: few streams, one short word, little time.

A stranger is whoever has opened a stream and has not proved yet that it is of the cluster.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Final, Protocol, TypeVar

from pdserve.rpc.errors import InvalidRequest, Overloaded

FIRST_BYTES: Final = 16 << 10
"""Longest first message; a greeting has some 300 bytes."""


class Message(Protocol):
    """What protobuf's messages have."""

    def ByteSize(self) -> int:
        """As it is on the wire."""
        ...


M = TypeVar("M", bound=Message)


class Door:
    """See the module."""

    def __init__(self, most: int, seconds: float) -> None:
        """`most` strangers at once, each with `seconds` for its first message."""
        self._most = most
        self._seconds = seconds
        self._inside: set[object] = set()

    @property
    def strangers(self) -> int:
        """How many there are."""
        return len(self._inside)

    def enter(self) -> object:
        """A stranger has come; what `leave` takes.

        Raises:
            Overloaded: too many are here.
        """
        if len(self._inside) >= self._most:
            raise Overloaded(f"{len(self._inside)} streams have not proved yet who they are, which are too many")
        who = object()
        self._inside.add(who)
        return who

    def leave(self, who: object) -> None:
        """It has proved who it is, or is gone. Safe twice."""
        self._inside.discard(who)

    async def first(self, messages: AsyncIterator[M]) -> M:
        """A stranger's first message.

        Raises:
            InvalidRequest: none in time, or a longer one than a greeting is.
        """
        try:
            async with asyncio.timeout(self._seconds):
                message = await anext(messages)
        except (TimeoutError, StopAsyncIteration):
            raise InvalidRequest("no greeting") from None
        if message.ByteSize() > FIRST_BYTES:
            raise InvalidRequest(f"a greeting of {message.ByteSize()} bytes; at most {FIRST_BYTES}")
        return message

"""Who is attached: each participant of each engine, what waits for it, and its grace after a loss.

A participant's messages are kept until its stream took them, and for a while after, since what a
stream took just before it broke may not have arrived: one that comes back hears it again.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Final

from pdserve.kvd.client.messages import End, Fenced, Hello, Participant, Welcome
from pdserve.rpc.errors import InvalidRequest, Overloaded, PdserveError, Unavailable

_SAY_AGAIN_S: Final = 10.0
"""Longer than a dead stream can go unnoticed (keepalive: 8 s)."""
_SAY_AGAIN_MOST: Final = 4096

Message = End | Fenced | Welcome


class Member:
    """One participant, over all its streams."""

    def __init__(self, hello: Hello, pid: int, max_backlog: int, now: float) -> None:
        self.engine_id = hello.engine_id
        self.kind = hello.participant
        self.rank = hello.rank if hello.participant is Participant.WORKER else 0
        self.pid = pid
        self.attached_at = now
        """When it first attached."""
        self.lost_at: float | None = None
        """When its stream was lost; None while it has one."""
        self._max_backlog = max_backlog
        self._messages: deque[tuple[float, Message]] = deque()
        self._taken = 0
        """How many of `_messages` a stream has taken."""
        self._ready = asyncio.Event()
        self._stream = 0
        self._failure: PdserveError | None = None

    @property
    def connected(self) -> bool:
        """Whether it has a stream now."""
        return self.lost_at is None

    def open(self) -> int:
        """A new stream takes over; the number by which it asks for messages."""
        self._stream += 1
        self._taken = 0
        self._failure = None
        self.lost_at = None
        self._ready.set()
        return self._stream

    def close(self, stream: int, now: float) -> bool:
        """A stream is gone; whether it was the present one."""
        if stream != self._stream or self.lost_at is not None:
            return False
        self.lost_at = now
        return True

    def fail(self, error: PdserveError) -> None:
        """Ends the present stream with an error."""
        self._failure = error
        self._ready.set()

    def fail_stream(self, stream: int, error: PdserveError) -> None:
        """Ends a stream with an error, unless a newer one has taken over."""
        if stream == self._stream:
            self.fail(error)

    def tell(self, message: Message, now: float) -> bool:
        """Adds a message; False when too many wait: it does not read."""
        self._messages.append((now, message))
        while self._taken and (self._taken > _SAY_AGAIN_MOST or self._messages[0][0] < now - _SAY_AGAIN_S):
            self._messages.popleft()
            self._taken -= 1
        self._ready.set()
        return len(self._messages) - self._taken <= self._max_backlog

    async def next(self, stream: int) -> Message:
        """The next message for a stream.

        Raises:
            Unavailable: the stream was taken over by a newer one.
            PdserveError: what `fail` said.
        """
        while True:
            if stream != self._stream:
                raise Unavailable("a newer stream of this participant has taken over")
            if self._failure is not None:
                raise self._failure
            if self._taken < len(self._messages):
                message = self._messages[self._taken][1]
                self._taken += 1
                return message
            self._ready.clear()
            await self._ready.wait()


class Attachments:
    """Every participant of every engine of the node."""

    def __init__(self, grace: float, max_backlog: int) -> None:
        self._grace = grace
        self._max_backlog = max_backlog
        self._members: dict[str, dict[tuple[Participant, int], Member]] = {}
        self._lost: dict[Member, float] = {}
        """Without a stream, and when their grace is over; one that has come back may still be here."""

    def attach(self, hello: Hello, pid: int, now: float) -> tuple[Member, int]:
        """The participant of a hello that the registry has taken, and its stream's number.

        Raises:
            InvalidRequest: another living process is this participant.
        """
        rank = hello.rank if hello.participant is Participant.WORKER else 0
        if rank >= hello.ranks:
            raise InvalidRequest(f"worker {rank} of {hello.ranks} ranks")
        members = self._members.setdefault(hello.engine_id, {})
        member = members.get((hello.participant, rank))
        if member is None:
            member = members[hello.participant, rank] = Member(hello, pid, self._max_backlog, now)
        elif member.pid != pid and member.connected:
            raise InvalidRequest(
                f"process {member.pid} is attached as {hello.participant.value} {rank} of engine {hello.engine_id}"
            )
        member.pid = pid
        return member, member.open()

    @property
    def engines(self) -> int:
        """Engines with participants."""
        return len(self._members)

    def of(self, engine_id: str) -> Iterable[Member]:
        """The participants of an engine."""
        return self._members.get(engine_id, {}).values()

    def everybody(self) -> Iterable[Member]:
        """Every participant of every engine."""
        return [member for members in self._members.values() for member in members.values()]

    def tell(self, engine_id: str, message: Message, now: float) -> list[Member]:
        """Adds a message for every participant; those that do not read, which were failed."""
        deaf = [m for m in self.of(engine_id) if not m.tell(message, now)]
        for member in deaf:
            member.fail(Overloaded("the participant does not read what kvd sends"))
        return deaf

    def tell_hosts(self, message: Message, now: float) -> None:
        """Adds a message for every engine's host, which decides what is begun."""
        for member in self.everybody():
            if member.kind is Participant.HOST and not member.tell(message, now):
                member.fail(Overloaded("the participant does not read what kvd sends"))

    def forget(self, engine_id: str) -> None:
        """Drops the participants of an ended engine that have no stream."""
        members = self._members.get(engine_id, {})
        for key in [k for k, m in members.items() if not m.connected]:
            self._lost.pop(members.pop(key), None)
        if not members:
            self._members.pop(engine_id, None)

    def detach(self, member: Member, stream: int, now: float) -> bool:
        """A stream is gone; whether its participant has none now."""
        lost = member.close(stream, now)
        if lost:
            self._lost[member] = now + self._grace
        return lost

    def overdue(self, now: float) -> list[Member]:
        """Participants whose grace is over now; each is given once per loss."""
        away = {member: over for member, over in self._lost.items() if not member.connected}
        self._lost = {member: over for member, over in away.items() if over > now}
        return sorted((member for member, over in away.items() if over <= now), key=away.__getitem__)

    def put_off(self, seconds: float) -> None:
        """The daemon did not run for so long: nobody could have come back."""
        self._lost = {member: over + seconds for member, over in self._lost.items()}

    def next_deadline(self) -> float | None:
        """When `overdue` has something to give next."""
        return min((over for member, over in self._lost.items() if not member.connected), default=None)

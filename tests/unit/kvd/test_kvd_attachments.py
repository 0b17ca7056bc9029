"""Participants, what waits for them, and their grace."""

import asyncio

import pytest

from pdserve.kvd.attachments import Attachments, Member
from pdserve.kvd.client.messages import Fenced, Hello, Participant
from pdserve.rpc.errors import InvalidRequest, Overloaded, Unavailable


def hello(kind: Participant = Participant.SCHEDULER, rank: int = 0, ranks: int = 2) -> Hello:
    """Of engine e."""
    return Hello("e", kind, {}, ranks, rank)


def said(number: int) -> Fenced:
    """A message that can be told apart."""
    return Fenced("h", number)


async def taken(member: Member, stream: int, count: int) -> list[int]:
    """The next messages' numbers."""
    got = []
    for _ in range(count):
        message = await asyncio.wait_for(member.next(stream), 1)
        assert isinstance(message, Fenced)
        got.append(message.attempt)
    return got


async def test_every_participant_hears_everything_in_order() -> None:
    """Scheduler and both workers hear each message of their engine, another engine's none."""
    attachments = Attachments(grace=2, max_backlog=10)
    joined = [attachments.attach(hello(), 1, 0.0)]
    joined += [attachments.attach(hello(Participant.WORKER, rank), 2 + rank, 0.0) for rank in range(2)]
    attachments.tell("e", said(1), 0)
    attachments.tell("other", said(9), 0)
    attachments.tell("e", said(2), 0)
    for member, stream in joined:
        assert await taken(member, stream, 2) == [1, 2]


async def test_who_comes_back_hears_again_what_may_have_been_lost() -> None:
    """What the lost stream took within the last seconds, and what came meanwhile; not what is long past."""
    attachments = Attachments(grace=2, max_backlog=10)
    member, stream = attachments.attach(hello(), 1, 0.0)
    attachments.tell("e", said(1), 0)
    assert await taken(member, stream, 1) == [1]
    attachments.tell("e", said(2), 100)
    assert await taken(member, stream, 1) == [2]
    assert attachments.detach(member, stream, 101)
    assert not attachments.detach(member, stream, 102)
    attachments.tell("e", said(3), 102)
    again, stream = attachments.attach(hello(), 1, 0.0)
    assert again is member
    assert await taken(member, stream, 2) == [2, 3]


async def test_a_newer_stream_takes_over() -> None:
    """The same process attaches again before its old stream is seen to be dead: the old one is ended."""
    attachments = Attachments(grace=2, max_backlog=10)
    member, old = attachments.attach(hello(), 1, 0.0)
    waiting = asyncio.create_task(member.next(old))
    await asyncio.sleep(0)
    _, new = attachments.attach(hello(), 1, 0.0)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(waiting, 1)
    assert not attachments.detach(member, old, 0)
    attachments.tell("e", said(1), 0)
    assert await taken(member, new, 1) == [1]


def test_another_process_waits_until_the_first_is_lost() -> None:
    """A second pid is refused while the first is attached, and taken after its loss."""
    attachments = Attachments(grace=2, max_backlog=10)
    member, stream = attachments.attach(hello(), 1, 0.0)
    with pytest.raises(InvalidRequest):
        attachments.attach(hello(), 2, 0.0)
    attachments.detach(member, stream, 0)
    attachments.attach(hello(), 2, 0.0)
    with pytest.raises(InvalidRequest):
        attachments.attach(hello(Participant.WORKER, 2), 3, 0.0)


async def test_who_does_not_read_is_failed() -> None:
    """More waits than the bound: the participant is named, and its stream ends with OVERLOADED."""
    attachments = Attachments(grace=2, max_backlog=2)
    member, stream = attachments.attach(hello(), 1, 0.0)
    reader, reads = attachments.attach(hello(Participant.WORKER, 0), 2, 0.0)
    for number in range(2):
        assert not attachments.tell("e", said(number), 0)
        await taken(reader, reads, 1)
    assert attachments.tell("e", said(2), 0) == [member]
    with pytest.raises(Overloaded):
        await member.next(stream)
    assert await taken(reader, reads, 1) == [2]


def test_each_loss_is_overdue_once_and_not_after_a_return() -> None:
    """Grace runs from the loss; back in time means never overdue; lost again means again."""
    attachments = Attachments(grace=2, max_backlog=10)
    member, stream = attachments.attach(hello(), 1, 0.0)
    worker, stream_of_worker = attachments.attach(hello(Participant.WORKER, 0), 2, 0.0)
    attachments.detach(member, stream, 10)
    attachments.detach(worker, stream_of_worker, 11)
    assert attachments.next_deadline() == 12
    _, stream = attachments.attach(hello(), 1, 0.0)
    assert attachments.overdue(12.5) == []
    assert attachments.overdue(13) == [worker]
    assert attachments.overdue(14) == []
    assert attachments.next_deadline() is None
    attachments.detach(member, stream, 20)
    assert attachments.overdue(22) == [member]


def test_an_ended_engine_is_forgotten_once_nobody_listens() -> None:
    """Participants with a stream may still hear their last ends."""
    attachments = Attachments(grace=2, max_backlog=10)
    gone, stream = attachments.attach(hello(), 1, 0.0)
    left, other = attachments.attach(hello(Participant.WORKER, 0), 2, 0.0)
    attachments.detach(gone, stream, 0)
    attachments.forget("e")
    assert list(attachments.of("e")) == [left]
    assert attachments.next_deadline() is None
    attachments.detach(left, other, 0)
    attachments.forget("e")
    assert attachments.engines == 0

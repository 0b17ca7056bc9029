"""Both attachments against a scripted kvd behind real gRPC."""

import asyncio
import threading
import time
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from pdserve.api.kvd.v1 import kvd_pb2
from pdserve.kvd.client import (
    Accept,
    AsyncAttachment,
    AttachConfig,
    Attachment,
    Begin,
    Cancel,
    End,
    Hello,
    Offer,
    Outcome,
    Participant,
    Retract,
    Welcome,
    stream,
)
from pdserve.kvd.client.messages import Request
from pdserve.kvd.types import PROTOCOL, Mode
from pdserve.rpc.errors import IncompatibleEngines, KvdUnavailable, PdserveError
from pdserve.rpc.status import DETAILS_KEY, details
from tests.waiting import until

TID = bytes(range(16))
QUICK = AttachConfig(welcome_timeout=0.5, reconnect_deadline=0.3, backoff_first=0.01, backoff_most=0.05)
PATIENT = AttachConfig(welcome_timeout=20.0, reconnect_deadline=20.0, backoff_first=0.01, backoff_most=0.05)


def hello(participant: Participant = Participant.SCHEDULER) -> Hello:
    return Hello("engine", participant, {"model": "m"}, ranks=2, rank=1)


def end_of(handle: str, **more: Any) -> kvd_pb2.End:
    return kvd_pb2.End(handle=handle, transfer_id=TID, outcome=kvd_pb2.OUTCOME_LANDED, **more)


async def test_messages_arrive_as_they_were_sent(kvd: Any) -> None:
    """Every field of hello, begin, offer, accept, retract and cancel crosses the wire, in order."""
    attachment = AsyncAttachment(kvd.socket, hello())
    welcome = await attachment.start(5)
    assert (welcome.kvd_epoch, welcome.lease_s, welcome.fence_s) == ("epoch-1", 30.0, 5.0)
    attachment.send(Begin("p", TID, Mode.WRITE, 2))
    attachment.send(Offer("p", TID, 1, (4, 5), 17, Mode.WRITE, 2, 99))
    attachment.send(Accept("c", TID, 1, (7,), 3, peer_locator=b"loc", stamped_ns=5))
    attachment.send(Accept("d", TID, 0, (), 4, ticket=b"tick"))
    attachment.send(Retract("p", 1, True, "PRODUCER_FAILED"))
    attachment.send(Cancel(TID, "CANCELLED"))
    came = await kvd.hellos.get()
    assert (came.engine_id, came.rank, came.ranks, came.protocol, dict(came.identity)) == (
        "engine", 1, 2, PROTOCOL, {"model": "m"},
    )  # fmt: skip
    begin = await kvd.next("begin")
    assert (begin.handle, begin.transfer_id, begin.consumers) == ("p", TID, 2)
    offer = await kvd.next("offer")
    assert (offer.attempt, list(offer.block_ids), offer.tokens, offer.stamped_ns) == (1, [4, 5], 17, 99)
    accept = await kvd.next("accept")
    assert (accept.consumer, list(accept.block_ids), accept.first_block) == (1, [7], 3)
    assert (accept.WhichOneof("from"), accept.peer_locator) == ("peer_locator", b"loc")
    assert (await kvd.next("accept")).WhichOneof("from") == "ticket"
    retract = await kvd.next("retract")
    assert (retract.attempt, retract.final, retract.reason) == (1, True, "PRODUCER_FAILED")
    assert (await kvd.next("cancel")).reason == "CANCELLED"
    await attachment.aclose()


async def test_an_end_with_its_facts_comes_once(kvd: Any) -> None:
    """An end reaches `drain_ends` once, with facts; its duplicate does not."""
    attachment = AsyncAttachment(kvd.socket, hello())
    await attachment.start(5)
    attachment.send(Accept("c", TID, 0, (7,), 0, ticket=b"t"))
    await kvd.next("accept")
    kvd.say(end=end_of("c", facts={"kv_bytes": 12, "transport": "shm"}))
    kvd.say(end=end_of("c"))
    kvd.say(end=end_of("nobody's"))
    attachment.send(Accept("d", TID, 0, (7,), 0, ticket=b"t"))
    await kvd.next("accept")
    kvd.say(end=end_of("d"))
    await until(lambda: attachment.open_handles == 0)
    ends = attachment.drain_ends()
    assert [(e.handle, e.outcome) for e in ends] == [("c", Outcome.LANDED), ("d", Outcome.LANDED)]
    assert (ends[0].facts.kv_bytes, ends[0].facts.transport) == (12, "shm")
    assert attachment.drain_ends() == []
    await attachment.aclose()


async def test_what_cannot_be_sent_ends_its_handle_and_nothing_else(kvd: Any) -> None:
    """A block id that the wire has no room for is answered here; the stream goes on."""
    attachment = AsyncAttachment(kvd.socket, hello())
    await attachment.start(5)
    attachment.send(Accept("c", TID, 0, (-1,), 0, ticket=b"t"))
    attachment.send(Begin("p", TID, Mode.WRITE, 1))
    assert (await kvd.next("begin")).handle == "p"
    await until(lambda: attachment.ends_available.is_set())
    (end,) = attachment.drain_ends()
    assert (end.handle, end.outcome, end.reason, end.producer) == ("c", Outcome.FAILED, "INVALID_REQUEST", False)
    await attachment.aclose()


async def test_a_lost_stream_to_the_same_kvd_loses_nothing(kvd: Any) -> None:
    """After a stream is lost the same hello comes back and says again what is open; no end is made up."""
    attachment = AsyncAttachment(kvd.socket, hello(), config=PATIENT)
    await attachment.start(5)
    attachment.send(Accept("c", TID, 0, (7,), 0, ticket=b"t"))
    await kvd.next("accept")
    kvd.hang_up()
    await until(lambda: kvd.hellos.qsize() == 2)
    first, second = await kvd.hellos.get(), await kvd.hellos.get()
    assert first == second
    assert (await kvd.next("accept")).handle == "c"
    kvd.say(end=end_of("c"))
    await until(lambda: attachment.ends_available.is_set())
    assert [e.outcome for e in attachment.drain_ends()] == [Outcome.LANDED]
    await attachment.aclose()


async def test_what_is_open_for_long_is_said_again(kvd: Any) -> None:
    """A word that was lost, or whose end was, does not leave its handle open for ever: after one to two
    leases it is said again, and no more once its end is there."""
    kvd.lease_ms = 50
    attachment = AsyncAttachment(kvd.socket, hello(), config=PATIENT)
    await attachment.start(5)
    attachment.send(Accept("c", TID, 0, (7,), 0, ticket=b"t"))
    assert (await kvd.next("accept")) == (await kvd.next("accept"))
    kvd.say(end=end_of("c"))
    await until(lambda: attachment.open_handles == 0)
    attachment.send(Accept("d", TID, 0, (7,), 0, ticket=b"t"))
    while (await kvd.next("accept")).handle != "d":
        pass  # what was on its way when its end came
    assert {(await kvd.next("accept")).handle for _ in range(4)} == {"d"}
    await attachment.aclose()


@pytest.mark.parametrize("part", ["write", "say again"])
async def test_a_defect_beside_the_reader_ends_the_stream(kvd: Any, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """No stream stands on without its writer, or without the one that says again: what is open ends with the defect's
    name, which is logged, and whoever asks hears that kvd cannot be used."""

    def fails(*_: object) -> None:
        raise RuntimeError("a defect")

    kvd.lease_ms = 50
    lost: list[PdserveError] = []
    attachment = AsyncAttachment(kvd.socket, hello(), on_lost=lost.append, config=PATIENT)
    await attachment.start(5)
    if part == "write":
        monkeypatch.setattr("pdserve.kvd.client.codec.encode", fails)
    else:
        monkeypatch.setattr("pdserve.kvd.client.ledger.Ledger.overdue", fails)
    with capture_logs() as logs:
        attachment.send(Accept("c", TID, 0, (7,), 0, ticket=b"t"))
        await until(lambda: bool(lost))
    (end,) = attachment.drain_ends()
    assert (end.handle, end.outcome) == ("c", Outcome.FAILED)
    assert "RuntimeError: a defect" in end.detail
    assert not attachment.attached
    assert not attachment.usable
    assert [entry["log_level"] for entry in logs if entry["event"] == "kvd.client_failed"] == ["error"]
    await attachment.aclose()


@pytest.mark.parametrize(
    ("message", "name"),
    [(Begin("p", TID, Mode.WRITE), "begin"), (Cancel(TID, "CANCELLED"), "cancel")],
    ids=["begin", "cancel"],
)
async def test_a_write_that_meets_the_end_of_the_stream_is_no_defect(
    kvd: Any, monkeypatch: pytest.MonkeyPatch, message: Request, name: str
) -> None:
    """The writer may learn first that kvd has hung up: the stream comes back and says what could not be said, be it of
    an open handle or not."""
    attachment = AsyncAttachment(kvd.socket, hello(), config=PATIENT)
    calls: list[Any] = []
    reads = asyncio.Event()
    write = attachment._outbox.write

    async def late(call: Any) -> Any:
        message = await stream.read(call)
        if calls:  # the first was the welcome
            await reads.wait()
        return message

    async def kept(call: Any, unsendable: Any) -> None:
        calls.append(call)
        await write(call, unsendable)

    monkeypatch.setattr("pdserve.kvd.client.aio.read", late)
    monkeypatch.setattr(attachment._outbox, "write", kept)
    await attachment.start(5)
    await until(lambda: bool(calls))
    kvd.hang_up()
    await until(lambda: calls[0].done())
    attachment.send(message)
    await asyncio.sleep(0.05)  # room to fail: the writer's turn is in here
    reads.set()
    assert (await kvd.next(name)).transfer_id == TID
    assert len(calls) == 2
    await attachment.aclose()


async def test_another_epoch_ends_what_was_open_and_welcomes_afresh(kvd: Any) -> None:
    """A restarted kvd: open handles end once with KVD_UNAVAILABLE, the region is registered again."""
    welcomes: list[tuple[str, bool]] = []

    async def welcomed(welcome: Welcome, fresh: bool) -> None:
        welcomes.append((welcome.kvd_epoch, fresh))

    lost: list[PdserveError] = []
    attachment = AsyncAttachment(kvd.socket, hello(), on_welcome=welcomed, on_lost=lost.append, config=PATIENT)
    await attachment.start(5)
    attachment.send(Begin("p", TID, Mode.WRITE))
    await kvd.next("begin")
    kvd.epoch = "epoch-2"
    kvd.hang_up()
    await until(lambda: len(welcomes) == 2)
    assert welcomes == [("epoch-1", True), ("epoch-2", True)]
    ends = attachment.drain_ends()
    assert [(e.handle, e.outcome, e.reason, e.producer) for e in ends] == [
        ("p", Outcome.FAILED, "KVD_UNAVAILABLE", True)
    ]
    assert len(lost) == 1
    # The peer and the engine's other participants may have met the new kvd before.
    cancel = await kvd.next("cancel")
    assert (cancel.transfer_id, cancel.reason) == (TID, "KVD_UNAVAILABLE")
    attachment.send(Begin("q", TID, Mode.WRITE))
    assert (await kvd.next("begin")).handle == "q"
    await attachment.aclose()


async def test_a_kvd_that_stays_away_ends_everything_by_the_deadline(kvd: Any) -> None:
    """Within the reconnect deadline each open handle ends once; later ones end at once; a kvd that
    comes back is used again."""
    attachment = AsyncAttachment(kvd.socket, hello(), config=QUICK)
    await attachment.start(5)
    attachment.send(Accept("a", TID, 0, (1,), 0, ticket=b"t"))
    await kvd.next("accept")
    await kvd.stop()
    await until(lambda: attachment.ends_available.is_set())
    assert [(e.handle, e.reason) for e in attachment.drain_ends()] == [("a", "KVD_UNAVAILABLE")]
    attachment.send(Accept("b", TID, 0, (1,), 0, ticket=b"t"))
    assert [(e.handle, e.reason) for e in attachment.drain_ends()] == [("b", "KVD_UNAVAILABLE")]
    assert not attachment.usable
    kvd.epoch = "epoch-2"
    await kvd.start()
    await until(lambda: attachment.usable)
    assert [(await kvd.next("cancel")).reason for _ in "ab"] == ["KVD_UNAVAILABLE"] * 2
    attachment.send(Accept("c", TID, 0, (1,), 0, ticket=b"t"))
    assert (await kvd.next("accept")).handle == "c"
    await attachment.aclose()


async def test_start_without_a_kvd_fails_in_time(tmp_path: Any) -> None:
    """No daemon: KvdUnavailable within the caller's timeout."""
    began = time.monotonic()
    with pytest.raises(KvdUnavailable):
        await AsyncAttachment(str(tmp_path / "none.sock"), hello(), config=QUICK).start(0.2)
    assert time.monotonic() - began < 10


async def test_a_silent_kvd_is_given_up(kvd: Any) -> None:
    """A daemon that takes the stream and never welcomes does not hold the caller."""
    kvd.silent = True
    with pytest.raises(KvdUnavailable):
        await AsyncAttachment(kvd.socket, hello(), config=QUICK).start(0.3)


async def test_a_refusal_keeps_its_class(kvd: Any) -> None:
    """What kvd refuses at hello is raised as the same class, and not tried again."""
    error = IncompatibleEngines("protocol 1 is not 2")
    kvd.refuse = (grpc.StatusCode.FAILED_PRECONDITION, error.message, ((DETAILS_KEY, details(error)),))
    with pytest.raises(IncompatibleEngines, match="protocol 1"):
        await AsyncAttachment(kvd.socket, hello(), config=PATIENT).start(5)
    await asyncio.sleep(0.05)
    assert kvd.hellos.qsize() == 1


async def test_a_worker_hears_its_fence(kvd: Any) -> None:
    """`wait_fenced` is True once kvd said so, also when it said so first; False after its timeout."""
    attachment = AsyncAttachment(kvd.socket, hello(Participant.WORKER))
    await attachment.start(5)
    kvd.say(fenced=kvd_pb2.Fenced(handle="p", attempt=0))
    assert await attachment.wait_fenced("p", 0, 5)
    waiting = asyncio.create_task(attachment.wait_fenced("p", 1, 5))
    await asyncio.sleep(0)
    kvd.say(fenced=kvd_pb2.Fenced(handle="p", attempt=1))
    assert await waiting
    assert not await attachment.wait_fenced("p", 2, 0.05)
    await attachment.aclose()


async def test_a_fence_does_not_wait_for_a_kvd_that_is_gone(kvd: Any) -> None:
    """A dead daemon copies nothing: whoever waits for its fence may go on."""
    attachment = AsyncAttachment(kvd.socket, hello(Participant.WORKER), config=QUICK)
    await attachment.start(5)
    waiting = asyncio.create_task(attachment.wait_fenced("p", 0, 20))
    await asyncio.sleep(0)
    await kvd.stop()
    assert await asyncio.wait_for(waiting, 5)
    assert await attachment.wait_fenced("q", 0, 20)
    await attachment.aclose()


async def test_closing_ends_what_is_open(kvd: Any) -> None:
    """After `aclose` nobody waits for an end of that attachment."""
    attachment = AsyncAttachment(kvd.socket, hello())
    await attachment.start(5)
    attachment.send(Begin("p", TID, Mode.READ))
    await attachment.aclose()
    await attachment.aclose()
    assert [e.reason for e in attachment.drain_ends()] == ["KVD_UNAVAILABLE"]


async def test_the_threaded_attachment_does_the_same(kvd: Any) -> None:
    """From a thread without a loop: start, send, fence, ends by event, close; the thread ends too."""
    ends: list[End] = []
    fenced: list[bool] = []
    sent = threading.Event()

    def engine() -> None:
        attachment = Attachment(kvd.socket, hello(Participant.SCHEDULER))
        worker = Attachment(kvd.socket, hello(Participant.WORKER))
        try:
            attachment.start(5)
            worker.start(5)
            attachment.send(Begin("p", TID, Mode.WRITE))
            sent.set()
            fenced.append(worker.wait_fenced("p", 0, 5))
            assert attachment.ends_available.wait(5)
            ends.extend(attachment.drain_ends())
            assert not attachment.ends_available.is_set()
            assert attachment.drain_ends() == []
            assert worker.ends_available.wait(5)
            assert [e.handle for e in worker.drain_ends()] == ["p"]
        finally:
            attachment.close()
            worker.close()
            attachment.close()

    running = asyncio.create_task(asyncio.to_thread(engine))
    assert (await kvd.next("begin")).handle == "p"
    assert sent.wait(5)
    kvd.say(fenced=kvd_pb2.Fenced(handle="p", attempt=0))
    kvd.say(end=end_of("p"))
    await asyncio.wait_for(running, 20)
    assert fenced == [True]
    assert [e.handle for e in ends] == ["p"]
    assert not [t for t in threading.enumerate() if t.name == "pdserve-kvd-client"]


async def test_a_threaded_start_without_a_kvd_fails_in_time(tmp_path: Any) -> None:
    """The threaded flavour keeps the deadline and leaves no thread."""

    def engine() -> None:
        attachment = Attachment(str(tmp_path / "none.sock"), hello(), config=QUICK)
        try:
            attachment.start(0.2)
        finally:
            attachment.close()

    with pytest.raises(KvdUnavailable):
        await asyncio.to_thread(engine)
    assert not [t for t in threading.enumerate() if t.name == "pdserve-kvd-client"]

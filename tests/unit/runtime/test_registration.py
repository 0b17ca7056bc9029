"""A service beats until it ends, hears why it is refused, and meets a proxy that comes and goes."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from pdserve.rpc.errors import ConfigError, IncompatibleEngines, NoEngines, PdserveError, Unauthenticated
from pdserve.runtime import beats
from pdserve.runtime import registration as registering
from pdserve.runtime.beats import Beat, Reply, State
from pdserve.runtime.registration import Registration, RegistrationConfig
from pdserve.runtime.signing import Signer
from pdserve.runtime.testing import FakeProxy

NOW = 1001.0
SIGNER = Signer(b"a key of the cluster")
FAST = RegistrationConfig(beat_seconds=0.02, silent_beats=3)
SLOW = RegistrationConfig(beat_seconds=30.0)


def snapshot(state: State, sequence: int) -> Beat:
    """What a service says of itself."""
    return Beat(
        type="P",
        http_address="h:1",
        zmq_address="host:h,handshake:0,notify:0",
        dp_size=1,
        tp_size=1,
        transfer_mode="READ",
        engine_id="e1",
        grpc_address="h:1",
        locator=b"",
        model="m",
        tokenizer="bytes",
        role="prefill",
        identity={},
        max_model_len=64,
        block_size=16,
        total_kv_tokens=64,
        free_kv_tokens=64,
        running=0,
        waiting=0,
        steps=0,
        state=state,
        beat=sequence,
        sent_at=1000.0,
    )


class Heard:
    """A log that wakes whoever waits for a line of it.

    That an answer was sent does not say that it has arrived: the service's next beats may have been
    on their way before it. What the service made of an answer is in its log.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self._changed = asyncio.Event()

    def info(self, event: str, **_: object) -> None:
        """See structlog."""
        self.events.append(event)
        self._changed.set()

    warning = error = info

    async def until(self, event: str, times: int = 1) -> None:
        """Until it was said so often."""
        async with asyncio.timeout(20):
            while self.events.count(event) < times:
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """What registrations say in this test."""
    heard = Heard()
    monkeypatch.setattr(registering, "log", heard)
    return heard


@pytest.fixture
async def proxy() -> AsyncIterator[FakeProxy]:
    """One that is there."""
    proxy = FakeProxy(SIGNER)
    yield proxy
    proxy.close()


async def test_beats_are_numbered_and_answered(proxy: FakeProxy) -> None:
    """Each says more than the last, and an answer registers."""
    registration = Registration(proxy.endpoint, snapshot, SIGNER, FAST)
    task = asyncio.create_task(registration.run())
    try:
        assert (await proxy.answer(Reply(ok=True), NOW)).beat == 1
        await asyncio.wait_for(registration.registered.wait(), 20)
        assert [(await proxy.answer(Reply(ok=True), NOW)).beat for _ in range(3)] == [2, 3, 4]
        assert not task.done()
    finally:
        task.cancel()
        registration.close()


async def test_an_answer_that_comes_as_the_next_beat_is_due_counts(proxy: FakeProxy) -> None:
    """The loop stands still meanwhile, as on a busy machine, and finds both at once; no other answer comes."""
    registration = Registration(proxy.endpoint, snapshot, SIGNER, RegistrationConfig(beat_seconds=0.2))
    task = asyncio.create_task(registration.run())
    try:
        await proxy.answer(Reply(ok=True), NOW)
        time.sleep(0.5)  # noqa: ASYNC251  # see above
        await asyncio.wait_for(registration.registered.wait(), 20)
    finally:
        task.cancel()
        registration.close()


@pytest.mark.parametrize("error", [Unauthenticated("no"), IncompatibleEngines("dtype: a != b")])
async def test_a_first_refusal_ends_the_service(proxy: FakeProxy, error: PdserveError) -> None:
    """With the proxy's reason as the same class, and its words in the log."""
    registration = Registration(proxy.endpoint, snapshot, SIGNER, FAST)
    task = asyncio.create_task(registration.run())
    with capture_logs() as logs:
        await proxy.answer(beats.refusal(error), NOW)
        with pytest.raises(type(error), match=error.message):
            await asyncio.wait_for(task, 20)
    registration.close()
    assert [line["detail"] for line in logs if line["event"] == "registration_refused"] == [error.message]


async def test_a_refusal_for_now_does_not(proxy: FakeProxy) -> None:
    """A proxy that cannot take anybody yet is asked again."""
    registration = Registration(proxy.endpoint, snapshot, SIGNER, FAST)
    task = asyncio.create_task(registration.run())
    try:
        await proxy.answer(beats.refusal(NoEngines("starting")), NOW)
        await proxy.answer(Reply(ok=True), NOW)
        await asyncio.wait_for(registration.registered.wait(), 20)
    finally:
        task.cancel()
        registration.close()


async def test_a_later_refusal_is_said_once_and_survived(proxy: FakeProxy, heard: Heard) -> None:
    """A proxy restarted with another key must not take its engines down."""
    registration = Registration(proxy.endpoint, snapshot, SIGNER, FAST)
    task = asyncio.create_task(registration.run())
    await proxy.answer(Reply(ok=True), NOW)
    await heard.until("registered")
    for _ in range(3):
        await proxy.answer(beats.refusal(Unauthenticated("other key")), NOW)
    await proxy.answer(Reply(ok=True), NOW)
    await heard.until("registered", 2)
    assert not task.done()
    task.cancel()
    registration.close()
    assert heard.events.count("registration_refused") == 1


async def test_announcements_do_not_wait_for_the_next_beat(proxy: FakeProxy) -> None:
    """Draining and bye reach the proxy at once, and later beats repeat them."""
    registration = Registration(proxy.endpoint, snapshot, SIGNER, SLOW)
    task = asyncio.create_task(registration.run())
    assert (await proxy.answer(Reply(ok=True), NOW)).state == "ready"
    await registration.announce("draining")
    assert (await proxy.take(NOW))[1].state == "draining"
    task.cancel()
    await registration.announce("bye")
    registration.close()
    assert (await proxy.take(NOW))[1].state == "bye"


async def test_a_proxy_may_come_late_and_again(heard: Heard) -> None:
    """It is met by itself each time, and its silence is in the log."""
    first = FakeProxy(SIGNER)
    endpoint = first.endpoint
    first.close()
    registration = Registration(endpoint, snapshot, SIGNER, FAST)
    task = asyncio.create_task(registration.run())
    await heard.until("proxy_silent")
    for times in range(1, 3):
        proxy = FakeProxy(SIGNER, endpoint)
        await proxy.answer(Reply(ok=True), NOW)
        await heard.until("proxy_answers_again", times)
        proxy.close()
        await heard.until("proxy_silent", times + 1)
    assert not task.done()
    task.cancel()
    registration.close()
    assert heard.events[0] == "proxy_silent"
    assert heard.events.count("registered") == 1


async def test_noise_from_the_proxy_is_survived(proxy: FakeProxy) -> None:
    """An unreadable answer is logged and is none."""
    registration = Registration(proxy.endpoint, snapshot, SIGNER, FAST)
    with capture_logs() as logs:
        task = asyncio.create_task(registration.run())
        peer, _ = await proxy.take(NOW)
        await proxy.socket.send_multipart([peer, b"\xc1"])
        await proxy.answer(Reply(ok=True), NOW)
        await asyncio.wait_for(registration.registered.wait(), 20)
        task.cancel()
        registration.close()
    assert "proxy_answer_unreadable" in [line["event"] for line in logs]


async def test_what_is_no_proxy_address_is_refused() -> None:
    """Before anything is sent."""
    with pytest.raises(ConfigError, match="--proxy"):
        Registration("nowhere", snapshot, SIGNER, FAST)

"""The streams between daemons: carries what `Desk` has for them, and tells it what comes. One task per stream.

caller                                          listener
  ◀───────────────────────────────── challenge (nonce)
  greeting (over that nonce; own nonce) ───────▶
  ◀──────────────────────── welcome (over the caller's nonce)
  frames ◀─────────────────────────────────────▶ frames
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

import grpc
import structlog

from pdserve.api.kvd.v1 import peer_pb2, peer_pb2_grpc
from pdserve.kvd.peers import codec, proof
from pdserve.kvd.peers.cards import Cards
from pdserve.kvd.peers.config import PeerConfig
from pdserve.kvd.peers.desk import Desk
from pdserve.kvd.peers.door import Door
from pdserve.kvd.peers.greeter import Greeter
from pdserve.kvd.peers.lending import Borrowed, Lend, LendContext, Lending, borrowed
from pdserve.kvd.peers.link import Link
from pdserve.kvd.peers.streams import Call, answer, first_of, next_answer, next_frame
from pdserve.rpc.channel import CHANNEL_OPTIONS, SERVER_OPTIONS
from pdserve.rpc.errors import ConfigError, InvalidRequest, PdserveError, Unavailable
from pdserve.rpc.status import ErrorInterceptor, to_error
from pdserve.runtime.clock import Clock
from pdserve.runtime.config import join_address
from pdserve.runtime.signing import Signer

log = structlog.get_logger(__name__)

_STOP_GRACE_S: Final = 0.2
_SHOWN: Final = 200
"""Characters of what a stranger says."""
_MESSAGE_BYTES: Final = 8 << 20
"""Longest message that is read: of a peer, and of a stranger, whose first one gRPC reads before it is refused. One that
names a million blocks has half of that."""

_Context = grpc.aio.ServicerContext[peer_pb2.ConnectRequest, peer_pb2.ConnectResponse]


class Network(peer_pb2_grpc.PeerServiceServicer):
    """See the module. `heard` is called before anything that comes and gives the time, `settle` after it; `lend` has
    scratch memory; `defect` is told of errors that only a defect of kvd explains."""

    def __init__(
        self,
        config: PeerConfig,
        desk: Desk,
        cards: Cards,
        signer: Signer,
        clock: Clock,
        *,
        epoch: str,
        heard: Callable[[], float],
        settle: Callable[[], None],
        lend: Lend,
        defect: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._desk = desk
        self._cards = cards
        self._signer = signer
        self._clock = clock
        self._heard = heard
        self._settle = settle
        self._defect = defect
        self._credentials = proof.Credentials(config)
        self._options = [
            *CHANNEL_OPTIONS,
            # Each call makes a connection of its own, to hear how that went; the pauses between them are ours.
            ("grpc.use_local_subchannel_pool", 1),
            # How long a connection may take to be made, whatever its name says: a slow way needs it.
            ("grpc.min_reconnect_backoff_ms", round(config.connect * 1000)),
        ]
        self._door = Door(config.strangers, config.connect)
        self.greeter = Greeter(epoch, clock, lambda: desk.address)
        self._lending = Lending(self._door, self.greeter, signer, lend)
        self.port = 0
        """What it listens at, where it does."""
        self._server: grpc.aio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self) -> None:
        """Listens, where there are peers.

        Raises:
            ConfigError: the address cannot be bound.
        """
        if not self._config.on:
            return
        host, port = self._config.bind
        options = dict(SERVER_OPTIONS) | {"grpc.max_receive_message_length": _MESSAGE_BYTES}
        server = grpc.aio.server(options=list(options.items()), interceptors=[ErrorInterceptor(self._unexpected)])
        peer_pb2_grpc.add_PeerServiceServicer_to_server(self, server)
        self.port = self._credentials.bind(server, join_address(host, port))
        self._desk.address = self._config.advertised(self.port)
        await server.start()
        self._server = server
        log.info("peers_listen", bound=join_address(host, port), address=self._desk.address, tls=self._config.tls)

    async def aclose(self) -> None:
        """Ends every stream. Safe twice."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(_STOP_GRACE_S)

    def kick(self, now: float) -> None:
        """Begins what has become due: calls, and cards for peers."""
        if self._closing:
            return
        for link in self._desk.links.dials(now):
            self._spawn(self._dial(link))
        for link, engine_id in self._desk.wanting():
            self._spawn(self._card(link, engine_id))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._defect(error)

    async def _card(self, link: Link, engine_id: str) -> None:
        for key, cards in (await self._cards.of(engine_id)).items():
            self._desk.carded(link, key, cards, self._heard())
        self._settle()

    # -- calling ----------------------------------------------------------------------------

    async def _dial(self, link: Link) -> None:
        stream, error = None, PdserveError("")
        try:
            async with self._credentials.channel(link.address, self._options) as channel:
                call: Call = peer_pb2_grpc.PeerServiceStub(channel).Connect()
                try:
                    async with asyncio.timeout(self._config.connect):
                        stream = await self._greet(link, call)
                    await self._carry(link, stream, call)
                finally:
                    call.cancel()
            error = Unavailable("the peer ended the stream")
        except grpc.aio.AioRpcError as failure:
            error = to_error(failure)
        except asyncio.InvalidStateError:
            error = Unavailable("the peer ended the stream before it was greeted")
        except TimeoutError:
            error = Unavailable(f"no answer within {self._config.connect:g} s")
        except PdserveError as failure:
            error = failure
        now = self._heard()
        if stream is None:
            log.info("peer_not_reached", peer=link.name, reason=error.reason, error=error.message)
            self._desk.links.dial_failed(link, error, now)
        else:
            log.info("peer_stream_lost", peer=link.name, reason=error.reason, error=error.message)
            self._desk.links.dropped(link, stream, now)
        self._settle()

    async def _greet(self, link: Link, call: Call) -> int:
        challenge = await answer(call)
        if challenge.WhichOneof("message") != "challenge":
            raise InvalidRequest("the peer does not begin with a challenge")
        if challenge.challenge.address != link.address:
            said = challenge.challenge.address[:_SHOWN]  # by nobody who has proved anything
            raise ConfigError(f"the kvd at {link.address} says that it is at {said}")
        self._desk.links.check_wanted(link)
        nonce, began = proof.new_nonce(), self._clock.monotonic_ns()
        signed = proof.sign(self._signer, self.greeter.greeting(link), challenge.challenge.nonce, nonce)
        await call.write(peer_pb2.ConnectRequest(greeting=peer_pb2.SignedGreeting(signed=signed)))
        welcome = await answer(call)
        peer, _ = proof.check(self._signer, welcome.welcome.signed, nonce)
        clock = self.greeter.offset(peer, began)
        now = self._heard()
        stream = self._desk.links.welcomed(link, peer, now, urgent=clock)
        link.clock = clock
        self._settle()
        log.info(
            "peer_open",
            peer=link.name,
            epoch=peer.epoch,
            link=link.number,
            resumed=peer.held,
            clock_ms=clock.unix_ns / 1e6,
            uncertainty_ms=clock.uncertainty_ns / 1e6,
        )
        return stream

    async def _carry(self, link: Link, stream: int, call: Call) -> None:
        async def write() -> None:
            while True:
                frame = codec.encode(await next_frame(link, stream))
                try:
                    await call.write(peer_pb2.ConnectRequest(frame=frame))
                except asyncio.InvalidStateError:
                    return  # the call is over; how, the reader hears

        async def read() -> None:
            while (message := await next_answer(call)) is not None:
                self._hear(link, stream, message.frame)

        # The last one for a peer that takes nothing any more: then neither of the others comes to an end.
        await first_of(read(), write(), link.left(stream))

    # -- being called -----------------------------------------------------------------------

    async def Connect(
        self, request_iterator: AsyncIterator[peer_pb2.ConnectRequest], context: _Context
    ) -> AsyncIterator[peer_pb2.ConnectResponse]:
        """See peer.proto."""
        stranger, nonce = self._door.enter(), proof.new_nonce()
        # Called however the call ends, also where this generator is not closed in time.
        context.add_done_callback(lambda _: self._door.leave(stranger))  # type: ignore[arg-type]  # not a Protocol
        yield peer_pb2.ConnectResponse(challenge=peer_pb2.Challenge(nonce=nonce, address=self._desk.address))
        first = await self._door.first(request_iterator)
        try:
            peer, theirs = proof.check(self._signer, first.greeting.signed, nonce)
            self._door.leave(stranger)
            link, stream, resumed = self._desk.links.hello(peer, self._heard())
        except PdserveError as error:
            log.warning("peer_refused", who=context.peer(), reason=error.reason, error=error.message)
            raise
        finally:
            self._settle()
        context.add_done_callback(lambda _: self._dropped(link, stream))  # type: ignore[arg-type]  # not a Protocol
        log.info("peer_open", peer=link.name, epoch=peer.epoch, link=link.number, resumed=resumed, called=True)
        signed = proof.sign(self._signer, replace(self.greeter.greeting(link), held=resumed), theirs)
        yield peer_pb2.ConnectResponse(welcome=peer_pb2.SignedGreeting(signed=signed))
        reader = asyncio.create_task(self._read(link, stream, request_iterator))
        reader.add_done_callback(lambda _: self._dropped(link, stream))
        try:
            while True:
                yield peer_pb2.ConnectResponse(frame=codec.encode(await next_frame(link, stream)))
        finally:
            self._dropped(link, stream)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    async def _read(self, link: Link, stream: int, requests: AsyncIterator[peer_pb2.ConnectRequest]) -> None:
        try:
            async for request in requests:
                self._hear(link, stream, request.frame)
        except grpc.aio.BaseError as broken:
            log.info("peer_stream_broken", peer=link.name, error=str(broken))

    def _dropped(self, link: Link, stream: int) -> None:
        if self._closing or link.stream != stream:
            return
        self._desk.links.dropped(link, stream, self._heard())
        self._settle()

    # -- scratch memory ---------------------------------------------------------------------

    async def Lend(
        self, request_iterator: AsyncIterator[peer_pb2.LendRequest], context: LendContext
    ) -> AsyncIterator[peer_pb2.LendResponse]:
        """See peer.proto."""
        async for response in self._lending.lend(request_iterator, context, self._desk.address):
            yield response

    def borrow(self, address: str, nbytes: int) -> contextlib.AbstractAsyncContextManager[Borrowed]:
        """See `lending.borrowed`."""
        channel = self._credentials.channel(address, self._options)
        return borrowed(channel, address, nbytes, self.greeter, self._signer, self._config.connect)

    # -- both -------------------------------------------------------------------------------

    def _hear(self, link: Link, stream: int, wire: peer_pb2.PeerFrame) -> None:
        now = self._heard()
        try:
            self._desk.heard(link, stream, codec.decode(wire), now)
        except PdserveError as error:
            self._desk.links.broken(link, stream, error, now)
        except Exception as defect:  # noqa: BLE001  # counted and logged; the link cannot be trusted any more
            self._defect(defect)
            self._desk.links.broken(link, stream, PdserveError(f"{type(defect).__name__}: {defect}"), now)
        self._settle()

    def _unexpected(self, method: str, error: BaseException) -> None:
        self._defect(error)

"""Scratch memory of one daemon for a measurement of another's: PeerService's Lend, from both sides.

borrower                                         lender
  ◀──────────────────────────── challenge (nonce)
  greeting (over that nonce; own nonce), bytes ──▶
  ◀────────────── scratch (cards; welcome over the borrower's nonce)
  ...reads, and ends the stream ─────────────────▶ gives the memory back
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import grpc

from pdserve.api.kvd.v1 import peer_pb2, peer_pb2_grpc
from pdserve.kvd.peers import proof
from pdserve.kvd.peers.door import Door
from pdserve.kvd.peers.greeter import Greeter
from pdserve.kvd.peers.messages import Greeting
from pdserve.kvd.peers.streams import first_of
from pdserve.kvd.probing.codec import decode_device, encode_device
from pdserve.kvd.probing.values import Offer
from pdserve.rpc.errors import IncompatibleEngines, InvalidRequest, Unavailable
from pdserve.rpc.status import to_error
from pdserve.runtime.signing import Signer

_BACK_S: Final = 2.0
"""Longest wait for the lender's having its memory back."""

LendContext = grpc.aio.ServicerContext[peer_pb2.LendRequest, peer_pb2.LendResponse]


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Another daemon's scratch memory, and who that daemon is."""

    peer: Greeting
    offer: Offer


class Loan(Protocol):
    """Memory that is lent, or about to be."""

    async def ready(self) -> Offer:
        """Once it can be read.

        Raises:
            TransferFailed: there is no memory for it.
        """
        ...

    async def over(self) -> None:
        """Waits until it was given back, since its time had passed or `end` was called."""
        ...

    def end(self) -> None:
        """It is not wanted any more. Safe twice."""
        ...


Lend = Callable[[int, str], Loan]
"""Begins to lend so many bytes to somebody. Raises InvalidRequest, Overloaded, Unavailable."""


class Lending:
    """The lender's side."""

    def __init__(self, door: Door, greeter: Greeter, signer: Signer, lend: Lend) -> None:
        self._door = door
        self._greeter = greeter
        self._signer = signer
        self._lend = lend

    async def lend(
        self, requests: AsyncIterator[peer_pb2.LendRequest], context: LendContext, address: str
    ) -> AsyncIterator[peer_pb2.LendResponse]:
        """See peer.proto. `address`: where this daemon says that it is.

        Raises:
            PdserveError: a stranger, or no memory for it now.
        """
        stranger, nonce = self._door.enter(), proof.new_nonce()
        # Called however the call ends, also where this generator is not closed in time.
        context.add_done_callback(lambda _: self._door.leave(stranger))  # type: ignore[arg-type]  # not a Protocol
        yield peer_pb2.LendResponse(challenge=peer_pb2.Challenge(nonce=nonce, address=address))
        first = await self._door.first(requests)
        peer, theirs = proof.check(self._signer, first.greeting.signed, nonce)
        self._door.leave(stranger)
        loan = self._lend(first.bytes, peer.address or peer.node)
        context.add_done_callback(lambda _: loan.end())  # type: ignore[arg-type]  # as above
        try:
            offer = await loan.ready()
            welcome = proof.sign(self._signer, self._greeter.greeting(), theirs)
            yield peer_pb2.LendResponse(scratch=_encode(offer, welcome))
            await first_of(_ended(requests), loan.over())
        finally:
            loan.end()
        await loan.over()  # who hears the stream's end may borrow again


@contextlib.asynccontextmanager
async def borrowed(
    channel: grpc.aio.Channel, address: str, nbytes: int, greeter: Greeter, signer: Signer, seconds: float
) -> AsyncIterator[Borrowed]:
    """So many bytes of another daemon's memory, while the block runs; `seconds` to get them. Closes the channel.

    Raises:
        Unavailable: nobody there, not in time, or an older daemon, which lends nothing.
        PdserveError: what the other daemon says.
    """
    async with channel:
        call = peer_pb2_grpc.PeerServiceStub(channel).Lend()
        try:
            async with asyncio.timeout(seconds):
                lent = await _asked(call, nbytes, greeter, signer)
        except TimeoutError:
            raise Unavailable(f"the kvd at {address} does not answer within {seconds:g} s") from None
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                raise Unavailable(f"the kvd at {address} is of a version that lends no memory") from error
            raise to_error(error) from error
        except asyncio.InvalidStateError:
            raise Unavailable(f"the kvd at {address} ended the stream") from None
        else:
            try:
                yield lent
            finally:
                await _given_back(call)
        finally:
            call.cancel()


async def _asked(call: Any, nbytes: int, greeter: Greeter, signer: Signer) -> Borrowed:
    challenge = await _read(call, "challenge")
    nonce = proof.new_nonce()
    signed = proof.sign(signer, greeter.greeting(), challenge.challenge.nonce, nonce)
    await call.write(peer_pb2.LendRequest(greeting=peer_pb2.SignedGreeting(signed=signed), bytes=nbytes))
    scratch = (await _read(call, "scratch")).scratch
    peer, _ = proof.check(signer, scratch.welcome.signed, nonce)
    mine = greeter.greeting()
    if peer.epoch == mine.epoch:
        raise InvalidRequest("the peer's address is this daemon's own")
    if peer.protocol != mine.protocol:
        raise IncompatibleEngines(f"protocol {peer.protocol}; this kvd speaks {mine.protocol}")
    return Borrowed(peer, _decode(scratch))


async def _given_back(call: Any) -> None:
    """Lets the lender take its memory back, and waits until it has: else the next measurement would find it busy."""
    # The loan ends without that, too: by the stream's end, or with its time.
    with contextlib.suppress(TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
        async with asyncio.timeout(_BACK_S):
            await call.done_writing()
            await call.read()


async def _read(call: Any, what: str) -> peer_pb2.LendResponse:
    message = await call.read()
    if message is grpc.aio.EOF:
        raise Unavailable(f"the peer ended the stream before its {what} ({(await call.code()).name})")
    if message.WhichOneof("message") != what:
        raise InvalidRequest(f"the peer sends no {what}")
    return message  # type: ignore[no-any-return]  # grpc's stubs leave it open


def _encode(offer: Offer, welcome: bytes) -> peer_pb2.Scratch:
    return peer_pb2.Scratch(
        welcome=peer_pb2.SignedGreeting(signed=welcome),
        bytes=offer.nbytes,
        seed=offer.seed,
        cards=offer.cards,
        refused=offer.refused,
        devices=[encode_device(device) for device in offer.devices],
    )


def _decode(wire: peer_pb2.Scratch) -> Offer:
    devices = [decode_device(device) for device in wire.devices]
    return Offer(wire.bytes, wire.seed, dict(wire.cards), dict(wire.refused), devices)


async def _ended(requests: AsyncIterator[peer_pb2.LendRequest]) -> None:
    with contextlib.suppress(grpc.aio.BaseError):  # however it ended, the loan is over
        async for _ in requests:
            pass  # nothing else is asked on this stream

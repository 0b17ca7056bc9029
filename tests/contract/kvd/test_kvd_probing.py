"""What daemons measure of the ways between them: over real sockets, on simulated links, and with nothing held after."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc, peer_pb2, peer_pb2_grpc
from pdserve.kvd.peers import proof
from pdserve.kvd.probing import loans, scratch, survey
from pdserve.kvd.testing import FakeEngine, RunningKvd, RunningNode, running_kvd, running_node
from pdserve.kvd.transport.sim import Fault
from pdserve.rpc.channel import aio_channel
from pdserve.rpc.errors import PdserveError
from pdserve.rpc.status import to_error
from tests.contract.kvd.peers_rig import until

pytestmark = pytest.mark.usefixtures("small")
SMALL = 4 << 20


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scratch memory of 4 MiB: the simulated link takes its time."""
    for module in (scratch, loans, survey):
        monkeypatch.setattr(module, "SCRATCH_BYTES", SMALL)


async def measure(kvd: RunningKvd, *peers: str, seconds: float = 20.0) -> kvd_pb2.MeasureResponse:
    """What it finds; raises PdserveError as it refuses."""
    async with aio_channel(f"unix:{kvd.socket}") as channel:
        request = kvd_pb2.MeasureRequest(peers=peers, deadline_seconds=seconds)
        try:
            return await kvd_pb2_grpc.OperatorStub(channel).Measure(request, timeout=30.0)
        except grpc.aio.AioRpcError as error:
            raise to_error(error) from error


def empty(*kvds: RunningKvd) -> bool:
    """Whether no scratch memory is mapped, and nothing is measured or lent."""
    return all(not kvd.node._arena._sizes and kvd.node._probing._task is None for kvd in kvds)


def used(way: kvd_pb2.Way) -> kvd_pb2.Candidate:
    """What would be used."""
    (one,) = [candidate for candidate in way.candidates if candidate.used]
    return one


async def test_the_ways_within_a_node_and_from_a_peer_are_measured() -> None:
    """Each transport has a latency, and a rate that is the link's; what is not switched on says so; nothing is held."""
    async with running_node() as a, running_node() as b:
        said = await measure(b.kvd, a.wire.address)
        within, between = said.ways
        assert (within.peer, between.peer) == ("", a.wire.address)
        assert (between.kvd_epoch, between.kind, between.error) == (a.kvd.node.epoch, "host", "")
        for way in said.ways:
            one = used(way)
            assert (one.transport, one.why_not, one.error, list(one.names)) == ("sim", "", "", ["sim"])
            assert [speed.block_bytes >> 10 for speed in one.speeds] == [16, 64, 256, 1024]
            assert 0 < one.latency_seconds < 1
            assert max(speed.bytes / speed.seconds for speed in one.speeds) <= 1e9
            others = {candidate.transport: candidate.why_not for candidate in way.candidates if not candidate.used}
            assert others["nixl"] == "not switched on: --transport nixl"
        assert said.scratch_bytes == SMALL
        await until(lambda: empty(a.kvd, b.kvd))


async def test_without_names_all_peers_that_are_linked_are_measured() -> None:
    """By the address that they were called at."""
    async with running_node() as a, running_node() as b:
        node = b.kvd.node
        node.desk.links.towards(a.wire.address, node.now())
        node.network.kick(node.now())
        assert [way.peer for way in (await measure(b.kvd)).ways] == ["", a.wire.address]
        assert [way.peer for way in (await measure(a.kvd)).ways] == ["", b.wire.address]


@pytest.mark.parametrize("fault", [Fault.COPY_NOTHING, Fault.WRONG_BLOCK, Fault.FAIL])
async def test_a_transport_that_does_not_bring_the_bytes_has_no_speed(fault: Fault) -> None:
    """It may say what it likes: what has come is compared with what was sent."""
    async with running_node() as a, running_node() as b:
        b.faults.script += [fault] * 1000
        broken = await measure(b.kvd, a.wire.address)
        for way in broken.ways:
            assert used(way).error
            assert not used(way).speeds
            assert "does not work as it should" in way.warnings[0]
        await until(lambda: empty(a.kvd, b.kvd))


@contextlib.asynccontextmanager
async def borrowing(node: RunningNode, of: RunningNode, nbytes: int = SMALL) -> AsyncIterator[Any]:
    """A stream on which memory is lent to `node`, by hand; its scratch."""
    greeter, signer, nonce = node.kvd.node.network.greeter, node.kvd.signer, proof.new_nonce()
    async with grpc.aio.insecure_channel(of.wire.address) as channel:
        call: Any = peer_pb2_grpc.PeerServiceStub(channel).Lend()
        try:
            challenge = await call.read()
            signed = proof.sign(signer, greeter.greeting(), challenge.challenge.nonce, nonce)
            await call.write(peer_pb2.LendRequest(greeting=peer_pb2.SignedGreeting(signed=signed), bytes=nbytes))
            message = await call.read()
            if message is grpc.aio.EOF:
                await call
            yield message.scratch
        except grpc.aio.AioRpcError as error:
            raise to_error(error) from error
        finally:
            call.cancel()


async def test_one_measurement_at_a_time() -> None:
    """While memory is lent, neither another loan nor a measurement is begun; a peer that is busy is said to be."""
    async with running_node() as a, running_node() as b:
        async with borrowing(b, a):
            assert not empty(a.kvd)
            with pytest.raises(PdserveError, match="lends memory to") as busy:
                await measure(a.kvd)
            assert busy.value.reason == "OVERLOADED"
            within, between = (await measure(b.kvd, a.wire.address)).ways
            assert not within.error
            assert between.reason == "OVERLOADED"
            assert "one measurement at a time" in between.error
            assert not between.candidates
        await until(lambda: empty(a.kvd))
        assert not (await measure(b.kvd, a.wire.address)).ways[1].error


async def test_lent_memory_comes_back_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever keeps the stream: half a minute, here less."""
    async with running_node() as a, running_node() as b:
        lender = a.kvd.node.network._lending._lend.__self__  # type: ignore[attr-defined]  # a bound method
        monkeypatch.setattr(lender, "_seconds", 0.2)
        async with borrowing(b, a):
            assert not empty(a.kvd)
            await until(lambda: empty(a.kvd), 5.0)


@pytest.mark.parametrize("nbytes", [0, 4096, SMALL + (1 << 20), (1 << 20) + 1])
async def test_too_little_and_too_much_memory_is_not_lent(nbytes: int) -> None:
    """Bounded on the lender's side."""
    async with running_node() as a, running_node() as b:
        with pytest.raises(PdserveError) as refused:
            async with borrowing(b, a, nbytes):
                pass
        assert refused.value.reason == "INVALID_REQUEST"
        assert empty(a.kvd)


async def test_a_stranger_is_lent_nothing() -> None:
    """Nor is one of another cluster, which the borrower hears by name."""
    async with running_node(cluster_key=b"one cluster's key") as a, running_node(cluster_key=b"another's key") as b:
        (_, between) = (await measure(b.kvd, a.wire.address)).ways
        assert between.reason == "TICKET_FORGED"
        assert empty(a.kvd, b.kvd)


async def test_who_asked_and_left_leaves_nothing_behind() -> None:
    """The measurement ends in the middle of a copy, on both nodes, and another can be made."""
    async with running_node() as a, running_node() as b:
        b.copies.shut()
        asking = asyncio.create_task(measure(b.kvd, a.wire.address))
        await b.copies.reached()
        assert not empty(b.kvd)
        asking.cancel()
        await asyncio.wait([asking])
        await until(lambda: empty(a.kvd, b.kvd), 5.0)
        b.copies.open()
        assert not used((await measure(b.kvd, a.wire.address)).ways[1]).error


async def test_a_copy_that_never_ends_ends_with_its_time() -> None:
    """Each transport has its own; what is left out says so, and the memory is given back."""
    async with running_kvd(transport="sim") as kvd:
        kvd.faults.script.append(Fault.STALL)
        (way,) = (await measure(kvd, seconds=1.0)).ways
        assert "no time left" in used(way).error
        assert empty(kvd)


async def test_a_daemon_that_stops_takes_back_what_it_lent() -> None:
    """Before its transports close, though the borrower keeps the stream."""
    async with running_node() as b, contextlib.AsyncExitStack() as loan:
        async with running_node() as a:
            await loan.enter_async_context(borrowing(b, a))
            assert not empty(a.kvd)
            stopping = a.kvd.node
        assert stopping._probing._task is None
        assert not stopping._arena._sizes


async def test_a_daemon_that_stops_ends_what_it_measures() -> None:
    """In the middle of a copy; who asked hears that it is gone."""
    async with running_node() as a:
        async with running_node() as b:
            b.faults.script.append(Fault.STALL)
            asking = asyncio.create_task(measure(b.kvd, a.wire.address))
            await until(lambda: not b.faults.script)
            stopping = b.kvd.node
        with pytest.raises(PdserveError):
            await asking
        assert stopping._probing._task is None
        assert not stopping._arena._sizes
        assert empty(a.kvd)


@pytest.mark.parametrize(
    ("peers", "seconds", "reason"),
    [(("nobody",), 1.0, "CONFIG"), (("a:1",), 500.0, "INVALID_REQUEST"), ((), -1.0, "INVALID_REQUEST")],
)
async def test_what_cannot_be_measured_is_refused(peers: tuple[str, ...], seconds: float, reason: str) -> None:
    """An address that is none, and a time that is too long, or none."""
    async with running_node() as a:
        with pytest.raises(PdserveError) as refused:
            await measure(a.kvd, *peers, seconds=seconds)
        assert refused.value.reason == reason


async def test_a_daemon_without_peers_measures_within_its_node() -> None:
    """And says why it has no way to others."""
    async with running_kvd() as kvd:
        (way,) = (await measure(kvd)).ways
        assert (used(way).transport, used(way).error) == ("shm", "")
        with pytest.raises(PdserveError, match="--peer-listen"):
            await measure(kvd, "a:1")


async def test_hand_overs_of_engines_go_on_beside_it() -> None:
    """And memory of an engine decides which kind is measured."""
    async with running_kvd() as kvd, FakeEngine(kvd, seed=1):
        (way,) = (await measure(kvd)).ways
        assert way.kind == "host"
        assert len(kvd.node.mapped) == 1


async def test_a_peer_that_is_not_there() -> None:
    """The way has an error and its reason; what is within the node was measured all the same."""
    async with running_node() as a:
        within, between = (await measure(a.kvd, "127.0.0.1:1", seconds=3.0)).ways
        assert used(within).speeds
        assert (between.reason, len(between.candidates)) == ("UNAVAILABLE", 0)

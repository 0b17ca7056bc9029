"""What operators see of peers: Describe, the table of `pdserve kvd describe`, and the metrics."""

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.cli.kvd_text import describe
from pdserve.kvd.client import Outcome
from pdserve.kvd.metrics import metrics_of
from pdserve.kvd.testing import RunningNode, running_kvd
from pdserve.rpc.channel import aio_channel
from tests.contract.kvd.peers_rig import new_id, pair, until


async def asked(node: RunningNode) -> kvd_pb2.DescribeResponse:
    """What a daemon says of itself."""
    async with aio_channel(f"unix:{node.kvd.socket}") as channel:
        return await kvd_pb2_grpc.OperatorStub(channel).Describe(kvd_pb2.DescribeRequest(), timeout=5.0)


async def listed(node: RunningNode) -> list[kvd_pb2.Transfer]:
    """Its open transfers."""
    async with aio_channel(f"unix:{node.kvd.socket}") as channel:
        request = kvd_pb2.ListTransfersRequest()
        return list((await kvd_pb2_grpc.OperatorStub(channel).ListTransfers(request, timeout=5.0)).transfers)


async def test_both_sides_show_the_link_and_what_is_open_on_it() -> None:
    """The producer's node: whose copies are under way there; the consumer's: whose accepts wait. Guests are not
    counted among a node's own engines."""
    async with pair(grace=0.3) as two:
        tid = new_id()
        two.b.copies.shut()
        two.offer(tid)
        two.accept(tid)
        await two.b.copies.reached()
        a, b = await asked(two.a), await asked(two.b)
        (there,), (here,) = a.peers, b.peers
        assert (a.peer_address, b.peer_address) == (two.a.wire.address, two.b.wire.address)
        assert (here.address, here.kvd_epoch, here.state) == (a.peer_address, a.kvd_epoch, "open")
        assert (there.address, there.kvd_epoch, there.state) == (b.peer_address, b.kvd_epoch, "open")
        assert (there.engines, there.operations, there.relayed) == (1, 1, 0)
        assert (here.engines, here.operations, here.relayed) == (1, 0, 1)
        assert abs(here.clock_ahead_seconds) < 1.0
        assert [one.engine_id for one in a.engines] == [two.p.engine_id]
        assert [one.engine_id for one in b.regions] == [two.d.engine_id]
        table = describe(b, "here")
        assert f"peers reach it at {b.peer_address}" in table
        assert [line.split()[2] for line in table.splitlines() if line.startswith(here.address)] == ["open"]
        (here_listed,), (there_listed,) = await listed(two.b), await listed(two.a)
        assert (here_listed.transfer_id, here_listed.producer_state, list(here_listed.consumer_states)) == (
            tid, "elsewhere", ["relayed"],
        )  # fmt: skip
        assert here_listed.waits_for == f"kvd at {a.peer_address} (open) keeps its book, 1 operation in flight"
        assert here_listed.bytes_wanted == there_listed.bytes_wanted == 4 * 2 * 4096
        two.cut()
        await two.p.end_of("p")
        await two.d.end_of("d")
        two.b.copies.open()
        await until(lambda: two.a.free and two.b.free)
        gone = await asked(two.b)
        assert (list(gone.peers), gone.peers_lost) == ([], 1)
        assert "1 links lost so far" in describe(gone, "here")
        two.mend()


async def test_metrics_count_links_and_what_is_carried_out_elsewhere() -> None:
    """By state; the links that were lost stay counted."""
    async with pair() as two:
        tid = new_id()
        two.offer(tid)
        two.accept(tid)
        assert (await two.d.end_of("d")).outcome is Outcome.LANDED
        text = metrics_of(two.a.kvd.node).expose().decode()
        assert 'pdserve_kvd_peers{state="open"} 1' in text
        assert "pdserve_kvd_peers_lost_total 0" in text
        assert "pdserve_kvd_peer_operations 0" in text


async def test_a_daemon_without_peers_shows_none() -> None:
    """Nor does its table speak of them."""
    async with running_kvd() as kvd, aio_channel(f"unix:{kvd.socket}") as channel:
        said = await kvd_pb2_grpc.OperatorStub(channel).Describe(kvd_pb2.DescribeRequest(), timeout=5.0)
        assert not said.peer_address
        assert "peers" not in describe(said, "here")

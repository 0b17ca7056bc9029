"""Who may be a peer: the cluster key, certificates of one's own authority, and what a daemon refuses to open."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from pdserve.api.kvd.v1 import peer_pb2, peer_pb2_grpc
from pdserve.kvd.client import Outcome
from pdserve.kvd.config import INSECURE_LOOPBACK_KEY, KvdConfig
from pdserve.kvd.peers import door, network, proof, streams
from pdserve.kvd.peers.config import PeerConfig
from pdserve.kvd.peers.link import LinkState
from pdserve.kvd.peers.messages import Greeting
from pdserve.kvd.testing import FakeEngine, RunningNode, running_node
from pdserve.kvd.types import PROTOCOL
from pdserve.rpc.errors import ConfigError
from pdserve.rpc.status import to_error
from pdserve.runtime.config import ClusterKey
from pdserve.runtime.signing import Signer
from tests.contract.kvd.peers_rig import Pair, Stranger, new_id, until

KEY, OTHER_KEY = b"the key of this cluster", b"the key of another one"
GIVEN = ClusterKey(KEY, given=True)


async def hand_over(a: RunningNode, b: RunningNode, key: bytes | None = None) -> tuple[Outcome, str, str]:
    """One transfer from `a` to `b`: how the consumer's end went."""
    async with FakeEngine(a.kvd, seed=1) as p, FakeEngine(b.kvd, seed=2) as d:
        two = Pair(a, b, p, d)
        tid = new_id()
        two.offer(tid)
        two.accept(tid, ticket=p.ticket(tid, key=key))
        end = await d.end_of("d", 15.0)
        assert (end.outcome is Outcome.LANDED) == two.same
        return end.outcome, end.reason, end.detail


async def test_a_peer_with_another_cluster_key_is_refused_and_the_engine_hears_why() -> None:
    """The listener refuses the greeting; the ticket alone, which the consumer's own daemon honours, does not help."""
    async with running_node(cluster_key=KEY) as a, running_node(cluster_key=OTHER_KEY) as b:
        outcome, reason, detail = await hand_over(a, b, key=OTHER_KEY)
        assert (outcome, reason) == (Outcome.FAILED, "TICKET_FORGED")
        assert "cluster's key" in detail
        assert not len(a.kvd.node.desk.links)


async def test_equal_keys_are_peers() -> None:
    """And a transfer lands."""
    async with running_node(cluster_key=KEY) as a, running_node(cluster_key=KEY) as b:
        assert (await hand_over(a, b))[0] is Outcome.LANDED


async def test_a_greeting_that_was_overheard_is_worth_nothing() -> None:
    """It was signed over the nonce of another stream."""
    async with running_node() as a, running_node() as b:
        assert (await hand_over(a, b))[0] is Outcome.LANDED
        (link,) = b.kvd.node.desk.links
        signed = b.kvd.node.network.greeter.greeting(link)
        overheard = proof.sign(b.kvd.signer, signed, proof.new_nonce())
        assert await refusal(a, overheard) == "TICKET_FORGED"
        assert await refusal(a, b"") == "TICKET_FORGED"


async def refusal(node: RunningNode, greeting: bytes | None) -> str:
    """The reason that ends a stream with this greeting; None says nothing."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{node.kvd.node.network.port}") as channel:
        call = peer_pb2_grpc.PeerServiceStub(channel).Connect()
        try:
            await call.read()
            if greeting is not None:
                await call.write(peer_pb2.ConnectRequest(greeting=peer_pb2.SignedGreeting(signed=greeting)))
            while await call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return to_error(error).reason
    return ""


async def test_a_caller_that_says_nothing_is_let_go() -> None:
    """It holds a stream for the time to connect, and no longer."""
    async with running_node(peer=PeerConfig(listen="127.0.0.1:0", connect=0.2)) as a, asyncio.timeout(10.0):
        assert await refusal(a, None) == "INVALID_REQUEST"


async def test_a_greeting_that_is_too_long_is_refused_as_such() -> None:
    """A stranger's first word is bounded; what is longer than a greeting is not looked into."""
    async with running_node() as a, asyncio.timeout(10.0):
        with capture_logs() as logs:
            assert await refusal(a, bytes(door.FIRST_BYTES)) == "INVALID_REQUEST"
            assert await refusal(a, bytes(door.FIRST_BYTES // 2)) == "TICKET_FORGED"
        assert len([entry for entry in logs if entry["event"] == "peer_refused"]) == 1


async def test_strangers_are_bounded_in_number() -> None:
    """Further ones are turned away at once; whoever proves who it is, or leaves, makes room; peers are not counted."""
    settings = PeerConfig(listen="127.0.0.1:0", strangers=2)
    async with running_node(peer=settings) as a, running_node() as b, asyncio.timeout(20.0):
        target = f"127.0.0.1:{a.kvd.node.network.port}"
        async with grpc.aio.insecure_channel(target) as channel:
            stub = peer_pb2_grpc.PeerServiceStub(channel)
            silent = [stub.Connect(), stub.Lend()]
            for call in silent:
                assert await call.read() is not grpc.aio.EOF  # type: ignore[attr-defined]  # both are calls
            assert await refusal(a, None) == "OVERLOADED"
            silent[0].cancel()  # type: ignore[attr-defined]
            await until(lambda: a.kvd.node.network._door.strangers == 1)
            assert (await hand_over(a, b))[0] is Outcome.LANDED
            assert a.kvd.node.network._door.strangers == 1
            silent[1].cancel()  # type: ignore[attr-defined]
        await until(lambda: not a.kvd.node.network._door.strangers)


class Silent(Stranger):
    """Is of the cluster, promises to speak, and says nothing more; its kernel and gRPC answer all the same."""

    def __init__(self, beat_ms: int) -> None:
        self.address = ""
        self.calls = 0
        self._beat_ms = beat_ms

    async def Connect(self, request_iterator: Any, context: object) -> AsyncIterator[peer_pb2.ConnectResponse]:
        """See peer.proto."""
        self.calls += 1
        if self.calls > 1:
            await asyncio.Event().wait()
        nonce, signer = proof.new_nonce(), Signer(INSECURE_LOOPBACK_KEY)
        yield peer_pb2.ConnectResponse(challenge=peer_pb2.Challenge(nonce=nonce, address=self.address))
        first = await anext(request_iterator)
        _, theirs = proof.check(signer, first.greeting.signed, nonce)
        greeting = Greeting("silent", "", PROTOCOL, "silent", self.address, "boot", 0, 0, 1, beat_ms=self._beat_ms)
        yield peer_pb2.ConnectResponse(welcome=peer_pb2.SignedGreeting(signed=proof.sign(signer, greeting, theirs)))
        await asyncio.Event().wait()


@pytest.mark.parametrize("beat_ms", [20, 0])
async def test_a_daemon_that_hangs_behind_a_living_connection_is_given_up(beat_ms: int) -> None:
    """Its silence is noticed, also where it has not said how often it speaks, and after the grace the link is lost."""
    server, silent = grpc.aio.server(), Silent(beat_ms)
    peer_pb2_grpc.add_PeerServiceServicer_to_server(silent, server)
    silent.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        settings = PeerConfig(listen="127.0.0.1:0", silence=0.3)
        async with running_node(peer=settings, grace=0.3) as a, asyncio.timeout(20.0):
            node = a.kvd.node
            with capture_logs() as logs:
                link = node.desk.links.towards(silent.address, node.now())
                node.network.kick(node.now())
                await until(lambda: link.state is LinkState.OPEN)
                await until(lambda: not len(node.desk.links), 5.0)
                (lost,) = [entry for entry in logs if entry["event"] == "peer_lost"]
                assert "it has said nothing for" in lost["detail"]
            assert node.desk.lost == 1
            assert not node.defects
    finally:
        await server.stop(0)


async def test_idle_daemons_stay_linked() -> None:
    """Each speaks while it has nothing to say: for longer than the silence that is borne."""
    settings = PeerConfig(listen="127.0.0.1:0", silence=0.2)
    async with running_node(peer=settings) as a, running_node(peer=settings) as b:
        assert (await hand_over(a, b))[0] is Outcome.LANDED
        await asyncio.sleep(4.0)  # three pauses, which is the least that is borne, and one
        assert [link.resumed for node in (a, b) for link in node.kvd.node.desk.links] == [0, 0]
        assert (await hand_over(a, b))[0] is Outcome.LANDED


async def test_a_daemon_under_another_address_than_was_called_is_refused() -> None:
    """One pair has one stream only if both mean the same by an address: the call is given up, and says so."""
    async with running_node() as a, running_node() as b, FakeEngine(a.kvd, seed=1) as p, FakeEngine(b.kvd, seed=2) as d:
        a.kvd.node.desk.address = "another:1"
        Pair(a, b, p, d).accept(new_id())
        end = await d.end_of("d")
        assert end.reason == "CONFIG"
        assert "says that it is at another:1" in end.detail


class Leaves(Stranger):
    """Challenges, and is gone."""

    async def Connect(self, request_iterator: object, context: object) -> AsyncIterator[peer_pb2.ConnectResponse]:
        """See peer.proto."""
        yield peer_pb2.ConnectResponse(challenge=peer_pb2.Challenge(nonce=bytes(16), address=self.address))

    address = ""


async def test_a_stream_that_is_over_before_the_greeting_is_a_call_that_came_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As any other: it is logged, and called again after a pause."""
    read = streams.answer

    async def read_late(call: streams.Call) -> peer_pb2.ConnectResponse:
        message = await read(call)
        await call.wait_for_connection()
        while not call.done():  # noqa: ASYNC110  # grpc's own tasks end it
            await asyncio.sleep(0)
        return message

    monkeypatch.setattr(network, "answer", read_late)
    server, leaves = grpc.aio.server(), Leaves()
    peer_pb2_grpc.add_PeerServiceServicer_to_server(leaves, server)
    leaves.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with running_node() as a, asyncio.timeout(10.0):
        node = a.kvd.node
        link = node.desk.links.towards(leaves.address, node.now())
        node.network.kick(node.now())
        await until(lambda: link.failures > 0)
        assert link.last_error is not None
        assert "before it was greeted" in link.last_error.message
        assert not node.defects
    await server.stop(0)


# -- TLS ------------------------------------------------------------------------------------


class Authority:
    """Signs certificates of nodes, with the openssl of this machine."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self.cert, self._key = self._folder / "ca.pem", self._folder / "ca.key"
        self._run("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", self._key, "-out", self.cert,
                  "-days", "2", "-subj", f"/CN={name}")  # fmt: skip

    def peer(self, node: str, ca: "Authority | None" = None) -> PeerConfig:
        """Settings of a node under this authority, that trusts it or another one."""
        cert, key, ask = (self._folder / f"{node}.{kind}" for kind in ("pem", "key", "csr"))
        names = self._folder / "names"
        names.write_text("subjectAltName=IP:127.0.0.1\n")
        self._run("req", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", ask, "-subj", f"/CN={node}")
        self._run("x509", "-req", "-in", ask, "-CA", self.cert, "-CAkey", self._key, "-CAcreateserial", "-out", cert,
                  "-days", "2", "-extfile", names)  # fmt: skip
        return PeerConfig("127.0.0.1:0", tls_cert=cert, tls_key=key, tls_ca=(ca or self).cert, connect=1.5)

    @staticmethod
    def _run(*words: object) -> None:
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=20)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """Real certificates."""
    return Authority(tmp_path, "ours")


async def test_mutual_tls(authority: Authority) -> None:
    """Two nodes of one authority are peers."""
    async with running_node(peer=authority.peer("a")) as a, running_node(peer=authority.peer("b")) as b:
        assert (await hand_over(a, b))[0] is Outcome.LANDED


@pytest.mark.parametrize("wrong", ["its certificate", "what it trusts", "no TLS"])
async def test_a_peer_of_another_authority_is_refused(authority: Authority, tmp_path: Path, wrong: str) -> None:
    """Neither side talks to one whose certificate its own authority did not sign; nor to one without TLS."""
    theirs = Authority(tmp_path, "theirs")
    peer = {
        "its certificate": theirs.peer("b", ca=authority),
        "what it trusts": authority.peer("b", ca=theirs),
        "no TLS": PeerConfig("127.0.0.1:0", connect=1.5),
    }[wrong]
    async with running_node(peer=authority.peer("a")) as a, running_node(peer=peer) as b:
        outcome, reason, detail = await hand_over(a, b)
        assert (outcome, reason) == (Outcome.FAILED, "PEER_LOST")
        assert "not reached within 1.5 s" in detail
        assert not len(a.kvd.node.desk.links)


# -- settings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "key", "insecure", "words"),
    [
        ({"listen": "0.0.0.0:1"}, True, True, "--peer-address"),
        ({"listen": "10.0.0.1:1"}, False, True, "--cluster-key-file"),
        ({"listen": "10.0.0.1:1"}, True, False, "--insecure"),
        ({"listen": "nothing"}, True, True, "HOST:PORT"),
        ({"listen": "10.0.0.1:1", "address": "x"}, True, True, "HOST:PORT"),
        ({"address": "10.0.0.1:1"}, True, True, "--peer-listen"),
        ({"listen": "10.0.0.1:1", "tls_cert": Path("c")}, True, True, "all of"),
        ({"listen": "127.0.0.1:0", "connect": 0}, True, True, "above 0"),
        ({"listen": "127.0.0.1:0", "silence": 0}, True, True, "above 0"),
        ({"listen": "127.0.0.1:0", "strangers": 0}, True, True, "above 0"),
    ],
)
def test_what_cannot_work_or_is_open_to_everybody_is_refused_at_the_start(
    tmp_path: Path, peer: dict[str, object], key: bool, insecure: bool, words: str
) -> None:
    """With the flag that would mend it."""
    given = GIVEN if key else KvdConfig(tmp_path).cluster_key
    with pytest.raises(ConfigError) as refused:
        KvdConfig(tmp_path, peer=PeerConfig(**peer), cluster_key=given, insecure=insecure)  # type: ignore[arg-type]
    assert words in refused.value.message


def test_what_is_protected_may_be_opened(tmp_path: Path) -> None:
    """TLS and a key; in clear where that was asked for; loopback as it is."""
    tls = {"tls_cert": tmp_path, "tls_key": tmp_path, "tls_ca": tmp_path}
    KvdConfig(tmp_path, peer=PeerConfig("10.0.0.1:1", **tls), cluster_key=GIVEN)  # type: ignore[arg-type]
    KvdConfig(tmp_path, peer=PeerConfig("10.0.0.1:1"), cluster_key=GIVEN, insecure=True)
    KvdConfig(tmp_path, peer=PeerConfig("[::1]:0"))
    assert PeerConfig("[::1]:0").advertised(5) == "[::1]:5"
    assert PeerConfig("0.0.0.0:0", "node:7").advertised(5) == "node:7"


async def test_a_certificate_that_is_not_there_is_said_at_the_start(tmp_path: Path) -> None:
    """Not at the first peer."""
    gone = tmp_path / "gone"
    peer = PeerConfig("127.0.0.1:0", tls_cert=gone, tls_key=gone, tls_ca=gone)
    with pytest.raises(ConfigError, match="cannot be read"):
        async with running_node(peer=peer):
            pass


async def test_a_ticket_from_another_node_needs_peers_here() -> None:
    """A daemon without --peer-listen says so, to whoever brought the ticket."""
    async with running_node() as a, running_node() as b:
        b.kvd.node.desk.address = ""
        outcome, reason, detail = await hand_over(a, b)
        assert (outcome, reason) == (Outcome.FAILED, "TRANSFER_FAILED")
        assert "--peer-listen" in detail

"""The pure parts of the transport mori: how copies from one peer go on, by hand-made reads and times."""

import importlib.util
import os
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvd.__main__ import parse
from pdserve.kvd.config import MoriBackend, MoriConfig, TransportName
from pdserve.kvd.plan import Offsets, Runs
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.chunks import PIECE_BYTES, Cutter
from pdserve.kvd.transport.mori import MoriTransport
from pdserve.kvd.transport.mori_engine import nothing_posted
from pdserve.kvd.transport.mori_jobs import CHUNK_RUNS, Done, Full, Job, Peer
from pdserve.kvd.transport.mori_pieces import split
from pdserve.kvd.transport.mori_process import callers, environment
from pdserve.kvd.transport.mori_wire import Registered, read_card, write_card
from pdserve.rpc.errors import ConfigError, TransferFailed


class FakeRead:
    """A read that ends when it is told to."""

    def __init__(self, runs: int, nbytes: int) -> None:
        self.runs = runs
        self.nbytes = nbytes
        self.there = False
        self.error: Exception | None = None

    def done(self) -> bool:
        """See mori_jobs.Reading."""
        if self.error is not None:
            raise self.error
        return self.there


class Queue:
    """Where reads are begun: `room` for so many work requests."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.room = room
        self.reads: list[FakeRead] = []
        self.asked = 0

    def begin(self, src: Offsets, dst: Offsets, length: Offsets) -> FakeRead:
        """See mori_jobs.Begin."""
        self.asked += 1
        if sum(read.runs for read in self.reads if not read.there) + len(src) > self.room:
            raise Full("SQ full")
        self.reads.append(FakeRead(len(src), int(length.sum())))
        return self.reads[-1]

    def finish(self) -> None:
        """Everything that was begun is there."""
        for read in self.reads:
            read.there = True

    @property
    def flying(self) -> list[FakeRead]:
        """What is not there."""
        return [read for read in self.reads if not read.there]


def blocks(number: int, nbytes: int = 4096) -> Runs:
    """So many, each apart from the next."""
    at = np.arange(number, dtype=np.uint64) * np.uint64(2 * nbytes)
    return Runs(at, at, np.full(number, nbytes, np.uint64))


def test_copies_keep_their_order_and_end_with_their_last_byte() -> None:
    """The second begins when the first is over; each is told once."""
    peer, queue = Peer("p", 5.0), Queue()
    peer.add(Job(1, [(queue.begin, blocks(10))]), 0.0)
    peer.add(Job(2, [(queue.begin, blocks(20))]), 0.0)
    assert peer.step(0.1) == (False, [])
    assert [read.runs for read in queue.reads] == [10]
    queue.finish()
    news, ended = peer.step(0.2)
    assert news
    assert [(done.copy_id, done.nbytes, done.cancelled) for done in ended] == [(1, 40960, False)]
    assert ended[0].seconds == pytest.approx(0.2)
    assert [read.runs for read in queue.reads] == [10, 20]
    queue.finish()
    assert [done.copy_id for done in peer.step(0.3)[1]] == [2]
    assert not peer.busy


def test_two_chunks_are_in_flight_and_none_is_too_long() -> None:
    """By bytes and by requests, however small the blocks are."""
    peer, queue = Peer("p", 5.0), Queue()
    peer.add(Job(1, [(queue.begin, blocks(5 * CHUNK_RUNS, 16))]), 0.0)
    ended: list[Done] = []
    for step in range(6):
        ended += peer.step(float(step))[1]
        assert len(queue.flying) <= 2
        assert all(read.runs <= CHUNK_RUNS for read in queue.reads)
        queue.finish()
    assert [done.nbytes for done in ended] == [5 * CHUNK_RUNS * 16]


def test_a_cancelled_copy_ends_when_what_was_begun_is_there() -> None:
    """Not before: it is still written. The one behind it follows."""
    peer, queue = Peer("p", 5.0), Queue()
    peer.add(Job(1, [(queue.begin, blocks(9, PIECE_BYTES))]), 0.0)
    peer.add(Job(2, [(queue.begin, blocks(1))]), 0.0)
    peer.step(0.0)
    peer.cancel(1)
    assert peer.step(0.1) == (False, [])
    queue.finish()
    _, ended = peer.step(0.2)
    assert [(done.copy_id, done.nbytes, done.cancelled) for done in ended] == [(1, 8 * PIECE_BYTES, True)]
    peer.cancel(2)
    queue.finish()
    assert [(done.copy_id, done.cancelled) for done in peer.step(0.3)[1]] == [(2, False)]


def test_a_cancelled_copy_that_was_not_begun_is_terminal_at_once() -> None:
    """Wherever it stands, and also behind a peer that is silent; those before and after it go on."""
    peer, queue = Peer("p", 5.0), Queue()
    for copy_id in (1, 2, 3):
        peer.add(Job(copy_id, [(queue.begin, blocks(copy_id))]), 0.0)
    peer.step(0.0)
    assert peer.cancel(2) == Done(2, 0, 0.0, True)
    assert peer.cancel(2) is None
    assert peer.cancel(1) is None
    assert peer.step(0.1) == (False, [])
    queue.finish()
    assert [done.copy_id for done in peer.step(0.2)[1]] == [1]
    queue.finish()
    assert [(done.copy_id, done.nbytes) for done in peer.step(0.3)[1]] == [(3, 3 * 4096)]
    assert [read.runs for read in queue.reads] == [1, 3]


def test_a_full_queue_is_asked_again_later_and_later() -> None:
    """Each pause twice the one before, up to 20 ms; room ends it, and no chunk is lost."""
    peer, queue = Peer("p", 5.0), Queue(room=0)
    peer.add(Job(1, [(queue.begin, blocks(1))]), 0.0)
    asked = []
    for now in np.arange(0.0, 0.2, 0.0001):
        before = queue.asked
        peer.step(float(now))
        if queue.asked > before:
            asked.append(float(now))
    pauses = np.diff(asked)
    assert len(asked) < 20
    assert pauses[0] < 0.0003
    assert (np.diff(pauses) > -0.0002).all()
    assert pauses[-1] == pytest.approx(0.02, abs=0.0003)
    queue.room = 1
    peer.step(1.0)
    queue.finish()
    assert peer.step(1.1)[1][0].nbytes == 4096


def test_a_queue_that_never_has_room_is_a_stall() -> None:
    """The deadline of back-pressure is that of silence."""
    peer, queue = Peer("p", 5.0), Queue(room=0)
    peer.add(Job(1, [(queue.begin, blocks(1))]), 10.0)
    peer.step(15.0)
    with pytest.raises(TransferFailed, match="no byte came for 5 s from p"):
        peer.step(15.1)


def test_a_full_queue_may_be_told_late() -> None:
    """By a read that was begun and failed for want of room: it is begun again, and its bytes count once."""
    peer, queue = Peer("p", 5.0), Queue()
    peer.add(Job(1, [(queue.begin, blocks(1))]), 0.0)
    peer.step(0.0)
    queue.reads[0].error = Full("SQ full")
    peer.step(0.1)
    peer.step(0.2)
    assert len(queue.reads) == 2
    queue.reads[1].there = True
    assert peer.step(0.3)[1][0].nbytes == 4096


@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 2**32))
def test_a_short_queue_gets_every_run_once(room: int, number: int, seed: int) -> None:
    """Chunks are halved until they fit, at once; in whatever order reads end, all is there."""
    random = np.random.default_rng(seed)
    peer, queue, now = Peer("p", 5.0), Queue(room), 0.0
    got: list[int] = []

    def begin(src: Offsets, dst: Offsets, length: Offsets) -> FakeRead:
        read = queue.begin(src, dst, length)
        got.extend(src.tolist())
        return read

    plan = blocks(number)
    peer.add(Job(1, [(begin, plan)]), now)
    ended: list[Done] = []
    while not ended:
        now += 0.02
        ended = list(peer.step(now)[1])
        if queue.flying and random.random() < 0.8:
            queue.flying[0].there = True
    assert sorted(got) == plan.src.tolist()
    assert ended[0].nbytes == plan.total


def test_silence_is_counted_from_the_last_news_and_only_while_somebody_looked() -> None:
    """A slow copy does not stall; the time of a call that blocked is not the peer's."""
    peer, queue = Peer("p", 5.0), Queue()
    peer.add(Job(1, [(queue.begin, blocks(100, PIECE_BYTES))]), 100.0)
    for now in (100.0, 104.0, 108.0):
        peer.step(now)
        queue.finish()
    peer.step(112.0)
    peer.step(116.9)
    peer.waited(4.0)
    peer.step(120.9)
    with pytest.raises(TransferFailed, match="no byte came"):
        peer.step(121.1)


def test_a_read_that_failed_fails_the_peer() -> None:
    """With the library's words."""
    peer, queue = Peer("p", 5.0), Queue()
    peer.add(Job(1, [(queue.begin, blocks(1))]), 0.0)
    peer.step(0.0)
    queue.reads[0].error = TransferFailed("mori: remote access error")
    with pytest.raises(TransferFailed, match="remote access error"):
        peer.step(0.1)


@pytest.mark.parametrize(
    ("words", "requests", "proven"),
    [
        ("SQ full (batch): ep=0 depth=8000 requested=200 max=8192 Hint: if completions", 200, True),
        ("SQ full (batch): ep=0 depth=8000 requested=193 max=8192 Hint: if completions", 200, True),  # some are merged
        ("SQ full (batch): ep=0 depth=128 requested=72 max=128", 200, False),  # 128 were posted before
        ("SQ full: no room in the send queue", 200, False),
        ("ibv_post_send failed with 12: Cannot allocate memory (posted 0/200 WRs) Hint: ENOMEM", 200, True),
        ("ibv_post_send failed with 12: Cannot allocate memory (posted 3/200 WRs)", 200, False),
        ("ibv_post_send failed with 12: Cannot allocate memory (posted 0/72 WRs)", 200, False),
        ("ENOMEM: Cannot allocate memory", 1, False),
        ("ibv_post_send failed with 22: Invalid argument (posted 0/200 WRs)", 200, False),
        ("EP is degraded, rejecting new submissions", 1, False),
    ],
)
def test_no_room_is_what_proves_that_nothing_was_posted(words: str, requests: int, proven: bool) -> None:
    """Everything else may be under way, and is a failure."""
    assert nothing_posted(words, requests) == proven


@given(st.integers(1, 50), st.integers(1, 9))
def test_a_cutter_hands_out_no_more_pieces_than_asked(number: int, most: int) -> None:
    """And all of them in the end."""
    cutter, found = Cutter(blocks(number)), 0
    while (chunk := cutter.next(1 << 40, most)) is not None:
        assert 0 < len(chunk[0]) <= most
        found += len(chunk[0])
    assert found == number


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.data(),
)
def test_runs_are_split_at_the_borders_of_pieces(ours: list[int], theirs: list[int], data: st.DataObject) -> None:
    """Every byte once, from its place to its place; no part leaves its pieces, and no pair comes twice."""
    size = min(sum(ours), sum(theirs))
    at = data.draw(st.lists(st.integers(0, size - 1), max_size=8))
    length = [data.draw(st.integers(1, size - start)) for start in at]
    to = [data.draw(st.integers(0, sum(theirs) - n)) for n in length]
    runs = Runs(*(np.array(column, np.uint64) for column in (at, to, length)))
    found = split(runs, ours, theirs)
    moved = []
    for stretch in found:
        columns = (stretch.runs.src, stretch.runs.dst, stretch.runs.length)
        for a, b, n in zip(*(column.tolist() for column in columns), strict=True):
            assert a + n <= ours[stretch.src]
            assert b + n <= theirs[stretch.dst]
            base = sum(ours[: stretch.src]), sum(theirs[: stretch.dst])
            moved += [(base[0] + a + i, base[1] + b + i) for i in range(n)]
    asked = [(a + i, b + i) for a, b, n in zip(at, to, length, strict=True) for i in range(n)]
    assert sorted(moved) == sorted(asked)
    pairs = [(stretch.src, stretch.dst) for stretch in found]
    assert len(pairs) == len(set(pairs)) or len(ours) == len(theirs) == 1


def test_a_card_says_where_and_who() -> None:
    """And comes back whole; one of a region of another size is refused, as mori would."""
    parts = (Registered(40, b"a"), Registered(60, b"b"))
    card = read_card(write_card("serves-1", "rdma", b"engine", parts), "rdma", 100)
    assert (card.name, card.size, card.engine, card.memory) == ("serves-1", 100, b"engine", parts)
    for size in (99, 101):
        with pytest.raises(TransferFailed, match=f"for a region of {size}"):
            read_card(write_card("serves-1", "rdma", b"engine", parts), "rdma", size)


def test_variables_that_would_go_before_what_kvd_needs_do_not_reach_mori() -> None:
    """Others do, as the way to set what has no flag; the flags' own are set."""
    around = {"MORI_IO_ENABLE_NOTIFICATION": "1", "MORI_DISABLE_AUTO_XGMI": "0", "MORI_IB_GID_INDEX": "3", "HOME": "/"}
    around |= {"MORI_IO_POST_BATCH_SIZE": "64", "MORI_IO_QP_PER_TRANSFER": "4", "MORI_IO_ENABLE_CHUNKING": "1"}
    made = environment(MoriConfig(devices="mlx5_1", connect=1.5), around)
    assert made == {
        "MORI_IB_GID_INDEX": "3",
        "HOME": "/",
        "MORI_IO_CP_TIMEOUT_MS": "1500",
        "MORI_RDMA_DEVICES": "mlx5_1",
    }
    assert "MORI_RDMA_DEVICES" not in environment(MoriConfig(), {})


@pytest.mark.parametrize(
    "make",
    [
        lambda: MoriConfig(stall=0.0),
        lambda: MoriConfig(connect=float("nan")),
        lambda: MoriConfig(idle=-1.0),
        lambda: MoriConfig(connect=5.0, start=5.0),
        lambda: MoriConfig(host="0.0.0.0"),
        lambda: MoriConfig(host="node-a"),
        lambda: MoriConfig(host="1.1.1.1"),
    ],
)
def test_settings_that_cannot_work_are_refused(make: Callable[[], MoriConfig]) -> None:
    """No deadline, one that ends before what it waits for, an address that mori cannot bind or anyone can reach."""
    with pytest.raises(ConfigError, match="mori"):
        make()


def test_flags_reach_the_settings(tmp_path: Path) -> None:
    """Each as what it is, also the one that is one of a few words."""
    told = "--transport mori --mori-host 10.0.0.1 --mori-backend xgmi --mori-spin --mori-idle 3 --mori-devices mlx5_0"
    config, _ = parse(["--state-dir", str(tmp_path), *told.split()])
    assert config.transport is TransportName.MORI
    assert config.mori == MoriConfig(MoriBackend.XGMI, "10.0.0.1", "mlx5_0", idle=3.0, spin=True)
    assert config.mori.backend is MoriBackend.XGMI


def test_callers_of_a_port_are_counted() -> None:
    """One that is connected and not accepted, one that is; not the port itself, nor another one's."""
    with socket.socket() as door, socket.socket() as other:
        for one in (door, other):
            one.bind(("127.0.0.1", 0))
            one.listen()
        port = door.getsockname()[1]
        assert callers(os.getpid(), port) == 0
        with socket.create_connection(door.getsockname()), socket.create_connection(other.getsockname()):
            assert callers(os.getpid(), port) == 1
            accepted, _ = door.accept()
            assert callers(os.getpid(), port) == 1
            accepted.close()


def test_without_mori_the_transport_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the daemon's start, by name."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    arena = Arena([1 << 20])
    with pytest.raises(ConfigError, match=r"not installed: it comes with the extra `mori`"):
        MoriTransport(arena, MoriConfig())
    arena.close()

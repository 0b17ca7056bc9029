"""The pure parts of the transport nixl: how a copy is cut up, what is sent, and what UCX's words mean."""

import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kvd.config import NixlConfig
from pdserve.kvd.plan import Offsets, Runs
from pdserve.kvd.transport import child_wire as wire
from pdserve.kvd.transport.arena import Arena
from pdserve.kvd.transport.chunks import PIECE_BYTES, Cutter, Pace
from pdserve.kvd.transport.nixl import NixlTransport
from pdserve.kvd.transport.nixl_lanes import UNKNOWN, plain_words, read_lanes
from pdserve.kvd.transport.nixl_process import environment
from pdserve.kvd.transport.nixl_wire import read_card, write_card
from pdserve.rpc.errors import ConfigError, TransferFailed

CMA = """\
[1796053376.0] [vm:24903:0]   +-------+--------+-------------+-----------------------------------+
[1796053376.0] [vm:24903:0]   | reads-1 intra-node cfg#1                                         |
[1796053376.0] [vm:24903:0]   | active message by ucp_am_send*(multi) from host memory           |
[1796053376.0] [vm:24903:0]   | 0..626 | short              | tcp/lo                             |
[1796053376.0] [vm:24903:0]   +-------+--------+-------------+-----------------------------------+
[1796053376.0] [vm:24903:0]   | reads-1 intra-node cfg#1                                         |
[1796053376.0] [vm:24903:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1796053376.0] [vm:24903:0]   | Range  | Description |                 Config                   |
[1796053376.0] [vm:24903:0]   | 0..inf | zero-copy   | cma/memory                               |
[1796053376.0] [vm:24903:0]   +-------+--------+-------------+-----------------------------------+
[1796053377.0] [vm:24903:0]   ucp_worker.c:2000 UCX  WARN  something | happened
"""
RDMA = """\
[1.0] [n:1:0]   | remote memory read by ucp_get*(multi) into host memory from host |
[1.0] [n:1:0]   | 0..8191  | short       | rc_mlx5/mlx5_0:1                      |
[1.0] [n:1:0]   | 8K..inf  | zero-copy   | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1 |
"""


@st.composite
def some_runs(draw: st.DrawFn) -> Runs:
    """Runs that touch or do not."""
    lengths = draw(st.lists(st.integers(1, 50), min_size=1, max_size=20))
    gaps = draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    starts = np.cumsum([0, *lengths[:-1]]) + np.cumsum(gaps)
    return Runs(starts.astype(np.uint64), (starts + 1000).astype(np.uint64), np.array(lengths, np.uint64))


def pairs(pieces: Iterator[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Byte by byte: from where to where."""
    return [(at + i, to + i) for at, to, length in pieces for i in range(length)]


def cut(runs: Runs, piece: int, limits: list[int]) -> list[tuple[Offsets, Offsets, Offsets]]:
    """Chunks of at most each limit in turn."""
    cutter = Cutter(runs, piece)
    found: list[tuple[Offsets, Offsets, Offsets]] = []
    while (chunk := cutter.next(limits[len(found) % len(limits)])) is not None:
        assert 0 < int(chunk[2].sum()) <= limits[len(found) % len(limits)]
        found.append(chunk)
    return found


@given(some_runs(), st.integers(1, 60), st.lists(st.integers(0, 100), min_size=1))
def test_chunks_are_the_runs_and_none_is_too_long(runs: Runs, piece: int, more: list[int]) -> None:
    """Every byte once, in order, to its place; each chunk has something and at most what was asked for."""
    found = cut(runs, piece, [piece + extra for extra in more])
    got = [p for chunk in found for p in zip(*(column.tolist() for column in chunk), strict=True)]
    asked = zip(runs.src.tolist(), runs.dst.tolist(), runs.length.tolist(), strict=True)
    assert pairs(iter(got)) == pairs(asked)


def test_chunks_take_as_long_whatever_the_speed() -> None:
    """Within bounds: a piece, and 64 MiB. What a short copy took says nothing."""
    pace = Pace()
    began = pace.chunk_bytes
    pace.seen(PIECE_BYTES, 1.0)
    pace.seen(100 * PIECE_BYTES, 0.0)
    assert pace.chunk_bytes == began
    for rate, chunk in ((1e9, 4_000_000), (2e9, 8_000_000), (1e3, PIECE_BYTES), (1e12, 64 << 20)):
        pace.seen(1 << 30, (1 << 30) / rate)
        assert abs(pace.chunk_bytes - chunk) <= 1


def test_nothing_has_no_chunks() -> None:
    """An empty plan."""
    empty = np.empty(0, np.uint64)
    assert cut(Runs(empty, empty, empty), 10, [10]) == []


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 13))
def test_a_stream_is_cut_into_the_messages_that_were_sent(parts: list[bytes], step: int) -> None:
    """However it arrives."""
    sent: list[wire.FromWorker] = [wire.Answer(i, data) for i, data in enumerate(parts)]
    stream = b"".join(wire.framed(message) for message in sent)
    frames = wire.Frames()
    got = [body for at in range(0, len(stream), step) for body in frames.feed(stream[at : at + step])]
    assert [wire.decode_from_worker(body) for body in got] == sent


def test_a_card_says_where_and_who() -> None:
    """And comes back whole; a longer region than it was made for is refused."""
    card = read_card(write_card("serves-1", 4096, 100, b"md"), 100)
    assert (card.agent, card.address, card.size, card.metadata) == ("serves-1", 4096, 100, b"md")
    with pytest.raises(TransferFailed, match="for a region of 101"):
        read_card(write_card("serves-1", 4096, 100, b"md"), 101)


def test_lanes_are_those_of_reads() -> None:
    """Not those of the active messages beside them; each once; unknown where UCX says nothing of them."""
    assert read_lanes(CMA) == "cma/memory (zero-copy)"
    assert read_lanes(RDMA) == (
        "rc_mlx5/mlx5_0:1 (short), 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1 (zero-copy)"
    )
    assert read_lanes(CMA + RDMA).startswith("rc_mlx5")
    assert read_lanes("") == read_lanes("Segmentation fault") == UNKNOWN


def test_the_words_of_a_process_are_what_is_no_table() -> None:
    """A warning with a bar in it stays."""
    assert plain_words(CMA).splitlines() == [CMA.splitlines()[-1]]


def test_the_configuration_goes_before_the_environment() -> None:
    """UCX's settings of the daemon's environment hold where no flag says otherwise."""
    around = {"UCX_TLS": "rc", "UCX_NET_DEVICES": "mlx5_0:1", "HOME": "/root"}
    made = environment(NixlConfig(tls="tcp"), around)
    assert (made["UCX_TLS"], made["UCX_NET_DEVICES"], made["HOME"]) == ("tcp", "mlx5_0:1", "/root")


@pytest.mark.parametrize(("poll", "stall"), [(0.0, 5.0), (0.0009, 5.0), (0.01, 0.0), (0.01, float("nan"))])
def test_settings_that_cannot_work_are_refused(poll: float, stall: float) -> None:
    """A thread that never sleeps, a peer that is always silent."""
    with pytest.raises(ConfigError, match="nixl"):
        NixlConfig(poll=poll, stall=stall)


def test_without_nixl_the_transport_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the daemon's start, by name."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    arena = Arena([1 << 20])
    with pytest.raises(ConfigError, match=r"not installed: it comes with the extra `nixl`"):
        NixlTransport(arena, NixlConfig())
    arena.close()

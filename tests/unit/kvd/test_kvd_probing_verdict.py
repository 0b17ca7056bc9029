"""What is said of a measurement: names, nominal rates, warnings, and the way that a hand-over would take."""

from collections.abc import Sequence

import pytest

from pdserve.kvd.probing.codec import decode_device, encode, encode_device
from pdserve.kvd.probing.values import Candidate, Device, Measured, Offer, Report, Speed, Way
from pdserve.kvd.probing.verdict import names, nominal, warnings
from pdserve.kvd.probing.ways import left_out, way
from pdserve.kvd.transport.port import Capabilities
from pdserve.kvd.types import MemoryKind

HOST, CUDA = MemoryKind.HOST, MemoryKind.CUDA
TCP = "tcp/eth0 (software emulation)"
IB = "rc_mlx5/mlx5_0:1/path0 (zero-copy)"
RAILS = "50% on rc_mlx5/mlx5_0:1/path0 and 50% on rc_mlx5/mlx5_1:1/path0 (zero-copy)"
ETH = Device("eth0", "net", 10 * 10**9, True)
MLX = (Device("mlx5_0:1", "rdma", 100 * 10**9, True), Device("mlx5_1:1", "rdma", 100 * 10**9, True))
DOWN = Device("mlx5_0:1", "rdma", 100 * 10**9, False)


@pytest.mark.parametrize(
    ("transport", "lanes", "called"),
    [
        ("shm", "", ("shm",)),
        ("nixl", "", ("nixl",)),
        ("nixl", "unknown", ("nixl",)),
        ("nixl", TCP, ("nixl", "tcp")),
        ("nixl", "cma/memory (zero-copy)", ("nixl", "cma")),
        ("nixl", IB, ("nixl", "rdma", "rc_mlx5")),
        ("nixl", RAILS, ("nixl", "rdma", "rc_mlx5")),
        ("nixl", "dc_mlx5/mlx5_0:1 (zero-copy)", ("nixl", "rdma", "dc_mlx5")),
        ("nixl", "ud_verbs/rxe0:1 (copy-out)", ("nixl", "rdma", "ud_verbs")),
        ("nixl", "rc/mlx5_0:1", ("nixl", "rdma", "rc")),
        ("nixl", "rocm_ipc/0 (zero-copy)", ("nixl", "rocm_ipc")),
        ("mori", "", ("mori", "rdma")),
    ],
)
def test_what_a_transport_may_be_called(transport: str, lanes: str, called: tuple[str, ...]) -> None:
    """Its own name, the family of its lanes, and UCX's names; nothing that merely begins like RDMA."""
    assert names(Candidate(transport, True, "", Measured(lanes)), "a:1") == called


def test_mori_is_rdma_only_where_it_brings_bytes_from_a_peer() -> None:
    """Within a node it may be XGMI, and one that can only do that is not between nodes."""
    assert names(Candidate("mori", True), "") == ("mori",)
    assert names(Candidate("mori", False, "not between nodes"), "a:1") == ("mori",)
    assert names(Candidate("mori", False, "nixl comes first", measured()), "a:1") == ("mori", "rdma")
    assert names(Candidate("nixl", True, "", Measured(IB)), "") == ("nixl", "rdma", "rc_mlx5")


@pytest.mark.parametrize(
    ("lanes", "devices", "rate"),
    [
        (TCP, [ETH, *MLX], 1.25e9),
        (IB, [ETH, *MLX], 12.5e9),
        (RAILS, [ETH, *MLX], 25e9),
        (TCP, [Device("eth0", "net", 0, True)], 0.0),
        (RAILS, [MLX[0], Device("mlx5_1:1", "rdma", 0, True)], 0.0),
        ("cma/memory (zero-copy)", [ETH], 0.0),
        ("", [ETH], 0.0),
    ],
)
def test_the_nominal_rate_of_lanes(lanes: str, devices: Sequence[Device], rate: float) -> None:
    """Of the devices in them, rails added up; nothing where one of them does not say."""
    assert nominal(lanes, devices) == rate


def measured(rate: float = 1e9, lanes: str = "", error: str = "") -> Measured:
    """Copies at a rate in bytes a second."""
    speeds = (Speed(1 << 20, 64 << 20, (64 << 20) / rate),) if rate else ()
    return Measured(lanes, 1e-4, speeds, error)


def far(of: Measured, there: Sequence[Device] = (), *others: Candidate) -> Way:
    """nixl from a peer."""
    return Way("a:1", HOST, candidates=(Candidate("nixl", True, "", of), *others), devices_there=tuple(there))


@pytest.mark.parametrize(
    ("one", "here", "words"),
    [
        (far(measured(1e9, TCP)), [ETH], []),
        (far(measured(1e9, IB), MLX), [ETH, Device("mlx5_0:1", "rdma", 0, True)], []),
        (far(measured(1e9, TCP), MLX), [ETH, *MLX], ["FALLBACK", "tcp/eth0", "so has the other: mlx5_0:1"]),
        (far(measured(1e9, TCP)), [ETH, *MLX], ["FALLBACK", "the other node has none"]),
        (far(measured(1e9, TCP), [DOWN]), [ETH, *MLX], ["FALLBACK", "the other node's are down"]),
        (far(measured(1e9, TCP), MLX), [ETH, DOWN], ["FALLBACK", "mlx5_0:1 (down), which is down"]),
        (far(measured(1e9, ""), MLX), [*MLX], ["FALLBACK", "no lane that it names"]),
        (far(measured(4e8, TCP)), [ETH], ["0.40 GB/s, 32% of the link's nominal 1.25 GB/s"]),
        (far(measured(1e9, "unknown")), [ETH], ["does not say what it goes over"]),
        (far(measured(0, error="the peer is gone"), MLX), MLX, ["does not work as it should: the peer is gone"]),
        (far(measured(1e9, TCP), (), Candidate("x", False, "nixl comes first", measured(3e9))), [ETH], ["3.0 times"]),
        (Way("", HOST, candidates=(Candidate("shm", True, "", measured(1e9)),)), MLX, []),
        (Way("a:1", HOST, error="gone"), MLX, []),
    ],
)
def test_what_an_operator_is_warned_of(one: Way, here: Sequence[Device], words: list[str]) -> None:
    """A fallback loudly, with what is there instead; a slow link; a transport that fails; nothing where all is well."""
    said = warnings(one, here)
    assert all(word in said[0] for word in words), said
    assert len(said) == bool(words), said


SHM = Capabilities("shm", frozenset({HOST}), same_node=True)
NIXL = Capabilities("nixl", frozenset({HOST}), same_node=True, other_node=True)
CARDS = Offer(64 << 20, 1, {"nixl": b"card"}, {}, ())
NONE = Offer(64 << 20, 1, {}, {"nixl": "UCX is not there"}, ())


@pytest.mark.parametrize(
    ("offer", "kind", "used", "others", "error"),
    [
        (None, HOST, "shm", {"nixl": "shm comes first", "mori": "off"}, ""),
        (CARDS, HOST, "nixl", {"shm": "not between nodes", "mori": "off"}, ""),
        (NONE, HOST, None, {"nixl": "the other node does not offer it: UCX is not there"}, "UCX is not there"),
        (CARDS, CUDA, None, {"nixl": "no cuda memory"}, "no cuda memory"),
    ],
)
def test_a_way_names_what_would_be_used_and_why_no_other(
    offer: Offer | None, kind: MemoryKind, used: str | None, others: dict[str, str], error: str
) -> None:
    """From the same choice that sessions make, with what the other node said of its own."""
    found = {"nixl": measured(2e9, TCP), "shm": measured(5e9)}
    made = way("" if offer is None else "a:1", kind, [SHM, NIXL], offer, found, {"mori": "off"})
    assert (made.used.transport if made.used else None) == used
    why = {one.transport: one.why_not for one in made.candidates}
    assert others.items() <= why.items()
    assert error in made.error
    assert bool(made.error) == (used is None)
    assert {one.transport for one in made.candidates if one.measured.speeds} == (
        {"shm", "nixl"} if kind is HOST else set()
    )


def test_transports_that_are_not_switched_on_are_named() -> None:
    """With the flag; the one for tests is not missed."""
    assert left_out(["shm", "sim"])["nixl"] == "not switched on: --transport nixl"
    assert {"shm", "sim"}.isdisjoint(left_out(["shm"]))


def test_a_report_on_the_wire() -> None:
    """All that was found, and what is to be said of it."""
    report = Report((far(measured(1e9, TCP), MLX),), (ETH, *MLX), 64 << 20, 1.5)
    said = encode(report)
    (one,) = said.ways
    (nixl,) = one.candidates
    assert (one.peer, one.kind, list(nixl.names), nixl.used) == ("a:1", "host", ["nixl", "tcp"], True)
    assert nixl.nominal_bytes_per_second == 1.25e9
    assert (nixl.speeds[0].block_bytes, nixl.speeds[0].bytes) == (1 << 20, 64 << 20)
    assert one.warnings[0].startswith("FALLBACK")
    assert [decode_device(device) for device in said.devices] == [ETH, *MLX]
    assert decode_device(encode_device(DOWN)) == DOWN

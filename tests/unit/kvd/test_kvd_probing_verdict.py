"""What is said of a measurement: names, nominal rates, warnings, and the way that a hand-over would take."""

from collections.abc import Sequence

import pytest

from pdserve.kvd.probing.codec import decode_device, encode, encode_device
from pdserve.kvd.probing.values import (
    Candidate,
    Device,
    Exposure,
    Listener,
    Measured,
    Offer,
    Report,
    Speed,
    Way,
)
from pdserve.kvd.probing.verdict import names, nominal, warnings
from pdserve.kvd.probing.ways import left_out, link_of, pairs, way
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
    ],
)
def test_what_a_transport_may_be_called(transport: str, lanes: str, called: tuple[str, ...]) -> None:
    """Its own name, the family of its lanes, and UCX's names; nothing that merely begins like RDMA."""
    assert names(Candidate(transport, True, "", Measured(lanes))) == called


def test_mori_is_called_by_its_backend_where_it_carries_bytes() -> None:
    """It does not say what it goes over, and has no choice; one that is not used, and was not measured, is neither."""
    assert names(Candidate("mori", True, link="XGMI")) == ("mori", "xgmi")
    assert names(Candidate("mori", True, link="RDMA")) == ("mori", "rdma")
    assert names(Candidate("mori", False, "not between nodes", link="XGMI")) == ("mori",)
    assert names(Candidate("mori", False, "nixl comes first", measured(), "RDMA")) == ("mori", "rdma")


@pytest.mark.parametrize(
    ("name", "other_node", "link"),
    [("mori", True, "RDMA"), ("mori", False, "XGMI"), ("nixl", True, ""), ("gpu_ipc", False, "")],
)
def test_the_link_of_a_transport_that_has_no_choice(name: str, other_node: bool, link: str) -> None:
    """mori's backend, by what the transport can do: XGMI's reaches no other node."""
    one = Capabilities(name, frozenset({MemoryKind.ROCM}), same_node=True, other_node=other_node)
    (made,) = way("", MemoryKind.ROCM, [one], None, {}, {}).candidates
    assert (link_of(one), made.link, made.used) == (link, link, True)


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
    assert nominal(Candidate("nixl", True, "", Measured(lanes)), devices) == rate


G0, G1, G2 = "0000:1b:00.0", "0000:2c:00.0", "0000:3d:00.0"
LINKS = {(G0, G1): 50 * 10**9, (G1, G0): 50 * 10**9, (G0, G2): 0}


@pytest.mark.parametrize(
    ("link", "between", "rate"),
    [
        ("XGMI", (G0, G1), 5e10),
        ("XGMI", (G0, G2), 0.0),
        ("XGMI", (G1, G2), 0.0),
        ("XGMI", (G0, G0), 0.0),
        ("XGMI", None, 0.0),
        ("", (G0, G1), 0.0),
        ("RDMA", (G0, G1), 0.0),
    ],
)
def test_the_nominal_rate_of_xgmi(link: str, between: tuple[str, str] | None, rate: float) -> None:
    """That of the link between the two GPUs; nothing where the kernel does not say, or there is none."""
    assert nominal(Candidate("mori", True, link=link), [ETH], between, LINKS) == rate


@pytest.mark.parametrize(
    ("between", "rate", "words"),
    [
        ((G0, G1), 4e10, []),
        ((G0, G1), 1e10, ["10.00 GB/s, 20% of the link's nominal 50.00 GB/s"]),
        ((G0, G2), 1e9, ["is to go over XGMI, and the kernel shows none at 0000:3d:00.0"]),
        ((G2, G2), 1e9, []),
    ],
)
def test_warnings_of_xgmi(between: tuple[str, str], rate: float, words: list[str]) -> None:
    """A slow link, and a GPU that has none; within one GPU no link is needed."""
    here = [Device(G0, "xgmi", up=True), Device(G1, "xgmi", up=True), Device(G2, "gpu", up=True)]
    one = Way("", MemoryKind.ROCM, candidates=(Candidate("mori", True, "", measured(rate), "XGMI"),), devices=between)
    said = warnings(one, here, LINKS)
    assert len(said) == len(words)
    assert all(word in line for word, line in zip(words, said, strict=True))


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
    assert {one.transport for one in made.candidates if one.measured.speeds} == {"shm", "nixl"}


def test_a_transport_that_cannot_take_the_memory_here_is_not_used() -> None:
    """With its reason; that there is none then is an error only where engines have such memory."""
    ipc = Capabilities("gpu_ipc", frozenset({CUDA}), same_node=True)
    why = {"gpu_ipc": "torch sees no device"}
    for needed in (False, True):
        made = way("", CUDA, [SHM, ipc], None, {}, {}, unable=why, needed=needed)
        assert made.used is None
        assert {one.transport: one.why_not for one in made.candidates} == {"shm": "no cuda memory", **why}
        assert bool(made.error) == needed
    assert "torch sees no device" in made.error


def test_between_which_gpus() -> None:
    """Within each, and to each from the one before it: twice as many ways as GPUs, however many."""
    assert pairs([]) == []
    assert pairs([G0]) == [(G0, G0)]
    assert pairs([G0, G1]) == [(G0, G0), (G1, G1), (G1, G0), (G0, G1)]
    assert pairs([G0, G1, G2])[3:] == [(G2, G0), (G0, G1), (G1, G2)]


def test_transports_that_are_not_switched_on_are_named() -> None:
    """With the flag, or that there is nothing to switch it on for; the one for tests is not missed."""
    assert left_out(["shm", "sim"])["nixl"] == "not switched on: --transport nixl"
    assert left_out(["shm"])["gpu_ipc"] == "not switched on: --transport gpu_ipc"
    assert left_out(["shm"], gpus=False)["gpu_ipc"] == "no GPU is seen on this node"
    assert "gpu_ipc" not in left_out(["shm", "gpu_ipc"], gpus=False)
    assert {"shm", "sim"}.isdisjoint(left_out(["shm"]))


def test_a_report_on_the_wire() -> None:
    """All that was found, and what is to be said of it."""
    gpus = Way("", MemoryKind.ROCM, candidates=(Candidate("mori", True, "", measured(4e10), "XGMI"),), devices=(G0, G1))
    none = Way("", MemoryKind.ROCM, not_measured="torch sees no device")
    listens = (
        Listener("mori", 7, "10.0.0.1", 4000, Exposure.PRIVATE),
        Listener("mori", 8, "0.0.0.0", 4001, Exposure.WILDCARD),
    )
    report = Report((far(measured(1e9, TCP), MLX), gpus, none), (ETH, *MLX), 64 << 20, 1.5, listens, LINKS)
    said = encode(report)
    one, two, three = said.ways
    assert (two.from_device, two.to_device, list(two.candidates[0].names)) == (G0, G1, ["mori", "xgmi"])
    assert (two.candidates[0].link, two.candidates[0].nominal_bytes_per_second) == ("XGMI", 5e10)
    assert (three.from_device, three.not_measured) == ("", "torch sees no device")
    assert [(two.pid, two.port, two.exposure, bool(two.error)) for two in said.listeners] == [
        (7, 4000, "private", False),
        (8, 4001, "wildcard", True),
    ]
    (nixl,) = one.candidates
    assert (one.peer, one.kind, list(nixl.names), nixl.used) == ("a:1", "host", ["nixl", "tcp"], True)
    assert nixl.nominal_bytes_per_second == 1.25e9
    assert (nixl.speeds[0].block_bytes, nixl.speeds[0].bytes) == (1 << 20, 64 << 20)
    assert one.warnings[0].startswith("FALLBACK")
    assert [decode_device(device) for device in said.devices] == [ETH, *MLX]
    for device in (DOWN, Device(G0, "gpu", up=True), Device(G0, "xgmi", 4, True)):
        assert decode_device(encode_device(device)) == device

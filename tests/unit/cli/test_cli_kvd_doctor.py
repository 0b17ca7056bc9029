"""`pdserve kvd doctor`: what it shows, and when its status is 1."""

import threading
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.cli import kvd_doctor, kvd_doctor_text
from pdserve.cli.__main__ import main
from pdserve.kvd.config import TransportName
from pdserve.rpc.errors import Overloaded
from pdserve.rpc.status import DETAILS_KEY, details, status_code

TCP = "tcp/eth0 (software emulation)"


def candidate(
    transport: str, *, used: bool = False, lanes: str = "", names: Sequence[str] = (), rate: float = 0.0, **more: Any
) -> kvd_pb2.Candidate:
    """One transport; with a rate it was measured."""
    speeds = [kvd_pb2.Speed(block_bytes=b, bytes=64 << 20, seconds=(64 << 20) / rate) for b in (65536, 1 << 20) if rate]
    latency = 0.00027 if rate else 0.0
    named = [transport, *names]
    return kvd_pb2.Candidate(
        transport=transport, used=used, lanes=lanes, names=named, speeds=speeds, latency_seconds=latency, **more
    )


SHM = candidate("shm", used=True, rate=8e9)
FAR_SHM = candidate("shm", why_not="not between nodes")
NIXL = candidate("nixl", used=True, lanes=TCP, names=["tcp"], rate=1.1e9, nominal_bytes_per_second=1.25e9)
FAILS = candidate("nixl", used=True, error="the peer is gone")
WITHIN = kvd_pb2.Way(kind="host", candidates=[SHM, candidate("nixl", why_not="shm comes first", rate=2.5e9)])
PEER = kvd_pb2.Way(peer="b:1", node="vm", kvd_epoch="12345678-9", kind="host", candidates=[FAR_SHM, NIXL])
RDMA = kvd_pb2.Way(
    peer="c:1", kind="host", candidates=[candidate("nixl", used=True, names=["rdma", "rc_mlx5"], rate=1e10)]
)
LOUD = kvd_pb2.Way(peer="b:1", kind="host", candidates=[NIXL], warnings=["FALLBACK: nixl goes over tcp/eth0"])
SICK = kvd_pb2.Way(peer="b:1", kind="host", candidates=[FAILS])
GONE = kvd_pb2.Way(peer="d:1", kind="host", error="nobody there", reason="UNAVAILABLE")
GPU = kvd_pb2.Way(kind="cuda", candidates=[candidate("gpu_ipc", used=True)])
MORI = candidate("mori", used=True, names=["xgmi"], link="XGMI", rate=4e10)
XGMI = kvd_pb2.Way(
    kind="rocm", from_device="0000:1b:00.0", to_device="0000:2c:00.0", candidates=[FAR_SHM, MORI], warnings=["slow"]
)
NO_GPU = kvd_pb2.Way(
    kind="rocm", not_measured="torch sees no device", candidates=[candidate("mori", why_not="torch sees no device")]
)
BOUND = kvd_pb2.Listener(transport="mori", pid=7, address="10.0.0.1", port=4000, exposure="private")
OPEN = kvd_pb2.Listener(
    transport="mori", pid=8, address="::", port=4001, exposure="wildcard", error="mori's control port is bound to ..."
)


@pytest.mark.parametrize(
    ("ways", "expected", "wrong"),
    [
        ([WITHIN], "shm", []),
        ([WITHIN], "nixl", ["within this node shm is used, not nixl"]),
        ([WITHIN, PEER], "nixl", []),
        ([WITHIN, PEER], "tcp", []),
        ([WITHIN, PEER], "rdma", [f"from b:1 nixl over {TCP} is used, not rdma"]),
        ([WITHIN, PEER], "shm", [f"from b:1 nixl over {TCP} is used, not shm"]),
        ([WITHIN, RDMA], "rdma", []),
        ([WITHIN, RDMA], "rc_mlx5", []),
        ([WITHIN, RDMA, PEER], "rdma", [f"from b:1 nixl over {TCP} is used, not rdma"]),
        ([WITHIN, SICK], "nixl", ["from b:1 nixl is used and fails, not nixl"]),
        ([WITHIN, GONE], "nixl", ["from d:1 nothing is used, not nixl"]),
        ([WITHIN, GPU], "shm", []),
        ([WITHIN, GPU], "gpu_ipc", []),
        ([GPU], "gpu_ipc", []),
        ([WITHIN, XGMI], "xgmi", []),
        (
            [GPU, XGMI],
            "shm",
            [
                "within this node for cuda memory gpu_ipc is used, not shm",
                "from 0000:1b:00.0 to 0000:2c:00.0 for rocm memory mori over XGMI is used, not shm",
            ],
        ),
        ([NO_GPU], "xgmi", ["within this node for rocm memory nothing is used, not xgmi"]),
        ([XGMI, NO_GPU], "xgmi", ["within this node for rocm memory nothing is used, not xgmi"]),
        ([], "rdma", []),
    ],
)
def test_what_was_expected_must_be_what_would_be_used(ways: list[kvd_pb2.Way], expected: str, wrong: list[str]) -> None:
    """By each peer, whatever is used within the node; within it where there is no peer. For all of one kind of memory:
    what carries host memory does not carry that of GPUs."""
    assert kvd_doctor_text.unmet(ways, expected) == wrong


def test_what_does_not_work_is_said_without_any_expectation() -> None:
    """A way that is not there, a transport that fails, and a port that is open; not a GPU that is not there."""
    ways = [WITHIN, PEER, RDMA, LOUD, GPU, XGMI, NO_GPU]
    assert kvd_doctor_text.broken(kvd_pb2.MeasureResponse(ways=ways, listeners=[BOUND])) == []
    assert kvd_doctor_text.broken(kvd_pb2.MeasureResponse(ways=[SICK, GONE], listeners=[BOUND, OPEN])) == [
        "mori's control port is bound to ...",
        "from b:1 nixl fails: the peer is gone",
        "from d:1 there is no way: nobody there [UNAVAILABLE]",
    ]


def test_the_whole_of_it() -> None:
    """Devices, each way with its verdict, warnings and a line a transport."""
    devices = [
        kvd_pb2.Device(name="eth0", kind="net", bits_per_second=10**10, up=True),
        kvd_pb2.Device(name="mlx5_0:1", kind="rdma"),
        kvd_pb2.Device(name="0000:0a:00.0", kind="gpu", up=True),
        kvd_pb2.Device(name="0000:1b:00.0", kind="xgmi", bits_per_second=512 * 10**9, up=True),
        kvd_pb2.Device(name="0000:2c:00.0", kind="xgmi", up=True),
    ]
    silent = kvd_pb2.Listener(transport="mori", pid=9, exposure="none")
    answer = kvd_pb2.MeasureResponse(
        ways=[WITHIN, PEER, LOUD, GONE, GPU, XGMI, NO_GPU],
        devices=devices,
        scratch_bytes=64 << 20,
        seconds=3.21,
        listeners=[BOUND, OPEN, silent],
    )
    said = kvd_doctor_text.shown(answer, "unix:kvd.sock")
    assert said.split("\n\n") == [
        "kvd at unix:kvd.sock: measured with 64.0 MiB on each side, in 3.2 s\n"
        "devices here: eth0 (network, 10 Gbit/s), mlx5_0:1 (RDMA, rate not known, down), 0000:0a:00.0 (GPU), "
        "0000:1b:00.0 (GPU with XGMI, a link 512 Gbit/s), 0000:2c:00.0 (GPU with XGMI, a link rate not known)\n"
        "mori's control port (process 7): 10.0.0.1:4000, private\n"
        "ERROR: mori's control port is bound to ...\n"
        "mori's control port (process 9): it does not listen",
        "within this node, host memory: shm is used\n"
        "transport  used  latency  64 KiB blocks  1 MiB blocks  remarks\n"
        "---------  ----  -------  -------------  ------------  ---------------\n"
        "shm        yes   0.27 ms      8.00 GB/s     8.00 GB/s  -\n"
        "nixl       no    0.27 ms      2.50 GB/s     2.50 GB/s  shm comes first",
        f"from b:1 (vm, epoch 12345678), host memory: nixl over {TCP} is used\n"
        "transport  used  latency  64 KiB blocks  1 MiB blocks  remarks\n"
        "---------  ----  -------  -------------  ------------  ----------------------------\n"
        "shm        no          -              -             -  not between nodes\n"
        "nixl       yes   0.27 ms      1.10 GB/s     1.10 GB/s  88% of the nominal 1.25 GB/s",
        f"from b:1, host memory: nixl over {TCP} is used\n"
        "WARNING: FALLBACK: nixl goes over tcp/eth0\n"
        "transport  used  latency  64 KiB blocks  1 MiB blocks  remarks\n"
        "---------  ----  -------  -------------  ------------  ----------------------------\n"
        "nixl       yes   0.27 ms      1.10 GB/s     1.10 GB/s  88% of the nominal 1.25 GB/s",
        "from d:1, host memory: NO WAY: nobody there [UNAVAILABLE]",
        "within this node, cuda memory: gpu_ipc is used\n"
        "transport  used  remarks\n"
        "---------  ----  -------\n"
        "gpu_ipc    yes   -",
        "from 0000:1b:00.0 to 0000:2c:00.0, rocm memory: mori over XGMI is used\n"
        "WARNING: slow\n"
        "transport  used  latency  64 KiB blocks  1 MiB blocks  remarks\n"
        "---------  ----  -------  -------------  ------------  ----------------------\n"
        "shm        no          -              -             -  not between nodes\n"
        "mori       yes   0.27 ms     40.00 GB/s    40.00 GB/s  nominal rate not known",
        "within this node, rocm memory: nothing is used, NOT MEASURED: torch sees no device\n"
        "transport  used  remarks\n"
        "---------  ----  --------------------\n"
        "mori       no    torch sees no device",
    ]


def test_without_peers_it_says_that_no_other_node_was_measured() -> None:
    """And how to name one: links come with the first hand-over."""
    alone = kvd_doctor_text.shown(kvd_pb2.MeasureResponse(ways=[WITHIN]), "unix:kvd.sock")
    assert alone.split("\n\n")[-1].startswith("no other node was measured")
    assert "--peer HOST:PORT" in alone
    both = kvd_doctor_text.shown(kvd_pb2.MeasureResponse(ways=[WITHIN, PEER]), "unix:kvd.sock")
    assert "no other node was measured" not in both


class FakeOperator(kvd_pb2_grpc.OperatorServicer):
    """Answers what it was told to."""

    def __init__(self) -> None:
        self.answer = kvd_pb2.MeasureResponse(ways=[WITHIN, PEER])
        self.asked: list[kvd_pb2.MeasureRequest] = []
        self.busy = threading.Event()

    def Measure(self, request: kvd_pb2.MeasureRequest, context: Any) -> kvd_pb2.MeasureResponse:
        """See kvd.proto."""
        self.asked.append(request)
        if self.busy.is_set():
            refusal = Overloaded("this kvd measures: one measurement at a time")
            context.set_trailing_metadata(((DETAILS_KEY, details(refusal)),))
            context.abort(status_code(refusal), refusal.message)
        return self.answer

    def Describe(self, request: kvd_pb2.DescribeRequest, context: Any) -> kvd_pb2.DescribeResponse:
        """Not asked."""
        raise NotImplementedError

    def ListTransfers(self, request: kvd_pb2.ListTransfersRequest, context: Any) -> kvd_pb2.ListTransfersResponse:
        """Not asked."""
        raise NotImplementedError

    def ListLeases(self, request: kvd_pb2.ListLeasesRequest, context: Any) -> kvd_pb2.ListLeasesResponse:
        """Not asked."""
        raise NotImplementedError

    def Drain(self, request: kvd_pb2.DrainRequest, context: Any) -> kvd_pb2.DrainResponse:
        """Not asked."""
        raise NotImplementedError


@pytest.fixture
def operator() -> FakeOperator:
    """What the fake daemon says."""
    return FakeOperator()


@pytest.fixture
def socket(operator: FakeOperator, tmp_path: Path) -> Iterator[str]:
    """Where it listens."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    kvd_pb2_grpc.add_OperatorServicer_to_server(operator, server)
    server.add_insecure_port(f"unix:{tmp_path}/kvd.sock")
    server.start()
    yield f"{tmp_path}/kvd.sock"
    server.stop(None).wait(5)


def doctor(socket: str, *words: str) -> int:
    """The command's status."""
    return main(["kvd", "doctor", "--socket", socket, *words])


def test_the_command(operator: FakeOperator, socket: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It passes on whom to measure and for how long; all is well: status 0."""
    assert doctor(socket, "--peer", "b:1", "--peer", "c:1", "--timeout", "7") == 0
    assert list(operator.asked[0].peers) == ["b:1", "c:1"]
    assert operator.asked[0].deadline_seconds == 7.0
    assert "from b:1" in capsys.readouterr().out


def test_an_expectation_that_is_not_met_is_status_1(
    operator: FakeOperator, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured is shown all the same; stderr has the sentence. One that is met is status 0."""
    assert doctor(socket, "--expect", "tcp") == 0
    assert doctor(socket, "--expect", "rdma") == 1
    said = capsys.readouterr()
    assert said.out.count("from b:1 (vm") == 2
    assert said.err == f"pdserve: from b:1 nixl over {TCP} is used, not rdma (CONFIG)\n"


def test_a_name_that_nothing_has_is_a_wrong_command_line(
    operator: FakeOperator, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before kvd is asked, with the names that there are: every transport of kvd's is among them."""
    with pytest.raises(SystemExit) as ended:
        doctor(socket, "--expect", "bogus")
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "nothing is called 'bogus': shm, nixl," in said
    assert not operator.asked
    assert {one.value for one in TransportName} < set(kvd_doctor.NAMES)


def test_the_flag_of_a_switch_is_said_for_up_too() -> None:
    """Who has started kvd by `pdserve up` has another way to say it."""
    off = kvd_pb2.Candidate(transport="nixl", why_not="not switched on: --transport nixl")
    for candidates, said in (([off], True), ([], False)):
        answer = kvd_pb2.MeasureResponse(ways=[kvd_pb2.Way(kind="host", candidates=candidates)])
        assert ("--kvd transport=NAME" in kvd_doctor_text.shown(answer, "x")) == said


def test_a_way_that_does_not_work_is_status_1(
    operator: FakeOperator, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether or not something was expected; JSON has the same."""
    operator.answer = kvd_pb2.MeasureResponse(ways=[WITHIN, GONE])
    assert doctor(socket, "--json") == 1
    said = capsys.readouterr()
    assert '"reason": "UNAVAILABLE"' in said.out
    assert "there is no way: nobody there" in said.err


def test_a_control_port_that_strangers_may_reach_is_status_1(
    operator: FakeOperator, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though every way works; what it is bound to is shown."""
    operator.answer = kvd_pb2.MeasureResponse(ways=[WITHIN], listeners=[BOUND])
    assert doctor(socket) == 0
    operator.answer = kvd_pb2.MeasureResponse(ways=[WITHIN], listeners=[BOUND, OPEN])
    assert doctor(socket) == 1
    said = capsys.readouterr()
    assert said.out.count("10.0.0.1:4000, private") == 2
    assert "ERROR: mori's control port is bound to" in said.out
    assert said.err == "pdserve: mori's control port is bound to ... (CONFIG)\n"


def test_a_daemon_that_measures_already(
    operator: FakeOperator, socket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Says so, by name."""
    operator.busy.set()
    assert doctor(socket) == 1
    assert "one measurement at a time (OVERLOADED)" in capsys.readouterr().err

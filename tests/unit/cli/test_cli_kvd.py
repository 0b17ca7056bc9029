"""`pdserve kvd`: the tables, the JSON, and how it finds a daemon. The daemon is a fake over real gRPC."""

import io
import json
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.api.common.v1 import common_pb2
from pdserve.api.kvd.v1 import kvd_pb2, kvd_pb2_grpc
from pdserve.cli import deployment, kvd_json, kvd_text
from pdserve.cli.__main__ import main
from pdserve.cli.kvd import watch
from pdserve.cli.plan import Ports, Spec, make_plan
from pdserve.rpc.errors import Draining, KvdUnavailable
from pdserve.rpc.status import DETAILS_KEY, details, status_code

TID = bytes(range(16))


class FakeOperator(kvd_pb2_grpc.OperatorServicer):
    """Answers what it was told to."""

    def __init__(self) -> None:
        self.listed = kvd_pb2.ListTransfersResponse()
        self.drained = kvd_pb2.DrainResponse(draining=True)
        self.drains: list[kvd_pb2.DrainRequest] = []
        self.refusal: Draining | None = None
        self.silent = threading.Event()

    def Describe(self, request: kvd_pb2.DescribeRequest, context: Any) -> kvd_pb2.DescribeResponse:
        self.silent.wait(10)
        return kvd_pb2.DescribeResponse(version="1.2.3")

    def ListTransfers(self, request: kvd_pb2.ListTransfersRequest, context: Any) -> kvd_pb2.ListTransfersResponse:
        return self.listed

    def ListLeases(self, request: kvd_pb2.ListLeasesRequest, context: Any) -> kvd_pb2.ListLeasesResponse:
        return kvd_pb2.ListLeasesResponse()

    def Drain(self, request: kvd_pb2.DrainRequest, context: Any) -> kvd_pb2.DrainResponse:
        self.drains.append(request)
        if self.refusal is not None:
            context.set_trailing_metadata(((DETAILS_KEY, details(self.refusal)),))
            context.abort(status_code(self.refusal), self.refusal.message)
        return self.drained

    def Measure(self, request: kvd_pb2.MeasureRequest, context: Any) -> kvd_pb2.MeasureResponse:
        raise NotImplementedError  # of test_cli_kvd_doctor


@pytest.fixture
def operator() -> FakeOperator:
    """What the fake daemon says; it answers at once unless a test clears `silent`."""
    made = FakeOperator()
    made.silent.set()
    return made


@pytest.fixture
def socket(operator: FakeOperator, tmp_path: Path) -> Iterator[Path]:
    """Where the fake daemon listens: where a state folder has its kvd.sock."""
    path = tmp_path / "kvd.sock"
    server = grpc.server(futures.ThreadPoolExecutor(2))
    kvd_pb2_grpc.add_OperatorServicer_to_server(operator, server)
    server.add_insecure_port(f"unix:{path}")
    server.start()
    yield path
    operator.silent.set()
    server.stop(None).wait(5)


def transfer(**changes: Any) -> kvd_pb2.Transfer:
    """A READ that copies."""
    whole: dict[str, Any] = {
        "transfer_id": TID,
        "mode": common_pb2.TRANSFER_MODE_READ,
        "producer_engine_id": "producer-engine",
        "producer_state": "complete",
        "producer_handle": "req-1",
        "consumer_engine_ids": ["consumer-engine"],
        "consumer_states": ["filling"],
        "consumer_handles": ["req-1"],
        "age_seconds": 1.25,
        "bytes_moved": 1024,
        "bytes_wanted": 4096,
        "operations": 3,
        "waits_for": "copying, 3 operations",
    }
    return kvd_pb2.Transfer(**{**whole, **changes})


# -- tables ---------------------------------------------------------------------------------


def test_a_transfer_is_one_line_with_everything_that_is_asked() -> None:
    """Id, mode, age, both ends with their states, bytes, what they went over (nothing before the first copy), the one
    handle that both ends have, and what it waits for."""
    moved = transfer(transport="nixl", lanes="tcp/eth0", age_seconds=1.0)
    lines = [" ".join(line.split()) for line in kvd_text.transfers([transfer(), moved]).splitlines()]
    assert lines[0] == "transfer mode age producer consumers landed / wanted over requests waits for"
    assert lines[2:] == [
        "00010203 read 1.2 s producer complete consumer filling 1.0 KiB / 4.0 KiB - req-1 copying, 3 operations",
        "00010203 read 1.0 s producer complete consumer filling 1.0 KiB / 4.0 KiB nixl tcp/eth0 req-1 copying, "
        "3 operations",
    ]


def test_what_is_missing_and_what_stops_is_said() -> None:
    """No consumer: "none", bytes unknown; a stop: its reason and detail; a long handle is cut; the oldest is first."""
    young = transfer(consumer_engine_ids=[], consumer_states=[], consumer_handles=[], bytes_wanted=0, bytes_moved=0)
    old = transfer(age_seconds=125.0, reason="PEER_LOST", detail="its engine died", producer_handle="x" * 40)
    first, second = kvd_text.transfers([young, old]).splitlines()[2:]
    assert "2 m 5 s" in first
    assert "copying, 3 operations [PEER_LOST: its engine died]" in first
    assert f"{'x' * 25}..., req-1" in first
    assert "none" in second
    assert "0 B / ?" in second
    assert kvd_text.transfers([]) == "no open transfer"


@pytest.mark.parametrize(
    ("blocks", "told"),
    [
        ((), ""),
        ((12, 3, 4, 5, 9, 8, 7, 6), "3-9,12"),
        ((1, 1, 2), "1-2"),
        ((0, 2, 4, 6), "0,2,... 2 more"),
    ],
)
def test_blocks_are_shown_as_runs(blocks: tuple[int, ...], told: str) -> None:
    """Sorted, runs merged; past the most only their number is said."""
    assert kvd_text.ranges(blocks, most=2) == told


def test_a_lease_says_who_holds_how_much_until_when() -> None:
    """One that runs out says when; one in quarantine says since when and has no time left to tell."""
    free = kvd_pb2.Lease(lease_id="7", engine_id="e" * 36, transfer_id=TID, block_ids=[1, 2], age_seconds=1)
    free.remaining_seconds, free.expires = 29.0, True
    held = kvd_pb2.Lease(lease_id="8", engine_id="f" * 36, transfer_id=TID, block_ids=[5], in_flight=2, age_seconds=2)
    held.quarantined, held.quarantined_seconds = True, 0.4
    first, second = (" ".join(line.split()) for line in kvd_text.leases([free, held]).splitlines()[2:])
    assert first == "8 ffffffff 00010203 2.0 s - 2 since 0.4 s 1 5"
    assert second == "7 eeeeeeee 00010203 1.0 s 29.0 s 0 no 2 1-2"
    assert kvd_text.leases([]) == "no lease"


def test_describe_shows_the_daemon_its_engines_and_what_happened() -> None:
    """Who is attached and who is lost, where blocks are, open and ended ends, expiries, fences and the bound."""
    answer = kvd_pb2.DescribeResponse(
        kvd_epoch="0123456789",
        version="1.2.3",
        transports=["shm"],
        uptime_seconds=3700,
        draining=True,
        transfers={"producer.complete": 1, "consumer.filling": 2, "ended.landed": 5, "ended.PEER_LOST": 1},
        expiries={"lease": 1},
        fences=kvd_pb2.Fences(
            count=3, waited=2, longest_seconds=0.004, total_seconds=0.005, torn_down=1, bound_seconds=5
        ),
    )
    engine = answer.engines.add(engine_id="abcdefghij", ranks=2, age_seconds=12)
    engine.participants.add(participant=kvd_pb2.PARTICIPANT_SCHEDULER, pid=4, attached=True)
    engine.participants.add(participant=kvd_pb2.PARTICIPANT_WORKER, rank=1, pid=5, lost_seconds=0.5)
    answer.regions.add(engine_id="abcdefghij", rank=1, kind="host", bytes=2048, num_blocks=10, free=4, leased=3)
    answer.regions[0].in_flight, answer.regions[0].quarantined = 2, 1
    answer.regions.add(engine_id="ijklmnopqr", kind="rocm", bytes=2048, registered_by="the rank's process")
    text = " ".join(kvd_text.describe(answer, "unix:/x").split())
    assert "kvd 1.2.3 at unix:/x: epoch 01234567, up 1 h 1 m, over shm, DRAINING" in text
    assert "abcdefgh 2 12.0 s scheduler (4), worker 1 (5, no stream since 0.5 s)" in text
    assert "abcdefgh/1 host 2.0 KiB 10 4 3 2 1" in text
    assert "ijklmnop/0 rocm, mori in the rank's process 2.0 KiB" in text
    assert "open ends consumer.filling 2, producer.complete 1 ended PEER_LOST 1, landed 5 ran out lease 1" in text
    assert "fences 3, 2 of them waited; longest 4.0 ms, 5.0 ms in all; 1 past the bound of 5 s" in text
    assert text.endswith("defects none")


def test_json_has_every_field_with_ids_in_hex_and_words_for_enums() -> None:
    """Also empty ones; numbers stay numbers; a value of a newer kvd is its number."""
    plain = kvd_json.plain(kvd_pb2.ListTransfersResponse(transfers=[transfer(reason="")]))
    (one,) = plain["transfers"]
    assert one["transfer_id"] == TID.hex()
    assert (one["mode"], one["bytes_wanted"], one["reason"]) == ("read", 4096, "")
    assert one["consumer_states"] == ["filling"]
    described = kvd_json.plain(kvd_pb2.DescribeResponse(transfers={"b": 2, "a": 1}))
    assert list(described["transfers"].items()) == [("a", 1), ("b", 2)]
    assert (described["draining"], described["regions"]) == (False, [])
    assert kvd_json.word(common_pb2.TransferMode.DESCRIPTOR, 77) == "77"
    json.dumps(plain)


# -- the command ----------------------------------------------------------------------------


def test_a_drain_that_leaves_nothing_is_status_0(
    operator: FakeOperator, socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The deadline reaches kvd; what is left decides about the status."""
    assert main(["kvd", "drain", "--deadline", "7", "--socket", str(socket)]) == 0
    assert capsys.readouterr().out == "drained: no transfer is open\n"
    assert (operator.drains[0].deadline_seconds, operator.drains[0].undo) == (7.0, False)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_drain_that_leaves_something_shows_it_and_is_status_1(
    operator: FakeOperator, socket: Path, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """What remains is listed, in the table or in the JSON."""
    operator.drained.remaining = 1
    operator.listed.transfers.append(transfer())
    words = ["kvd", "drain", "--deadline", "1", "--socket", str(socket)]
    assert main([*words, "--json"] if as_json else words) == 1
    out = capsys.readouterr().out
    if as_json:
        said = json.loads(out)
        assert (said["remaining"], said["draining"], len(said["transfers"])) == (1, True, 1)
    else:
        assert out.startswith("1 left; the drain goes on, new transfers are refused\n\n")
        assert "00010203" in out


def test_undo_asks_for_it_and_a_refusal_is_a_sentence(
    operator: FakeOperator, socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 0 whatever is open; what kvd refuses keeps kvd's own words, though its code is UNAVAILABLE."""
    operator.drained.remaining = 2
    operator.drained.draining = False
    assert main(["kvd", "drain", "--undo", "--socket", str(socket)]) == 0
    assert operator.drains[0].undo
    assert capsys.readouterr().out == "new transfers are taken again; 2 are open\n"
    operator.refusal = Draining("kvd is about to stop")
    assert main(["kvd", "drain", "--undo", "--socket", str(socket)]) == 1
    assert capsys.readouterr().err == "pdserve: kvd is about to stop (DRAINING)\n"


@pytest.mark.parametrize("action", ["describe", "transfers", "leases", "drain"])
def test_a_kvd_that_is_not_there_is_one_sentence(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No socket: KVD_UNAVAILABLE with the address, status 1, nothing on stdout."""
    assert main(["kvd", action, "--socket", str(tmp_path / "none.sock")]) == 1
    assert capsys.readouterr() == ("", f"pdserve: no kvd answers at unix:{tmp_path}/none.sock (KVD_UNAVAILABLE)\n")


def test_a_kvd_that_is_silent_is_given_up(
    operator: FakeOperator, socket: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The deadline passes: KVD_UNAVAILABLE again, and it says how long was waited."""
    operator.silent.clear()
    assert main(["kvd", "describe", "--socket", str(socket), "--timeout", "0.2"]) == 1
    assert "does not answer within 0.2 s (KVD_UNAVAILABLE)" in capsys.readouterr().err


def test_a_state_folder_names_the_kvd_in_it(socket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A `pdserve-kvd` without a deployment is found by its folder; an empty folder is a sentence with the way on."""
    assert main(["kvd", "describe", "--state-dir", str(socket.parent)]) == 0
    assert "kvd 1.2.3 at unix:" in capsys.readouterr().out
    assert main(["kvd", "describe", "--state-dir", str(socket.parent / "other")]) == 1
    err = capsys.readouterr().err
    assert "pdserve up" in err
    assert "--socket PATH" in err


def test_the_running_deployments_kvd_is_the_default(
    socket: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a flag it is the kvd that up.json names, as `pdserve status` finds its proxy."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    plan = make_plan(Spec(engine="sim"), socket.parent, Ports(1, 2, 3, (4, 5)), "python", [0])
    with deployment.claimed(deployment.default_dir()) as folder:
        deployment.publish(folder, plan, {}, {})
        assert main(["kvd", "transfers"]) == 0
    assert capsys.readouterr().out == "no open transfer\n"
    assert main(["kvd", "transfers"]) == 1


@pytest.mark.parametrize(("terminal", "between"), [(True, "\x1b[H\x1b[J"), (False, "")])
def test_watch_shows_it_again_until_the_kvd_is_gone(terminal: bool, between: str) -> None:
    """In place on a terminal, one after the other elsewhere; it ends with the error that asking raises."""
    answers, out = iter(["one", "two"]), io.StringIO()
    slept: list[float] = []

    def report() -> str:
        answer = next(answers, None)
        if answer is None:
            raise KvdUnavailable("gone")
        return answer

    with pytest.raises(KvdUnavailable):
        watch(report, out, terminal=terminal, interval=0.5, sleep=slept.append)
    assert out.getvalue() == f"{between}one\n{between}two\n"
    assert slept == [0.5, 0.5]

"""Which trace store a deployment has, who starts it, and what is said where there is none."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.cli import deployment, extras, up
from pdserve.cli.__main__ import main
from pdserve.cli.board import Board
from pdserve.cli.fleet import Fleet
from pdserve.cli.plan import Ports, Spec, make_plan
from tests.unit.cli.fakes import WAIT, fake_plan


def test_traces_becomes_the_service(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command is replaced by the service, so that signals and the exit status are its own; what follows `--` goes
    through."""
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, argv: became.append(argv))
    main(["traces", "--port", "1", "--file", "/x", "--", "--max-age", "9"])
    assert became[0][1:] == [
        "-m",
        "pdserve.traces",
        "--otlp-port",
        "4317",
        "--port",
        "1",
        "--file",
        "/x",
        "--max-age",
        "9",
    ]
    monkeypatch.setattr(extras, "NODE", ("nothing_of_this_name", "json.nor.this"))
    assert main(["traces"]) == 1
    assert "needs nothing_of_this_name, json.nor.this: install pdserve with the extra `node`" in capsys.readouterr().err
    assert len(became) == 1


def test_the_deployment_that_runs_here_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its record says where its traces are; one without a trace store is said to have none, or where its traces go, or
    that its store has ended for good."""
    spec = Spec(engine="sim", served_name="m")
    kept, elsewhere = replace(spec, traces=True), replace(spec, traces_go="http://a:4317, as VARIABLE says")
    for traces_of, pids, says in (
        (kept, {"proxy": 1, "traces": 2}, "no trace store answers at http://127.0.0.1:1:"),
        (kept, {"proxy": 1}, f"has ended for good: see {tmp_path}/logs/traces.log (CONFIG)"),
        (elsewhere, {"proxy": 1}, "this deployment's traces go to http://a:4317, as VARIABLE says: look there, or"),
        (spec, {"proxy": 1}, "this deployment keeps no traces (--no-traces)"),
    ):
        plan = make_plan(traces_of, tmp_path, Ports(2, 3, 4, (5, 6), 7, 1), "python", ())
        with deployment.claimed(tmp_path):
            deployment.publish(tmp_path, plan, pids, {})
            assert main(["trace", "--last", "--state-dir", str(tmp_path)]) == 1
            assert says in capsys.readouterr().err


def test_a_deployment_with_traces_has_one_process_more() -> None:
    """The store starts before the proxy, in the state folder and bounded; the proxy alone is told where to send."""
    ports = Ports(1, 2, 3, (4, 5), 6, 7)
    plan = make_plan(Spec(engine="sim", traces=True), Path("/tmp/s"), ports, "python", ())
    assert [process.name for process in plan.processes][-2:] == ["traces", "proxy"]
    store, proxy = plan.processes[-2:]
    assert store.argv[1:] == (
        "-m", "pdserve.traces", "--host", "127.0.0.1", "--otlp-port", "6", "--port", "7",
        "--file", "/tmp/s/traces.sqlite", "--max-bytes", str(64 << 20),
    )  # fmt: skip
    assert (store.target, plan.traces) == ("127.0.0.1:6", "http://127.0.0.1:7")
    assert [p.name for p in plan.processes if "OTEL_EXPORTER_OTLP_ENDPOINT" in p.env] == ["proxy"]
    assert proxy.env["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://127.0.0.1:6"
    assert plan.traces in up.how_to_call(plan, "")
    body = re.search(r"-d '(.*)'", up.how_to_call(plan, ""))
    assert body is not None
    assert json.loads(body[1])["max_tokens"] == 32
    alone = make_plan(Spec(engine="sim"), Path("/tmp/s"), ports, "python", ())
    assert len(alone.processes) == len(plan.processes) - 1
    assert "trace" not in up.how_to_call(alone, "")


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({}, ""),
        ({"OTEL_SDK_DISABLED": "false"}, ""),
        ({"OTEL_SDK_DISABLED": "true"}, "nowhere, as OTEL_SDK_DISABLED says"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:4317"}, "http://a:4317, as OTEL_EXPORTER_OTLP_ENDPOINT says"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b"},
            "http://b, as OTEL_EXPORTER_OTLP_TRACES_ENDPOINT says",
        ),
    ],
)
def test_traces_that_go_elsewhere_stay_there(environ: dict[str, str], says: str) -> None:
    """Somebody who has a collector gets no second store; the words say which variable decided."""
    assert up.traces_go_to(environ) == says


async def test_the_trace_store_is_the_last_to_go(folder: Path, board: Board) -> None:
    """It takes what the proxy says when that ends, so it is drained after everything else."""
    async with Fleet(fake_plan(folder, traces=True), board, grace=WAIT) as fleet:
        await fleet.start(WAIT)
        assert "traces" in fleet.pids
    order = (folder / "order").read_text().split()
    assert (order[0], order[-2:]) == ("proxy", ["kvd", "traces"])

"""What a deployment consists of."""

from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.plan import Plan, Ports, Process, Spec, engine_names, make_plan
from pdserve.proxy.__main__ import parser
from pdserve.proxy.config import ProxyConfig
from pdserve.rpc.errors import ConfigError
from pdserve.runtime import flags

STATE = Path("/tmp/s")


def plan(cores: tuple[int, ...] = (0, 1), **fields: Any) -> Plan:
    spec = Spec(**{"served_name": "m", "model": "/models/m", **fields})
    ports = Ports(1, 2, 3, tuple(range(10, 10 + len(engine_names(spec)))))
    return make_plan(spec, STATE, ports, "python", cores)


def flag(process: Process, name: str) -> str:
    return process.argv[process.argv.index(name) + 1]


def test_every_service_is_a_process_of_its_own_in_the_order_of_starting() -> None:
    """kvd comes first, the proxy last, an engine process per engine between; none is imported here."""
    made = plan(prefill=2, decode=1, both=1)
    assert [p.name for p in made.processes] == ["kvd", "prefill-0", "prefill-1", "decode-0", "both-0", "proxy"]
    assert [p.argv[2] for p in made.processes] == [
        "pdserve.kvd",
        "pdserve.prefill",
        "pdserve.prefill",
        "pdserve.decode",
        "pdserve.decode",
        "pdserve.proxy",
    ]
    assert [flag(p, "--role") for p in made.processes[1:-1]] == ["prefill", "prefill", "decode", "both"]
    assert len({p.log for p in made.processes}) == len(made.processes)


def test_the_processes_find_each_other() -> None:
    """Engines are told the socket of kvd and the proxy's registration port; all share one key file."""
    made = plan()
    kvd, prefill, decode, proxy = made.processes
    for engine in (prefill, decode):
        assert flag(engine, "--kvd-socket") == flag(kvd, "--socket") == "/tmp/s/kvd.sock"
        assert flag(engine, "--proxy") == f"127.0.0.1:{flag(proxy, '--ping-port')}"
    assert made.kvd == kvd.target == "unix:/tmp/s/kvd.sock"
    assert made.grpc == proxy.target == "127.0.0.1:1"
    assert made.http == "http://127.0.0.1:2"
    assert {p.env["PDSERVE_CLUSTER_KEY_FILE"] for p in made.processes} == {"/tmp/s/cluster.key"}


def test_engine_arguments_go_where_the_engine_takes_them() -> None:
    """vLLM's arguments follow `--`, the sim engine's are flags of the service; neither reaches kvd or proxy."""
    for engine, expected in (("vllm", ("--", "--seed", "3")), ("sim", ("--seed", "3"))):
        made = plan(engine=engine, engine_args=("--seed", "3"))
        for process in made.processes:
            assert ("--seed" in process.argv) == (process.kind == "engine")
            if process.kind == "engine":
                assert process.argv[-len(expected) :] == expected
                assert ("--" in process.argv) == (engine == "vllm")
    assert "--model" not in plan(engine="sim").processes[1].argv
    assert "--" not in plan().processes[1].argv


def test_settings_of_kvd_go_to_kvd() -> None:
    """NAME=VALUE becomes a flag of kvd's and of nobody else's."""
    made = plan(kvd_settings=("lease=2", "fence=1"))
    assert [("--lease=2" in p.argv, "--fence=1" in p.argv) for p in made.processes] == [
        (True, True),
        *[(False,) * 2] * 3,
    ]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("lease", "not NAME=VALUE"),
        ("lease=", "not NAME=VALUE"),
        ("--lease=2", "not NAME=VALUE"),
        ("socket=/tmp/x", "socket is the deployment's"),
        ("state-dir=/tmp", "state-dir is the deployment's"),
    ],
)
def test_settings_of_kvd_that_cannot_be_are_refused(setting: str, says: str) -> None:
    """What is no setting, and what would take kvd away from the engines, is refused before anything starts."""
    with pytest.raises(ConfigError, match=says):
        Spec(kvd_settings=(setting,))


def test_pinning_gives_engines_the_cores_in_turn() -> None:
    """With --pin each engine has one core, going round; kvd and proxy stay free."""
    made = plan(cores=(4, 5), prefill=1, decode=1, both=1, pin=True)
    assert [p.core for p in made.processes] == [None, 4, 5, 4, None]
    assert {p.core for p in plan().processes} == {None}


def test_a_deployment_without_pairs_routes_to_whole_engines() -> None:
    """Engines that serve alone are used only by explicit policy: without a pair the plan states it."""
    alone = plan(prefill=0, decode=0, both=1)
    assert flag(alone.processes[-1], "--route") == "split_or_colocated"
    assert "--route" not in plan(both=1).processes[-1].argv


@pytest.mark.parametrize(("asked", "got"), [(None, ProxyConfig().hold_timeout), (0.0, 0.0), (1234567.25, 1234567.25)])
def test_the_proxys_hold_is_passed_on(asked: float | None, got: float) -> None:
    """As the proxy reads it, to the last digit; unasked, the proxy's own."""
    proxy = plan(hold_timeout=asked).processes[-1]
    assert flags.from_args(ProxyConfig, parser().parse_args(proxy.argv[3:])).hold_timeout == got


def test_a_busy_machine_is_no_reason_to_give_an_engine_up() -> None:
    """On one machine an engine may be silent for longer than the proxy's own 3 beats."""
    assert int(flag(plan().processes[-1], "--beats-missed")) > 3


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prefill": 0, "decode": 0, "both": 0}, "at least one engine"),
        ({"prefill": -1}, "at least one engine"),
        ({"prefill": 1, "decode": 0}, "come in pairs"),
        ({"prefill": 0, "decode": 2, "both": 1}, "come in pairs"),
    ],
)
def test_counts_that_make_no_deployment_are_refused(fields: dict[str, int], says: str) -> None:
    """An empty deployment, and one kind of engine alone, are refused before anything starts."""
    with pytest.raises(ConfigError, match=says):
        Spec(**fields)  # type: ignore[arg-type]  # the counts only


def test_a_state_folder_too_long_for_a_socket_is_refused() -> None:
    """Linux takes 107 bytes of a Unix socket's path; a longer one is refused by name, the longest possible is not."""
    spec, ports = Spec(), Ports(1, 2, 3, (4, 5))
    fits = Path("/" + "x" * (107 - len("//notices.sock")))
    make_plan(spec, fits, ports, "python", ())
    with pytest.raises(ConfigError, match="108 bytes"):
        make_plan(spec, Path(f"{fits}x"), ports, "python", ())


def test_every_process_is_told_where_prometheus_asks() -> None:
    """A port each for kvd and the engines, on loopback, before what goes to vLLM; the proxy is asked at its HTTP port.
    Without ports nobody opens one."""
    made = make_plan(
        Spec(served_name="m", engine_args=("--seed", "3")),
        STATE,
        Ports(1, 2, 3, (4, 5), metrics=(6, 7, 8)),
        "python",
        (),
    )
    *served, proxy = made.processes
    for process, port in zip(served, ("6", "7", "8"), strict=True):
        assert (flag(process, "--metrics-host"), flag(process, "--metrics-port")) == ("127.0.0.1", port)
        assert process.metrics == f"http://127.0.0.1:{port}/metrics"
        assert process.argv.index("--metrics-port") < [*process.argv, "--"].index("--")
    assert proxy.metrics == "http://127.0.0.1:2/metrics"
    assert "--metrics-port" not in proxy.argv
    assert not [p.name for p in plan().processes if "--metrics-port" in p.argv]
    assert [p.metrics for p in plan().processes if p.kind != "proxy"] == ["", "", ""]


def test_the_metrics_port_is_the_deployments_to_set() -> None:
    """Or what `pdserve status` says of it would be wrong."""
    with pytest.raises(ConfigError, match="metrics-port is the deployment's"):
        Spec(kvd_settings=("metrics-port=9",))

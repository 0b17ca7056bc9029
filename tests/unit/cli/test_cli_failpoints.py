"""Which process of a deployment a failpoint is for."""

from pathlib import Path

import pytest

from pdserve.cli.failpoints import addressed
from pdserve.cli.plan import Kind, Process
from pdserve.rpc.errors import ConfigError

KINDS: dict[str, Kind] = {"kvd": "kvd", "decode-0": "engine", "traces": "traces", "proxy": "proxy"}
PROCESSES = tuple(
    Process(name, kind, ("run",), "127.0.0.1:1", Path("log"), env={"A": "b"}) for name, kind in KINDS.items()
)


def test_each_gets_its_own() -> None:
    """Several entries for one process stay in order; who is not named gets none, beside what it had."""
    given = {"PDSERVE_FAILPOINTS": " kvd: a=1*off->pause ;proxy:c=pause;; kvd:b=delay(3)"}
    made = {process.name: dict(process.env) for process in addressed(PROCESSES, given)}
    assert made == {
        "kvd": {"A": "b", "PDSERVE_FAILPOINTS": "a=1*off->pause;b=delay(3)"},
        "decode-0": {"A": "b", "PDSERVE_FAILPOINTS": ""},
        "traces": {"A": "b", "PDSERVE_FAILPOINTS": ""},
        "proxy": {"A": "b", "PDSERVE_FAILPOINTS": "c=pause"},
    }


def test_without_any_nothing_changes() -> None:
    """As nearly always."""
    assert addressed(PROCESSES, {"HOME": "/"}) == PROCESSES


@pytest.mark.parametrize(
    "entry", ["kvd.post=pause", "clock=return(3)", "decode-1:sim.step=pause", "traces:clock=return(3)"]
)
def test_who_is_meant_must_be_said(entry: str) -> None:
    """An entry without a process, with one that is not there, or for one without points: refused, with the names."""
    with pytest.raises(ConfigError, match=r"names no process(?s:.*)NAME is one of kvd, decode-0, proxy") as raised:
        addressed(PROCESSES, {"PDSERVE_FAILPOINTS": f"kvd:kvd.post=pause;{entry}"})
    assert repr(entry) in raised.value.message


def test_a_socket_is_refused() -> None:
    """One path cannot be that of several processes: the last to bind it would have it."""
    with pytest.raises(ConfigError, match="PDSERVE_FAILPOINTS_SOCKET"):
        addressed(PROCESSES, {"PDSERVE_FAILPOINTS_SOCKET": "/tmp/x"})

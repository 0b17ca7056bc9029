"""docs/faults.md, made of what the matrix and the failpoints are: `python -m tests.matrix.docs` writes it.

The words about each fault are here; phases, cells that cannot happen and points are read from the code.
"""

import ast
import enum
import inspect
import itertools
import textwrap
from collections.abc import Iterator
from typing import Final

from pdserve.runtime.failpoints import Kind, Point
from tests.forked.forks import ROOT
from tests.matrix import cells
from tests.matrix.cells import CANNOT, MODES, Cannot, dashed
from tests.matrix.faults import Fault
from tests.matrix.phases import Phase

PATH: Final = ROOT / "docs" / "faults.md"

_OTHER_PAIR: Final = "the answer, from another pair; one that has begun goes on there"
_AT_ONCE: Final = "at once, by kvd"
_FAULTS: Final[dict[Fault, tuple[str, str]]] = {
    Fault.NONE: ("the answer", "at once, when the last byte has landed"),
    Fault.CANCEL: ("`CANCELLED`", "at once; after the fence where an operation is in flight"),
    Fault.P_KILLED: (f"{_OTHER_PAIR}; undisturbed once the KV has landed", f"{_AT_ONCE}: the memory's connection ends"),
    Fault.D_KILLED: (_OTHER_PAIR, f"{_AT_ONCE}: the memory's connection ends"),
    Fault.P_RESTARTED: ("as killed; nothing of the old engine is taken for the new one's", "as killed"),
    Fault.D_RESTARTED: ("as killed; nothing of the old engine is taken for the new one's", "as killed"),
    Fault.P_STOPPED: (
        "the answer, from another pair: the proxy misses beats, or kvd a renewal",
        "when the lease runs out; on the stopped engine when it goes on",
    ),
    Fault.D_STOPPED: (
        "the answer, from another pair, once the proxy misses beats",
        "at once, by cancelling, or at the accept deadline; on the stopped engine when it goes on",
    ),
    Fault.KVD_STOPPED: (
        "the answer, once kvd goes on",
        "at once; for kvd's deadlines the time in which it did not run has not passed",
    ),
    Fault.KVD_KILLED: (
        "the answer; hand-overs that were open are tried again, or the prompt is computed at decode",
        "at once, by the engines themselves: `KVD_UNAVAILABLE`",
    ),
    Fault.PROXY_KILLED: (
        "`UNAVAILABLE`; the SDK sends again, for up to a minute, where nothing has been streamed",
        "at once, by the services: their calls end",
    ),
    Fault.END_DROPPED: (
        "the answer, one to two leases later",
        "the engine asks again after a lease, and is told again",
    ),
    Fault.P_END_DROPPED: ("the answer", "prefill's after one to two leases, as above"),
    Fault.END_TWICE: ("the answer", "at once; the second is passed over"),
    Fault.END_LATE: ("as dropped, or when the next one comes", "as dropped"),
    Fault.LAYER_DROPPED: ("the answer; the layer goes with a later notice or the offer", "at once"),
    Fault.LAYER_TWICE: ("the answer", "at once; what is said twice is copied once"),
    Fault.LAYER_LATE: ("the answer", "at once"),
    Fault.LINK_FAILS: ("the answer, by another hand-over: `TRANSFER_FAILED`", "at once, after the fence"),
    Fault.LINK_HANGS: (
        "the answer, by another hand-over: `TRANSFER_EXPIRED`",
        "at the transfer's deadline plus the fence's, by tearing the session down",
    ),
    Fault.CLOCK_P: ("the answer; from another pair where decode's locator looks expired", "at once"),
    Fault.CLOCK_D: ("the answer; from another pair where a ticket or locator looks expired", "at once"),
    Fault.CLOCK_KVD: ("the answer, computed at decode: kvd refuses all tickets (`TICKET_EXPIRED`)", "at once"),
    Fault.CLOCK_PROXY: ("the answer", "at once"),
}

_INTRO: Final = """\
# What goes wrong, and what happens then

`make matrix` holds a request in each phase of its life, lets each fault strike, and checks: one typed answer within its
deadline; every block back on both sides; no token that differs from one engine alone; the next request served; the
cause in the proxy's `request_ended`. Real processes, sockets and signals; the model and the link are simulated. The
deadlines there are short (lease 0.5 s); what is freed "by a deadline" takes yours, see `pdserve-kvd --help`.

The answers are for a deployment with another pair to go to, and the policy `recompute`. Without either the client gets
the error that the first attempt ended with.

This file is made by `python -m tests.matrix.docs`, and a test compares.
"""

_NOT_SHOWN: Final = """\
Not shown by any case; the deadlines have tests of their own:

- an end that is lost on the way to the service beside an engine. It holds no blocks, the scheduler's end frees them.
  Prefill's service waits for at most `--release-seconds`, the proxy for `--release-timeout`, decode's service for
  `--transfer-seconds`;
- a fence that is not told to a worker: it waits for a bounded time, and then its engine ends rather than overwrite what
  may still be read;
- requests that come long after a clock step at the proxy.
"""

_ONLY: Final = """\
## The only engine is replaced

The proxy holds what it cannot place, whether the engine drains, has ended or has died, until the next one is there: its
start, its first beat, which it sends at once, and a connection. That is the gap.

| a request that | gets | after |
|---|---|---|
| comes in the gap | the answer | the rest of the gap, in the part `admit` of its TTFT |
| comes in the gap, and no engine comes | `NO_ENGINES` | `--hold-timeout`: 5 s, under compose 15 s |
| comes in the gap, with less time of its own | `DEADLINE_EXCEEDED` | that time |
| comes when `--hold-queue` (256) are held | `NO_ENGINES` | at once |
| runs on the engine, which drains | the answer, from that engine | no delay |
| meets an engine that has begun to drain | the answer, from the next one | the rest of the gap |
| runs on the engine, which dies | the answer, from the next one; where it has begun it goes on, if it can | the gap |
| the same, and no engine comes | the error that its attempt ended with | what is left of `--hold-timeout` |
| the same, and the next one dies of it too | `ENGINE_DIED` | at once |

- The gap begins when the engine says that it drains: it may finish answers for `--drain-seconds` (30 s), and what comes
  meanwhile waits already. To show no error, a hold has to last as long as that and a start together.
- All waits of one request count against one `--hold-timeout`. The SDK sends what ended with `NO_ENGINES` again, for up
  to a minute.
- Where prefill is away, decode computes the prompts that it was computing, under the policy `recompute`.
- A proxy that is new itself holds a request for a model that it has not heard of, too, for the first three beats
  (`--beats-settle`); after them that is `UNKNOWN_MODEL` at once.

Shown by `tests/sim/test_sim_replaced.py`, and on containers by `make test-compose`, where a plain `up -d` of the only
engine, under load, shows no client an error.
"""

_USE: Final = """\
## Failpoints

Every process has named points at which it can be made to fail; none is armed unless somebody arms it. Each arming and
firing is logged as a warning. Not for a deployment that serves: whoever can open the socket can make the process fail.

    PDSERVE_FAILPOINTS="kvd.post=1*error(TRANSFER_FAILED);clock=return(3)" pdserve-kvd ...
    PDSERVE_FAILPOINTS_SOCKET=/run/pdserve/kvd.fail pdserve-kvd ...
    PDSERVE_FAILPOINTS="kvd:kvd.post=1*error(TRANSFER_FAILED);decode-0:sim.step=2*delay(100)" pdserve up --engine sim

Under `pdserve up` each entry names its process, as `pdserve status` does; one that does not, or that names none of the
deployment's, is refused, and so is the socket's variable. A process that is started again begins with the first term:
with the last line the first hand-over after each start of kvd fails; its request is tried again and answered, with one
fallback.

The socket (its owner's only) takes JSON lines, and answers each with the point's counts:

    {"do": "arm", "point": "kvd.post", "terms": "1*pause"}     {"do": "disarm" | "release", "point": "kvd.post"}
    {"do": "await", "point": "kvd.post", "fired": 1, "waiting": 0, "seconds": 5}     {"do": "clear"}

Terms say what happens, time after time: `1*off->1*error(TRANSFER_FAILED)->2*delay(100)->pause` is nothing, then that
error, then twice a delay of 100 ms, then a pause each time. `error(REASON)` raises the error of that reason,
`delay(ms)` waits, `pause` or `pause(seconds)` waits for a release, `stop` and `kill` are signals to the process; of
messages, `drop` loses one, `twice` doubles it, `late` (with a count) puts it behind the next one of its connection; of
values, `return(number)` says it.
"""


def render() -> str:
    """The whole file."""
    parts = [_INTRO, *_fault_table(), _ONLY, *_phase_table(), *_cannot_table(), _USE, *_point_table()]
    return "\n".join(parts)


def _fault_table() -> Iterator[str]:
    yield "## Fault by fault\n"
    yield f"{_count()} cases; one of them is `pytest tests/matrix -k P-killed:third-token:read`.\n"
    yield "An *end* is kvd's word that a half of a transfer is over; faults strike the one to an engine's scheduler.\n"
    yield "| fault | the client gets | blocks are freed | shown by `-k` |"
    yield "|---|---|---|---|"
    for fault in Fault:
        sees, freed = _FAULTS[fault]
        yield f"| {fault.value} | {sees} | {freed} | `{dashed(fault.value)}:` |"
    yield ""
    yield _NOT_SHOWN


def _phase_table() -> Iterator[str]:
    yield "## Phases\n"
    yield "| phase | the request |"
    yield "|---|---|"
    docs = member_docs(Phase)
    for phase in Phase:
        yield f"| {phase.value} | {docs[phase.name]} |"
    yield ""


def _cannot_table() -> Iterator[str]:
    yield "## Cells that cannot happen\n"
    yield "| faults | phases | mode | because | cells |"
    yield "|---|---|---|---|---|"
    for entry in CANNOT:
        yield _cannot_row(entry)
    yield ""


def _cannot_row(entry: Cannot) -> str:
    faults = "every" if len(entry.faults) == len(Fault) else ", ".join(f.value for f in Fault if f in entry.faults)
    phases = "every" if len(entry.phases) == len(Phase) else ", ".join(p.value for p in Phase if p in entry.phases)
    modes = "both" if len(entry.modes) == len(MODES) else "".join(entry.modes)
    count = sum(next((e for e in CANNOT if e.holds(cell)), None) is entry for cell in cells.every())
    return f"| {faults} | {phases} | {modes} | {entry.because} | {count} |"


def _point_table() -> Iterator[str]:
    kinds = {Kind.PLACE: "place: may also `error`", Kind.MESSAGE: "message", Kind.VALUE: "value"}
    yield "| point | kind | where |"
    yield "|---|---|---|"
    docs = member_docs(Point)
    for point in Point:
        yield f"| `{point.value}` | {kinds[point.kind]} | {docs[point.name]} |"
    yield ""


def _count() -> int:
    return sum(not cells.cannot(cell) for cell in cells.every())


def member_docs(kind: type[enum.Enum]) -> dict[str, str]:
    """The line under each member of an enum, by its name."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for member, below in itertools.pairwise(tree.body):
        if isinstance(member, ast.Assign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            (name,) = member.targets
            assert isinstance(name, ast.Name)
            docs[name.id] = " ".join(str(below.value.value).split())
    return docs


if __name__ == "__main__":
    PATH.write_text(render())

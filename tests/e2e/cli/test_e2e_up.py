"""`pdserve up` with the sim engine: real kvd, engines and proxy, each a process of its own."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli import deployment
from pdserve.client import Client, ConfigError, Draining, Retry, Unavailable

PDSERVE = (sys.executable, "-m", "pdserve.cli")
READY = 40.0
PAGE = Path(__file__).parents[3] / "docs" / "sdk.md"


@dataclass
class Up:
    """A running `pdserve up`."""

    process: subprocess.Popen[bytes]
    state_dir: Path
    out: Path

    def record(self) -> dict[str, Any]:
        """up.json, once the deployment is ready."""
        deadline = time.monotonic() + READY
        while True:
            try:
                return dataclasses.asdict(deployment.find(self.state_dir))
            except ConfigError:
                assert self.process.poll() is None, self.out.read_text()
                assert time.monotonic() < deadline, self.out.read_text()
                time.sleep(0.1)

    def end(self, number: signal.Signals) -> int:
        """Its exit status after a signal."""
        self.process.send_signal(number)
        return self.process.wait(READY)


def start(state_dir: Path, *flags: str) -> Up:
    out = state_dir / "out"
    command = [*PDSERVE, "up", "--engine", "sim", "--grpc-port", "0", "--http-port", "0", "--state-dir", str(state_dir)]
    with out.open("wb") as file:
        process = subprocess.Popen([*command, *flags], stdout=file, stderr=file, start_new_session=True)
    return Up(process, state_dir, out)


def run(*words: str, timeout: float = 50.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PDSERVE, *words], capture_output=True, text=True, timeout=timeout, check=False)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def gone(pids: list[int]) -> bool:
    """Whether all of them end within the deadline."""
    deadline = time.monotonic() + READY
    while any(alive(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture
def state_dir() -> Iterator[Path]:
    # Not tmp_path: it can be too long for a Unix socket.
    folder = Path(tempfile.mkdtemp(prefix="pds-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Up]:
    """One deployment for the tests that only talk to it."""
    folder = Path(tempfile.mkdtemp(prefix="pds-", dir="/tmp"))
    up = start(folder, "--both", "1", "--prefill", "1", "--decode", "1")
    try:
        up.record()
        yield up
        assert up.end(signal.SIGINT) == 0, up.out.read_text()
    finally:
        up.process.kill()
        up.process.wait()
        shutil.rmtree(folder)


def test_the_deployment_answers_through_every_command(fleet: Up) -> None:
    """generate, chat and status find the deployment by its folder and get answers that were handed over."""
    where = ("--state-dir", str(fleet.state_dir))
    for mode in ("read", "write"):
        said = run("generate", "a" * 100, "--max-tokens", "8", "--temperature", "0", "--mode", mode, "--json", *where)
        assert said.returncode == 0, said.stderr
        answer = json.loads(said.stdout)
        assert answer["mode"] == mode
        assert answer["transfer"]["kv_bytes"] > 0
        assert answer["prefill_engine_id"] != answer["decode_engine_id"]
        assert answer["recomputed_tokens"] <= 16
    status = run("status", *where)
    assert status.returncode == 0, status.stderr
    engines, _, processes = status.stdout.partition("\n\n")
    assert [line.split()[1] for line in engines.splitlines()[4:]].count("prefill") == 1
    assert {line.split()[0] for line in processes.splitlines()[2:]} == set(fleet.record()["processes"])
    chat = subprocess.run(
        [*PDSERVE, "chat", "--max-tokens", "4", *where], input="hi\n", capture_output=True, text=True, timeout=50
    )
    assert chat.returncode == 0, chat.stderr
    assert len(chat.stdout.strip()) > 0


def test_every_example_of_the_sdk_page_runs_on_a_real_deployment(fleet: Up) -> None:
    """docs/sdk.md, example by example, against real processes instead of the fake."""
    target = fleet.record()["grpc"]
    for example in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(example.replace("127.0.0.1:50050", target), str(PAGE), "exec"), {})


def test_any_route_gives_the_same_greedy_answer(fleet: Up) -> None:
    """The pair in both modes and the single engine choose the same tokens."""
    with Client(fleet.record()["grpc"], retry=Retry(attempts=1)) as client:
        alone = client.generate("Tell me", max_tokens=16, temperature=0, route="colocated")
        assert alone.transfer is None
        for mode in ("read", "write"):
            split = client.generate("Tell me", max_tokens=16, temperature=0, mode=mode, on_failure="fail")
            assert split.token_ids == alone.token_ids
            assert (split.mode, split.fallbacks) == (mode, 0)


def test_a_second_deployment_in_the_same_folder_is_refused(fleet: Up) -> None:
    """The folder is taken: one sentence, and the first is unharmed."""
    said = run("up", "--engine", "sim", "--state-dir", str(fleet.state_dir))
    assert said.returncode == 1
    assert "already" in said.stderr
    assert run("status", "--state-dir", str(fleet.state_dir)).returncode == 0


def test_ctrl_c_drains_and_leaves_nothing(state_dir: Path) -> None:
    """After SIGINT: exit status 0, no process, no record, no key; the answer under way was finished."""
    up = start(state_dir)
    record = up.record()
    with Client(record["grpc"], retry=Retry(attempts=1)) as client, client.stream("x", max_tokens=64) as stream:
        next(stream)
        up.process.send_signal(signal.SIGINT)
        assert len(stream.completion().token_ids) == 64
    assert up.process.wait(READY) == 0, up.out.read_text()
    assert gone(list(record["processes"].values()))
    assert not (state_dir / "up.json").exists()
    assert not (state_dir / "cluster.key").exists()
    assert "draining" in up.out.read_text()


SLOW = ("--", "--sim-cost-decode-base", "0.05")
"""An engine whose answer of 64 tokens takes more than 3 s."""


def test_a_second_ctrl_c_ends_what_runs_with_its_reason(state_dir: Path) -> None:
    """DRAINING, which says that another proxy may answer, and not a bare UNAVAILABLE; status 0, and no process."""
    up = start(state_dir, *SLOW)
    record = up.record()
    with Client(record["grpc"], retry=Retry(attempts=1)) as client, client.stream("x", max_tokens=1000) as stream:
        next(stream)
        up.process.send_signal(signal.SIGINT)
        wait_for(up, "proxy: draining")
        up.process.send_signal(signal.SIGINT)
        with pytest.raises(Draining, match="stopped"):
            stream.completion()
    assert up.process.wait(READY) == 0, up.out.read_text()
    assert gone(list(record["processes"].values()))


def wait_for(up: Up, words: str) -> None:
    """Returns when it has said that."""
    deadline = time.monotonic() + READY
    while words not in up.out.read_text():
        assert time.monotonic() < deadline, up.out.read_text()
        time.sleep(0.02)


def test_ctrl_c_while_starting_leaves_nothing(state_dir: Path) -> None:
    """SIGINT before anything serves: exit status 130 and no process, as after a drain."""
    up = start(state_dir)
    wait_for(up, "prefill-0: starting")
    assert up.end(signal.SIGINT) == 130
    ours = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(state_dir).encode() in _read(path)]
    assert ours == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it has just ended


def test_two_that_start_at_once_do_not_meet(state_dir: Path) -> None:
    """Both want the same ports, before any service of either listens: both serve, one at other ports, and it says so;
    each routes to its own engines."""
    wanted = {"gRPC": "--grpc-port", "HTTP": "--http-port", "traces": "--traces-port"}
    with contextlib.ExitStack() as stack:
        holds = [stack.enter_context(socket.socket()) for _ in wanted]
        for hold in holds:
            hold.bind(("127.0.0.1", 0))
        ports = [str(hold.getsockname()[1]) for hold in holds]
    flags = [word for flag, port in zip(wanted.values(), ports, strict=True) for word in (flag, port)]
    folders = [state_dir / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    ups = [start(folder, *flags) for folder in folders]
    try:
        records = [up.record() for up in ups]
        for face, key, port in zip(wanted, ("grpc", "http", "traces"), ports, strict=True):
            at = [record[key] for record in records]
            assert len(set(at)) == 2
            assert sum(where.endswith(f":{port}") for where in at) == 1, at
            moved = ups[0 if at[1].endswith(f":{port}") else 1]
            assert f"port {port} is taken: {face} is on " in moved.out.read_text()
        ids = []
        for record in records:
            with Client(record["grpc"], retry=Retry(attempts=1)) as client:
                answer = client.generate("a" * 100, max_tokens=4, temperature=0)
                ids.append({engine.engine_id for engine in client.topology().engines})
            assert {answer.prefill_engine_id, answer.decode_engine_id} == ids[-1]
        assert not ids[0] & ids[1]
        for up in ups:
            assert up.end(signal.SIGINT) == 0, up.out.read_text()
    finally:
        for up in ups:
            up.process.kill()
            up.process.wait()


def test_a_death_is_named_and_ends_the_deployment(state_dir: Path) -> None:
    """kill -9 of an engine that may not be started again: exit status 1, its name and the end of its log on stderr,
    everything else stopped."""
    up = start(state_dir, "--restarts", "0")
    pids = up.record()["processes"]
    os.kill(pids["decode-0"], signal.SIGKILL)
    assert up.process.wait(READY) == 1
    out = up.out.read_text()
    assert re.search(r"decode-0 \(pid \d+\) was ended by signal 9", out)
    assert "serving" in out[out.index("the end of its log") :]
    assert gone(list(pids.values()))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ("--", "--sim-layers", "0"),
            r"(prefill|decode)-0 .* ended with status 2: .*layers must be at least 1, not 0; .*",
        ),
        (
            ("--", "--no-such-flag"),
            r"(prefill|decode)-0 .* ended with status 2: unrecognized arguments: --no-such-flag.*",
        ),
        (("--kvd", "lease=-1"), r"kvd .* ended with status 2: .*lease.*; the end of its log .*"),
    ],
)
def test_a_process_that_cannot_start_is_named(state_dir: Path, words: tuple[str, ...], says: str) -> None:
    """A setting that a service refuses ends `up` with the service's own words in the headline, as a wrong setting."""
    up = start(state_dir, *words)
    assert up.process.wait(READY) == 1
    out = up.out.read_text()
    assert re.search(rf"^pdserve: {says} \(CONFIG\)$", out, re.MULTILINE), out


def test_failpoints_name_their_process(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not is refused before anything starts. kvd's strikes the first hand-over and no later one, in its
    process alone; a point that each process has is off in all but the one that is named."""
    monkeypatch.setenv("PDSERVE_FAILPOINTS", "kvd.post=1*error(TRANSFER_FAILED)")
    said = run("up", "--engine", "sim", "--state-dir", str(state_dir))
    assert said.returncode == 1
    assert "'kvd.post=1*error(TRANSFER_FAILED)' names no process of the deployment" in said.stderr
    assert "kvd, prefill-0, decode-0, proxy (CONFIG)" in said.stderr
    monkeypatch.setenv("PDSERVE_FAILPOINTS", "kvd:kvd.post=1*error(TRANSFER_FAILED);prefill-0:clock=return(2)")
    up = start(state_dir)
    with Client(up.record()["grpc"], retry=Retry(attempts=1)) as client:
        first, second = (client.generate(text * 100, max_tokens=4, on_failure="recompute") for text in "ab")
    assert (first.fallbacks, second.fallbacks) == (1, 0)
    armed = {log.stem: log.read_text().count("failpoint_armed") for log in (state_dir / "logs").glob("*.log")}
    assert {name: count for name, count in armed.items() if count} == {"kvd": 1, "prefill-0": 1}
    assert up.end(signal.SIGINT) == 0, up.out.read_text()


def test_when_we_are_killed_the_processes_drain_and_end(state_dir: Path) -> None:
    """kill -9 of `pdserve up` itself: an answer under way is finished, what comes then is refused with a reason,
    nothing stays behind, and the folder can be used again."""
    up = start(state_dir, *SLOW)
    record = up.record()
    pids = record["processes"]
    with Client(record["grpc"], retry=Retry(attempts=1)) as client, client.stream("x", max_tokens=64) as stream:
        next(stream)
        assert up.end(signal.SIGKILL) == -signal.SIGKILL
        refused = until_refused(client)
        assert refused.reason == "DRAINING", "the stream still runs, so the proxy does"
        assert len(stream.completion().token_ids) == 64
    assert gone(list(pids.values()))
    again = start(state_dir)
    again.record()
    assert again.end(signal.SIGTERM) == 0, again.out.read_text()


def until_refused(client: Client) -> Unavailable:
    """How a proxy that is about to drain refuses, once it does."""
    deadline = time.monotonic() + READY
    while time.monotonic() < deadline:
        try:
            client.generate("y", max_tokens=1)
        except Unavailable as error:
            return error
    raise AssertionError("it never drained")


def test_the_demo_with_the_sim_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`pdserve demo --engine sim` keeps every promise and ends with what to try next: `pdserve trace --last`, which has
    the last answer's TTFT and parts as the demo's tables have them, to the microsecond."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # where its traces stay
    said = run("demo", "--engine", "sim", timeout=55.0)
    assert said.returncode == 0, said.stdout + said.stderr
    verdict, _, last = said.stdout.splitlines()[-3:]
    assert (verdict, last) == ("demo: 6 answers, 6 identical to the single engine", "pdserve trace --last")
    assert "part of TTFT, ms" in said.stdout
    trace = run(*last.split()[1:])
    assert trace.returncode == 0, trace.stdout + trace.stderr
    assert "these are the traces of what ran until " in trace.stderr

    def column(of: str) -> dict[str, str]:
        """The first and the last number of each line."""
        found = (re.match(r"(.+?)  +(?:.*  +)?([\d.]+)(?:  +[\d.]+%)?$", line) for line in of.splitlines())
        names = {"proxy serialization": "proxy.serialization", "RDMA wait (kv.wait)": "kv.wait"}
        return {names.get(one[1], one[1]): one[2] for one in found if one}

    shown, told = column(trace.stdout.partition("\npart ")[2]), column(said.stdout.partition("\npart of TTFT")[2])
    assert shown["TTFT"] == told["TTFT"]
    assert shown == {name: told[name] for name in shown}
    ttft = round(float(shown.pop("TTFT")) * 1000)
    assert sum(round(float(ms) * 1000) for ms in shown.values()) == ttft

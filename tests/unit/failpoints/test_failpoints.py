"""The language of failpoints, what each action does, and commanding a process from outside."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pdserve.rpc.errors import ConfigError, TransferFailed
from pdserve.runtime.clock import Clock
from pdserve.runtime.failpoints import FAILPOINTS, Failpoints, Kind, Point, failpoint, failpoint_now, passing_now
from pdserve.runtime.failpoints.control import answer, from_environment
from pdserve.runtime.failpoints.terms import Action, Program, Term, parse

PLACE = Point.KVD_POST
MESSAGE = Point.KVD_TELL_SCHEDULER


@pytest.fixture
def failpoints() -> Failpoints:
    """A table of the test's own."""
    return Failpoints()


class TestTerms:
    """The language."""

    def test_terms_act_one_after_the_other(self) -> None:
        """Each as often as it says; the last, without a count, for ever."""
        program = Program(parse("1*off->2*error(TRANSFER_FAILED)->delay(5)"))
        acted = [program.next().action.value for _ in range(6)]
        assert acted == ["off", "error", "error", "delay", "delay", "delay"]

    def test_used_up_terms_do_nothing(self) -> None:
        """After the last counted one."""
        program = Program(parse("2*drop"))
        assert [program.next().action for _ in range(4)] == [Action.DROP, Action.DROP, Action.OFF, Action.OFF]

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("", "is not"),
            ("sometimes", "no such action"),
            ("error", "takes an argument"),
            ("error(NO_SUCH_REASON)", "no error has the reason"),
            ("drop(3)", "takes no argument"),
            ("delay(soon)", "not a number"),
            ("delay(-1)", "not a number"),
            ("pause(61)", "not a number"),
            ("return(soon)", "not a number"),
            ("return(inf)", "not a number"),
            ("late", "takes a count"),
            ("1*off->late", "takes a count"),
            ("0*drop", "never acts"),
            ("drop->1*off", "only the last"),
            ("1*off->", "is not"),
        ],
    )
    def test_what_is_no_program_is_refused(self, text: str, why: str) -> None:
        """And the error says which term, and why."""
        with pytest.raises(ConfigError, match=why):
            parse(text)


class TestActions:
    """What happens at a point."""

    def test_a_point_takes_only_what_can_happen_there(self, failpoints: Failpoints) -> None:
        """A message can be lost, work cannot."""
        failpoints.arm(MESSAGE, "drop")
        with pytest.raises(ConfigError, match="cannot drop"):
            failpoints.arm(PLACE, "drop")
        with pytest.raises(ConfigError, match="cannot error"):
            failpoints.arm(MESSAGE, "error(TRANSFER_FAILED)")

    def test_every_action_can_happen_somewhere(self) -> None:
        """No action is there for nothing."""
        assert set(Action) == {action for kind in Kind for action in kind.value}

    async def test_errors_are_raised_by_reason(self, failpoints: Failpoints) -> None:
        """In a task and in a thread alike; others than the second go by."""
        failpoints.arm(PLACE, "1*off->1*error(TRANSFER_FAILED)")
        await failpoints.go_by(PLACE)
        with pytest.raises(TransferFailed):
            failpoints.go_by_now(PLACE)
        await failpoints.go_by(PLACE)
        assert (failpoints.count(PLACE).hits, failpoints.count(PLACE).fired) == (3, 1)

    @pytest.mark.parametrize(
        ("terms", "arrived"),
        [
            ("1*drop", ["b", "c"]),
            ("1*twice", ["a", "a", "b", "c"]),
            ("1*late", ["b", "a", "c"]),
            ("2*late", ["c", "a", "b"]),
            ("1*off->1*drop", ["a", "c"]),
        ],
    )
    def test_messages_are_lost_doubled_and_late(self, failpoints: Failpoints, terms: str, arrived: list[str]) -> None:
        """And those that no term speaks of arrive as they were sent."""
        failpoints.arm(MESSAGE, terms)
        got = [x for item in "abc" for x in failpoints.passed(MESSAGE, item, failpoints.go_by_now(MESSAGE))]
        assert got == arrived

    def test_a_late_message_comes_over_its_own_lane(self, failpoints: Failpoints) -> None:
        """What another connection carries neither waits for it nor brings it."""
        failpoints.arm(MESSAGE, "1*late")
        said = [("a", 1), ("b", 2), ("c", 1)]
        got = [(*failpoints.passed(MESSAGE, x, failpoints.go_by_now(MESSAGE), lane),) for x, lane in said]
        assert got == [(), ("b",), ("c", "a")]

    async def test_a_task_at_a_pause_waits_until_it_is_released(self, failpoints: Failpoints) -> None:
        """The loop goes on meanwhile."""
        failpoints.arm(PLACE, "1*pause")
        task = asyncio.create_task(failpoints.go_by(PLACE))
        await asyncio.to_thread(failpoints.await_count, PLACE, 5.0, waiting=1)
        assert not task.done()
        assert failpoints.count(PLACE).waiting == 1
        assert await asyncio.to_thread(failpoints.release, PLACE) == 1
        await asyncio.wait_for(task, 5)
        assert failpoints.count(PLACE).waiting == 0

    def test_a_thread_at_a_pause_waits_until_the_point_is_disarmed(self, failpoints: Failpoints) -> None:
        """Disarming lets everybody go."""
        failpoints.arm(PLACE, "pause")
        thread = threading.Thread(target=failpoints.go_by_now, args=(PLACE,))
        thread.start()
        assert failpoints.await_count(PLACE, 5.0, waiting=1).waiting == 1
        failpoints.disarm(PLACE)
        thread.join(5)
        assert not thread.is_alive()

    async def test_nobody_waits_at_a_point_that_was_disarmed_meanwhile(
        self, failpoints: Failpoints, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Disarmed by another thread when its term was taken and it did not wait yet: nobody is left to release it."""
        taken = failpoints._next

        def disarmed(point: Point) -> Term:
            term = taken(point)
            failpoints.disarm(point)
            return term

        monkeypatch.setattr(failpoints, "_next", disarmed)
        with capture_logs() as logs:
            failpoints.arm(PLACE, "pause(0.05)")
            failpoints.go_by_now(PLACE)
            failpoints.arm(PLACE, "pause(0.05)")
            await failpoints.go_by(PLACE)
        assert "failpoint_never_released" not in [line["event"] for line in logs]
        assert failpoints.count(PLACE).waiting == 0

    @pytest.mark.parametrize("again", ["arm", "disarm", "clear"])
    def test_a_late_message_is_of_its_own_time(self, failpoints: Failpoints, again: str) -> None:
        """What no other message has followed is lost with the terms that held it; it does not come under later ones."""
        failpoints.arm(MESSAGE, "1*late")
        assert list(failpoints.passed(MESSAGE, "old", failpoints.go_by_now(MESSAGE))) == []
        if again != "arm":
            getattr(failpoints, again)(*([MESSAGE] if again == "disarm" else []))
        failpoints.arm(MESSAGE, "1*off")
        assert list(failpoints.passed(MESSAGE, "new", failpoints.go_by_now(MESSAGE))) == ["new"]

    async def test_a_pause_has_an_end(self, failpoints: Failpoints) -> None:
        """Nobody waits for ever where the test forgot to release."""
        failpoints.arm(PLACE, "pause(0.01)")
        await asyncio.wait_for(failpoints.go_by(PLACE), 5)

    async def test_a_cancelled_task_leaves_the_pause(self, failpoints: Failpoints) -> None:
        """And is not counted as waiting."""
        failpoints.arm(PLACE, "1*pause")
        task = asyncio.create_task(failpoints.go_by(PLACE))
        await asyncio.to_thread(failpoints.await_count, PLACE, 5.0, waiting=1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert failpoints.count(PLACE).waiting == 0

    @pytest.mark.parametrize(("terms", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
    def test_a_process_kills_or_stops_itself(self, terms: str, number: signal.Signals) -> None:
        """As the signal would."""
        code = (
            "from pdserve.runtime.failpoints import *\n"
            f"FAILPOINTS.arm(Point.KVD_POST, {terms!r})\nfailpoint_now(Point.KVD_POST)\n"
        )
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert (os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.WTERMSIG(status)) == number
        finally:
            process.kill()
            process.returncode = 0  # it has been waited for, or is now
            if os.WIFSTOPPED(status):
                os.waitpid(process.pid, 0)


class TestProcess:
    """The table of this process, and commands from outside."""

    @pytest.fixture(autouse=True)
    def _nothing_left(self) -> object:
        yield
        FAILPOINTS.clear()

    async def test_nothing_happens_where_nothing_is_armed(self) -> None:
        """Nor is anything counted."""
        await failpoint(PLACE)
        failpoint_now(PLACE)
        assert list(passing_now(MESSAGE, "a")) == ["a"]
        assert not FAILPOINTS.armed
        assert FAILPOINTS.count(PLACE).hits == 0

    def test_a_process_clock_can_be_off(self) -> None:
        """Its wall clock alone."""
        clock = Clock()
        before = clock.monotonic()
        FAILPOINTS.arm(Point.CLOCK, "return(3600)")
        off = clock.unix()
        FAILPOINTS.disarm(Point.CLOCK)
        assert off - clock.unix() > 3500
        assert clock.monotonic() - before < 60

    def test_the_environment_arms(self) -> None:
        """Several points, with semicolons between."""
        table = Failpoints()
        from_environment(table, {"PDSERVE_FAILPOINTS": "kvd.post=1*error(TRANSFER_FAILED); clock=return(1.5)"})
        assert table.value(Point.CLOCK) == 1.5
        with pytest.raises(TransferFailed):
            table.go_by_now(PLACE)

    @pytest.mark.parametrize("terms", ["kvd.post", "kvd.nowhere=drop", "kvd.post=explode"])
    def test_an_environment_that_means_nothing_is_refused(self, terms: str) -> None:
        """At the start, before anything is served."""
        with pytest.raises(ConfigError):
            from_environment(Failpoints(), {"PDSERVE_FAILPOINTS": terms})

    def test_commands_over_the_socket(self, tmp_path: Path) -> None:
        """Arm, see it wait, release; what is no command is answered and harms nothing."""
        table = Failpoints()
        from_environment(table, {"PDSERVE_FAILPOINTS_SOCKET": str(tmp_path / "f.sock")})
        assert (tmp_path / "f.sock").stat().st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX) as wire:
            wire.connect(str(tmp_path / "f.sock"))
            lines = wire.makefile("rw")

            def command(**fields: object) -> dict[str, object]:
                lines.write(json.dumps(fields) + "\n")
                lines.flush()
                reply: dict[str, object] = json.loads(lines.readline())
                return reply

            assert command(do="arm", point="kvd.post", terms="1*pause") == {"hits": 0, "fired": 0, "waiting": 0}
            thread = threading.Thread(target=table.go_by_now, args=(PLACE,))
            thread.start()
            waiting = {"hits": 1, "fired": 1, "waiting": 1}
            assert command(do="await", point="kvd.post", waiting=1, seconds=5) == waiting
            assert "no failpoint" in str(command(do="arm", point="nowhere", terms="drop")["error"])
            assert "not a command" in str(command(do="arm")["error"])
            assert command(do="release", point="kvd.post")["fired"] == 1
            thread.join(5)
            assert not thread.is_alive()
            assert command(do="clear") == {}
            lines.close()

    def test_a_path_that_cannot_be_bound_is_refused(self, tmp_path: Path) -> None:
        """At the start, with the reason: a folder is there, or no folder is."""
        (tmp_path / "file").touch()
        for path in (tmp_path, tmp_path / "none" / "f.sock", tmp_path / "file" / "f.sock"):
            with pytest.raises(ConfigError, match="failpoint socket"):
                from_environment(Failpoints(), {"PDSERVE_FAILPOINTS_SOCKET": str(path)})

    @pytest.mark.parametrize("line", [b"{", b"[]", b'{"do": "arm", "point": "kvd.post"}'])
    def test_what_is_no_command_is_answered(self, line: bytes) -> None:
        """The connection goes on."""
        assert "not a command" in answer(Failpoints(), line)["error"]

    def test_terms_that_are_no_text_are_answered(self) -> None:
        """They are no terms."""
        assert "failpoint term" in answer(Failpoints(), b'{"do": "arm", "point": "kvd.post", "terms": 5}')["error"]

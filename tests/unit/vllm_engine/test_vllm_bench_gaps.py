"""What the engine's benchmark makes of gaps, and how its streams and its command behave. No engine."""

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from pdserve.engine.port import Output, Request
from pdserve.engine.vllm.bench import Plan
from pdserve.engine.vllm.bench_gaps import Block, Idle, Landing, Pattern, Took, Windows, gaps_between
from pdserve.engine.vllm.bench_rig import Stream, only_results, streaming
from pdserve.kvd import bench as kvd_bench
from pdserve.rpc.errors import ConfigError, EngineDied, PdserveError


def test_a_gap_lies_between_two_tokens() -> None:
    """n tokens have n - 1 gaps, and one token none: then nothing was measured."""
    assert gaps_between([1.0, 1.5, 3.5]) == [0.5, 2.0]
    with pytest.raises(ValueError, match="1 tokens"):
        gaps_between([1.0])


def steps(*walls: float, cpu: float = 0.5) -> tuple[Took, ...]:
    return tuple(Took(wall, wall * cpu) for wall in walls)


def test_the_idle_connectors_share_is_of_medians() -> None:
    """Neither a step nor a whole block that something else stretched moves the percentage."""
    good = Block(steps(1.02, 1.02, 1.02), steps(1.0, 1.0, 1.0))
    stretched = Block(steps(1.02, 9.0, 1.02), steps(1.0, 1.0, 1.0))
    lost = Block(steps(7.0, 9.0, 8.0), steps(1.0, 1.0, 1.0))
    idle = Idle.of([[good, stretched, good], [good, lost, good]])
    assert idle.wall.percent == pytest.approx(2.0)
    assert idle.cpu.percent == pytest.approx(2.0)
    assert idle.by_start == pytest.approx((2.0, 2.0))
    assert idle.step_s == 1.0


def test_both_clocks_are_told() -> None:
    """A connector that waits costs time, one that computes costs the processor's too."""
    waits = Block(steps(1.2, 1.2, cpu=0.5), steps(1.0, 1.0, cpu=0.6))
    idle = Idle.of([[waits, waits]])
    assert idle.wall.percent == pytest.approx(20.0)
    assert idle.cpu.percent == pytest.approx(0.0)


def test_the_error_shrinks_with_the_square_root_of_the_blocks() -> None:
    """It is that of a median: blocks a percent apart at the quartiles."""
    apart = [Block(steps(ratio), steps(1.0)) for ratio in (0.99, 0.995, 1.0, 1.005, 1.01)]
    few, many = Idle.of([apart]), Idle.of([apart * 20])
    assert few.wall.error == pytest.approx(1.0 / 1.349 * 1.253 / 5**0.5)
    assert many.wall.error == pytest.approx(few.wall.error / 20**0.5)


def test_nothing_measured_is_no_result() -> None:
    """An empty run does not read as a connector that costs nothing, one block not as a measurement."""
    with pytest.raises(ValueError, match="0 blocks"):
        Idle.of([[]])
    with pytest.raises(ValueError, match="1 blocks"):
        Idle.of([[Block(steps(1.0), steps(1.0))]])


def run_steps(pattern: Pattern, decoding: list[bool]) -> tuple[list[bool], list[Block]]:
    """Runs steps whose number is the time that they take; where attached, and the blocks."""
    now, attached, blocks = 0.0, [], []
    for number, kind in enumerate(decoding):
        ended = pattern.end(now, now / 2)
        blocks += [] if ended is None else [ended]
        attached.append(pattern.attached_next(kind))
        pattern.begin(now, now / 2)
        now += number
    return attached, blocks


def test_the_connector_comes_and_goes_in_turns_of_four_steps() -> None:
    """A, B, B, A: a steady drift falls on both sides; a turn's first step does not count."""
    attached, blocks = run_steps(Pattern(), [True] * 17)
    assert attached == [True] * 4 + [False] * 8 + [True] * 5
    (block,) = blocks
    assert [took.wall for took in block.attached] == [1, 2, 3, 13, 14, 15]
    assert [took.wall for took in block.detached] == [5, 6, 7, 9, 10, 11]
    assert [took.cpu for took in block.detached] == [2.5, 3, 3.5, 4.5, 5, 5.5]
    assert sum(took.wall for took in block.attached) == sum(took.wall for took in block.detached)


def test_a_block_is_of_decode_steps_that_follow_each_other() -> None:
    """Any other step has the connector, and what was gathered before it is dropped."""
    attached, blocks = run_steps(Pattern(), [True] * 10 + [False] + [True] * 16 + [False])
    assert attached[9:12] == [False, True, True]
    (block,) = blocks
    assert block.attached[0].wall == 12


def test_the_joining_requests_compute_is_taken_off_the_largest_gap() -> None:
    """Steps of 10, 14 with a joining request: a gap of 24 while landing is two steps, not 2.4."""
    landing = Landing.of(Windows(quiet=[10.0] * 9, landing=[10.0, 14.0, 24.0], local=[14.0, 10.0, 14.0], requests=2))
    assert landing.joining_s == pytest.approx(4.0)
    assert landing.landing == pytest.approx(2.0)
    assert landing.local == pytest.approx(1.0)
    assert landing.quiet == pytest.approx(1.0)


def test_a_stall_while_landing_is_not_excused_by_the_control() -> None:
    """What is taken off comes from the same requests without a hand-over, never from the window judged."""
    stalled = Landing.of(Windows(quiet=[10.0] * 9, landing=[10.0, 60.0, 60.0], local=[10.0, 10.0, 10.0], requests=2))
    assert (stalled.joining_s, stalled.landing) == (0.0, 6.0)


class _Script:
    """An engine whose stream ends, or dies, after some tokens; None: it goes on for good."""

    def __init__(self, tokens: int | None, error: PdserveError | None = None) -> None:
        self.tokens, self.error, self.closed = tokens, error, False

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """See engine.port."""
        sent = 0
        try:
            while self.tokens is None or sent < self.tokens:
                yield Output(token_ids=(1,))
                sent += 1
                await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


async def test_a_stream_is_aborted_when_it_is_no_longer_wanted() -> None:
    """It knows a time for each token, and closing it closes the engine's request."""
    engine = _Script(None)
    async with streaming(engine, (1,)) as stream:
        before = stream.tokens
        await stream.go_on(5)
        assert stream.tokens >= before + 5
        assert stream.times == sorted(stream.times)
    assert engine.closed


async def test_a_stream_that_ends_early_is_no_measurement() -> None:
    """Whoever waits for more tokens hears that none will come."""
    stream = Stream(_Script(3), (1,))
    with pytest.raises(PdserveError, match="ended after 3 tokens"):
        await stream.go_on(4)
    await stream.aclose()


async def test_a_stream_dies_of_what_its_engine_died_of() -> None:
    """The engine's error is not hidden behind a missing token."""
    with pytest.raises(EngineDied, match="gone"):
        async with streaming(_Script(3, EngineDied("gone")), (1,)):
            pass


@pytest.mark.parametrize(
    ("plan", "said"), [({"streams": 0}, "streams"), ({"hidden": 100}, "multiple"), ({"steps": 5000}, "steps")]
)
def test_a_plan_that_cannot_be_measured_is_refused(plan: dict[str, int], said: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError, match=said):
        Plan(**plan)


def test_only_results_are_on_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    """What else is written, as by a process that was started, is kept back; afterwards all is as before."""
    with only_results() as out:
        os.write(1, b"vLLM says much\n")
        os.write(2, b"and warns\n")
        print("a result", file=out, flush=True)
    os.write(1, b"later\n")
    said = capfd.readouterr()
    assert (said.out, said.err) == ("a result\nlater\n", "")


def test_what_was_kept_back_is_shown_after_a_failure(capfd: pytest.CaptureFixture[str]) -> None:
    """The reason of a failed start is in vLLM's log."""

    def fail() -> None:
        with only_results():
            os.write(1, b"vLLM says why\n")
            raise EngineDied("no")

    with pytest.raises(EngineDied):
        fail()
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "vLLM says why\n")


def _python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the engine's benchmark: a program that prints its arguments and misses a target."""
    program = folder / "python"
    program.write_text('#!/bin/sh\necho "$@"\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def test_kvds_benchmark_runs_the_engines_as_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """--engine is that part alone: its output and its exit status are passed on."""
    _python(tmp_path, monkeypatch)
    assert kvd_bench.main(["--engine", "--json", "--seed", "3"]) == 1
    assert capfd.readouterr().out.split() == ["-m", "pdserve.engine.vllm.bench", "--strict", "--seed", "3", "--json"]


def test_kvds_benchmark_says_what_the_engines_part_needs(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Asked for by name, a part that cannot be measured is an error, not a silence."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        kvd_bench.main(["--engine"])
    assert "needs vLLM" in capfd.readouterr().err


def test_a_result_is_a_line() -> None:
    """For people with its verdict, for programs as JSON."""
    result = kvd_bench.Result("gap", 2.5, "steps", 2.0, False, "why")
    assert "MISSED" in kvd_bench.line(result, as_json=False)
    assert json.loads(kvd_bench.line(result, as_json=True))["value"] == 2.5


def test_tokens_that_are_read_in_bursts_have_steps_all_the_same() -> None:
    """A reader without a core stamps several tokens at once: most gaps are 0, and their mean is a step."""
    bursts = [0.0, 0.0, 30.0] * 3
    landing = Landing.of(Windows(quiet=bursts, landing=[0.0, 0.0, 40.0], local=bursts, requests=2))
    assert landing.step_s == 10.0
    assert landing.landing == (40.0 - 20.0) / 10.0

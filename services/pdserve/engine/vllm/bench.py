"""What the connector costs a running vLLM engine: `python -m pdserve.engine.vllm.bench`.

(1) idle connector: a decode step of an engine that is attached to kvd and hands nothing over,
    against the same engine's steps without its connector, in turns of a few steps; stamped in vLLM's
    core, where the step is. The result is the median over all turns.
(2) landing: the largest gap between two tokens of a running stream while 20 READ transfers land on
    its engine, in steps of the stream alone, less what the joining requests compute anyway.

Real vLLM on CPU, a random Llama, kvd as a process. The measured engine has the last core for itself;
kvd, the engines' front ends and this process share the others. docs/benchmarks.md says how to read it.
"""

import argparse
import asyncio
import contextlib
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from math import gcd
from typing import Final

from pdserve.engine.port import Output
from pdserve.engine.vllm import bench_turns
from pdserve.engine.vllm.bench_gaps import Block, Idle, Landing, Windows, gaps_between
from pdserve.engine.vllm.bench_rig import (
    BLOCK,
    CONTEXT,
    MAX_LEN,
    Rig,
    only_results,
    open_rig,
    random_prompt,
    streaming,
)
from pdserve.engine.vllm.testing import EngineProcess
from pdserve.engine.vllm.testing_pair import FIRST, Pair, Prompt, ask
from pdserve.engine.vllm.tiny import TinyShape
from pdserve.kvd.bench import Result, line
from pdserve.kvd.client import Outcome
from pdserve.kvd.types import Mode
from pdserve.rpc.errors import ConfigError, PdserveError
from pdserve.runtime.flags import add_flags, from_args
from pdserve.runtime.log import LogLevel, setup

IDLE_TARGET: Final = 2.0
"""Percent of a step, at most."""
GAP_TARGET: Final = 2.0
"""Steps, at most."""

_CACHED: Final = 4 * BLOCK
"""Prompt tokens of a request that lands, but for one: that one is left to compute when full blocks
are in a prefix cache."""
_HEAD: Final = 64
"""Width of an attention head."""
_SWITCH_INTERVAL_S: Final = 0.0005
"""One thread hears of tokens, another stamps them: neither may keep the other waiting."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    starts: int = 4
    """Starts of the engine of (1)."""
    streams: int = 16
    """Streams of each start, one after the other."""
    steps: int = 100
    """Decode steps of each stream, and of (2)'s stream alone."""
    rounds: int = 3
    """Rounds of (2)."""
    transfers: int = 20
    """Prompts that land in each round."""
    layers: int = 16
    """Layers of the model; each calls the connector in each step."""
    hidden: int = 128
    """Width of the model; its weights had better fit a cache, or where they fell decides (1)."""
    seed: int = 0
    """Of the prompts; the weights are always the same."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot work."""
        for field in fields(self):
            if field.name != "seed" and getattr(self, field.name) < 1:
                raise ConfigError(f"{field.name} must be above 0, not {getattr(self, field.name)}")
        if self.hidden % _HEAD:
            raise ConfigError(f"hidden must be a multiple of a head's {_HEAD}, not {self.hidden}")
        if self.steps > MAX_LEN // 2:
            raise ConfigError(f"steps must be at most {MAX_LEN // 2}, not {self.steps}")

    @property
    def shape(self) -> TinyShape:
        """The model's."""
        heads = self.hidden // _HEAD
        return TinyShape(
            layers=self.layers,
            hidden=self.hidden,
            heads=heads,
            kv_heads=gcd(heads, 4),
            head_dim=_HEAD,
            max_model_len=MAX_LEN,
        )

    @property
    def kv_blocks(self) -> int:
        """Room for the longest stream and for every prompt that lands in a round."""
        return MAX_LEN // BLOCK + 2 * self.transfers * (_CACHED // BLOCK + 1)


async def measure_idle(rig: Rig, plan: Plan, draw: random.Random) -> Result:
    """What the idle connector adds to a decode step.

    Raises:
        PdserveError: an engine failed, or its steps were too few to say anything.
    """
    starts = [await _blocks(rig, plan, random_prompt(draw, CONTEXT)) for _ in range(plan.starts)]
    try:
        idle = Idle.of(starts)
    except ValueError as error:
        raise PdserveError(f"the idle connector: {error}; more steps are needed") from error
    wall, cpu = idle.wall, idle.cpu
    detail = (
        f"+- {wall.error:.2f} of a step of {_ms(idle.step_s)} ({wall.percent * idle.step_s * 1e4:+.0f} us); "
        f"CPU time {cpu.percent:+.2f} +- {cpu.error:.2f} %; by start {_listed(idle.by_start)}; "
        f"{plan.starts} starts x {plan.streams} streams x {plan.steps} steps"
    )
    return Result("idle connector", wall.percent, "% of a step", IDLE_TARGET, wall.percent <= IDLE_TARGET, detail)


async def _blocks(rig: Rig, plan: Plan, prompt: Prompt) -> list[Block]:
    """One start of an engine. After the first stream the prompt is in its prefix cache."""
    with tempfile.TemporaryDirectory(prefix="pdsb-") as folder:
        engine = await EngineProcess.start(rig.ours, partial(bench_turns.install, folder))
        try:
            for _ in range(plan.streams):
                async with streaming(engine, prompt) as stream:
                    await stream.go_on(plan.steps)
        finally:
            await engine.aclose()
        return bench_turns.read(folder)


async def measure_landing(rig: Rig, plan: Plan, draw: random.Random) -> Result:
    """The largest gap of any round."""
    rounds: list[Landing] = []
    moved = 0
    async with contextlib.AsyncExitStack() as stack:
        engines: list[EngineProcess] = []
        for settings in (rig.prefill, rig.ours):
            engines.append(await EngineProcess.start(settings))
            stack.push_async_callback(engines[-1].aclose)
        pair = Pair(rig.kvd, *engines)
        stack.push_async_callback(pair.aclose)
        await pair.open()
        await _round(pair, plan, draw)  # whatever is slow once is slow here
        for _ in range(plan.rounds):
            windows, moved = await _round(pair, plan, draw)
            rounds.append(Landing.of(windows))
        await pair.idle()
    worst = max(rounds, key=lambda one: one.landing)
    detail = (
        f"{_ms(worst.largest_s)}, of which {_ms(worst.joining_s)} a joining request's compute, "
        f"step {_ms(worst.step_s)}; rounds {_listed([one.landing for one in rounds])}; "
        f"without hand-over: the same requests {_listed([one.local for one in rounds])}, "
        f"the stream alone {_listed([one.quiet for one in rounds])}; {moved / plan.transfers / (1 << 20):.1f} MiB each"
    )
    value = worst.landing
    return Result(f"gap, {plan.transfers} landing", value, "steps", GAP_TARGET, value <= GAP_TARGET, detail)


async def _round(pair: Pair, plan: Plan, draw: random.Random) -> tuple[Windows, int]:
    """All prompts are computed and on offer before the stream begins: prefill's own work is not the
    connector's cost. Then they land one after the other. Returns the bytes that kvd moved, too.

    Raises:
        PdserveError: not every prompt landed.
    """
    prompts = [random_prompt(draw, _CACHED + 1) for _ in range(plan.transfers)]
    produces = [pair.produce(Mode.READ) for _ in prompts]
    try:
        offers = [(await ask(pair.prefill, p, FIRST, k)).last for p, k in zip(prompts, produces, strict=True)]
        legs = [pair.consume(produce, offer) for produce, offer in zip(produces, offers, strict=True)]
        async with streaming(pair.decode, random_prompt(draw, CONTEXT)) as stream:
            ends = [stream.tokens]
            await stream.go_on(plan.steps)
            ends.append(stream.tokens)
            for prompt, leg in zip(prompts, legs, strict=True):
                _expect((await ask(pair.decode, prompt, FIRST, leg)).last, cached=0)
            await stream.go_on(2)  # the last one's step belongs to them
            ends.append(stream.tokens)
            for prompt in prompts:
                _expect((await ask(pair.decode, prompt, FIRST)).last, cached=_CACHED)
            await stream.go_on(2)
            ends.append(stream.tokens)
        landed = [await pair.end(pair.decode, produce.transfer_id, 0) for produce in produces]
    except BaseException:
        for produce in produces:
            pair.cancel(produce.transfer_id)
        raise
    if any(end.outcome is not Outcome.LANDED for end in landed):
        raise PdserveError(f"not every prompt landed: {sorted({end.outcome.name for end in landed})}")
    quiet, landing, local = (gaps_between(stream.times[ends[i] - 1 : ends[i + 1]]) for i in range(3))
    return Windows(quiet, landing, local, plan.transfers), sum(end.facts.kv_bytes for end in landed)


def _expect(output: Output, cached: int) -> None:
    """A request that computes more than its last token is another measurement."""
    if (output.cached_tokens, output.recomputed_tokens) != (cached, 0):
        raise PdserveError(
            f"a joining request found {output.cached_tokens} tokens cached and recomputed {output.recomputed_tokens}; "
            f"it should have been {cached} and 0"
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _listed(values: Sequence[float], digits: int = 2) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values)


async def run(plan: Plan, report: Callable[[Result], None]) -> None:
    """Both measurements; each is reported as soon as it is there.

    Raises:
        PdserveError: an engine or kvd failed, or a prompt did not land.
    """
    draw = random.Random(plan.seed)
    async with open_rig(plan.shape, plan.kv_blocks) as rig:
        report(await measure_idle(rig, plan, draw))
        report(await measure_landing(rig, plan, draw))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; 1 where a target is missed and --strict, 2 where nothing could be measured."""
    parser = argparse.ArgumentParser(prog="python -m pdserve.engine.vllm.bench", description=__doc__)
    add_flags(parser, Plan)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--strict", action="store_true", help="exit with 1 where a target is missed")
    args = parser.parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    setup("bench", level=LogLevel.WARNING)
    results: list[Result] = []
    try:
        plan = from_args(Plan, args)
        with only_results() as out:

            def report(result: Result) -> None:
                results.append(result)
                print(line(result, as_json=args.json), file=out, flush=True)

            asyncio.run(run(plan, report))
    except PdserveError as error:
        print(f"pdserve.engine.vllm.bench: {error.message}", file=sys.stderr)
        return 2
    return 1 if args.strict and not all(one.met for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())

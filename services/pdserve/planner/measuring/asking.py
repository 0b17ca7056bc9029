"""The requests that measure a deployment, and what each of them tells. The adapter, over the SDK.

Prompts are random token ids that no prefix cache can know; the ids are below 256, which every model has. The engines'
own stamps time prompts and hand-overs (the parts of each answer's time to first token); decode steps are the gaps
between tokens as they come.
"""

import asyncio
import math
import random
import time
from dataclasses import dataclass, field

from pdserve.client import AsyncClient, Completion, Route, Topology
from pdserve.planner.measuring import steps
from pdserve.planner.measuring.design import Design
from pdserve.planner.measuring.points import (
    DecodePoint,
    EdgePoint,
    HandoverPoint,
    MixedPoint,
    Mode,
    PrefillPoint,
)
from pdserve.planner.measuring.together import together
from pdserve.rpc.errors import ConfigError, PdserveError

_IDS = range(32, 250)
"""Token ids of prompts: ordinary ones, also of models whose first ids are special, or bytes."""
_ROOM = 0.8
"""Share of a KV pool that a batch may need: nobody is to be preempted."""


@dataclass(slots=True)
class Found:
    """The points so far."""

    prefill: list[PrefillPoint] = field(default_factory=list)
    decode: list[DecodePoint] = field(default_factory=list)
    mixed: list[MixedPoint] = field(default_factory=list)
    handovers: list[HandoverPoint] = field(default_factory=list)
    edges: list[EdgePoint] = field(default_factory=list)


class Rig:
    """The requests that measure."""

    def __init__(self, client: AsyncClient, design: Design, rng: random.Random, model: str, topology: Topology) -> None:
        self._client = client
        self._design = design
        self._rng = rng
        self._model = model
        self._longest = 0
        self._prompts: dict[int, float] = {}
        self._step = math.inf
        self._busy = topology.in_flight + topology.queued
        usable = [e for e in topology.engines if e.model == model and not e.excluded_because]
        self._engines = {role: [e for e in usable if e.role == role] for role in ("prefill", "decode", "both")}
        self.pair = bool(self._engines["prefill"] and self._engines["decode"])
        self.alone = bool(self._engines["both"])
        self._route: Route = "split" if self.pair else "colocated"

    def pool(self, role: str) -> int:
        """KV tokens of the smallest engine in a role."""
        return min(engine.total_kv_tokens for engine in self._engines[role if self.pair else "both"])

    def check(self, longest: int) -> None:
        """Refuses what would measure something else."""
        self._longest = longest
        if not (self.pair or self.alone):
            raise ConfigError(f"profile: no engines to measure for {self._model}")
        if self._busy:
            raise ConfigError(f"profile: the deployment serves {self._busy} other requests: measure when it is idle")
        design = self._design
        most = max(*design.prompts, max(design.contexts)) + design.answer
        if most > longest:
            raise ConfigError(f"profile: {most} tokens are more than the model's context of {longest}")
        batch = max(design.batches) * (max(design.contexts) + design.answer)
        if batch > _ROOM * self.pool("decode"):
            raise ConfigError(
                f"profile: {max(design.batches)} sequences need {batch} tokens of KV, too much for a pool of "
                f"{self.pool('decode')}: choose smaller batches or contexts"
            )

    async def prompt(self, tokens: int, found: Found) -> None:
        """One prompt, alone: in READ and then in WRITE where there is a pair."""
        if not self.pair:
            done = await self._ask(tokens, None)
            found.prefill.append(self._prefill(done, "decode.first_step"))
            found.edges.append(_edges(done))
            return
        modes: tuple[Mode, ...] = ("read", "write")
        for mode in modes:
            done = await self._ask(tokens, mode)
            if mode == "read":  # WRITE's forward pass also tells kvd of each layer
                found.prefill.append(self._prefill(done, "prefill.forward"))
                found.edges.append(_edges(done))
            point = _handover(done)
            if point is not None:
                found.handovers.append(point)

    async def decode(self, batch: int, context: int) -> list[DecodePoint]:
        """A batch on each engine that decodes, all of one context."""
        engines = len(self._engines["decode" if self.pair else "both"])
        length = self._length(batch, context)
        async with together() as group:
            streams = [group.create_task(self._stream(context, length)) for _ in range(batch * engines)]
        points = steps.decode_points([stream.result() for stream in streams])
        self._step = min([self._step, *(point.seconds for point in points)])
        return points

    def _length(self, batch: int, context: int) -> int:
        """Of answers that are still under way, all of a batch, when its last prompt has been computed: as many steps
        more as its prompts take, and what is to be watched."""
        ahead = batch * len(self._engines["decode"]) / len(self._engines["prefill"]) if self.pair else batch
        known = [seconds for tokens, seconds in self._prompts.items() if tokens >= context]
        prompt = min(known, default=max(self._prompts.values(), default=0.0))
        wanted = self._design.answer + math.ceil(ahead * prompt / self._step)
        room = int(_ROOM * self.pool("decode") / batch)
        return min(wanted, room - context, self._longest - context)

    async def mixed(self, batch: int, tokens: int) -> list[MixedPoint]:
        """A prompt beside a batch, on engines that serve whole requests; nothing where the batch was over too soon."""
        engines = len(self._engines["both"])
        # Long enough for a prompt that takes some steps.
        length = self._design.answer + 8 * self._design.steps(tokens)
        started = [asyncio.Event() for _ in range(batch * engines)]
        async with together() as group:
            tasks = [group.create_task(self._stream(self._least(), length, "colocated", mark)) for mark in started]
            for mark in started:
                await mark.wait()
            begun = time.monotonic()
            done = await self._ask(tokens, None)
            ended = time.monotonic()
        answers = [task.result() for task in tasks]
        there = [a for a in answers if a.engine_id == done.decode_engine_id and a.times and a.times[-1] > begun]
        if not there or min(answer.times[-1] for answer in there) <= ended:
            return []
        prefill = self._prefill(done, "decode.first_step")
        context = sum(steps.seen_at(answer, begun) for answer in there)
        count = self._design.steps(prefill.tokens, len(there))
        return [MixedPoint(prefill.tokens, len(there), context, prefill.seconds, count)]

    def _least(self) -> int:
        return min(self._design.contexts)

    def _prompt(self, tokens: int) -> tuple[int, ...]:
        return tuple(self._rng.choice(_IDS) for _ in range(tokens))

    async def _ask(self, tokens: int, mode: Mode | None) -> Completion:
        """Two tokens: with one alone decode would have nothing to do."""
        done = await self._client.generate(
            self._prompt(tokens),
            model=self._model,
            mode=mode,
            route="split" if mode else "colocated",
            on_failure="fail",
            max_tokens=2,
            min_tokens=2,
            ignore_eos=True,
            temperature=0.0,
            timeout=self._design.timeout,
        )
        if done.mode != mode or done.fallbacks:
            raise PdserveError(f"profile: request {done.request_id} was not served as asked: {done.mode}")
        return done

    def _prefill(self, done: Completion, part: str) -> PrefillPoint:
        tokens, seconds = done.usage.prompt_tokens - done.usage.cached_tokens, _part(done, part)
        self._prompts[tokens] = min(seconds, self._prompts.get(tokens, math.inf))
        return PrefillPoint(tokens, seconds, self._design.steps(tokens))

    async def _stream(
        self, context: int, length: int, route: Route | None = None, started: asyncio.Event | None = None
    ) -> steps.Answer:
        times: list[float] = []
        async with self._client.stream(
            self._prompt(context),
            model=self._model,
            route=route or self._route,
            max_tokens=length,
            min_tokens=length,
            ignore_eos=True,
            temperature=0.0,
            timeout=self._design.timeout,
        ) as stream:
            async for delta in stream:
                times += [time.monotonic()] * len(delta.token_ids)
                if started is not None and times:
                    started.set()
            done = await stream.completion()
        if started is not None:
            started.set()  # nobody waits for a stream that gave nothing
        return steps.Answer(done.decode_engine_id, context, tuple(times))


def _part(done: Completion, *names: str) -> float:
    """Seconds of parts, summed.

    Raises:
        ConfigError: the engine does not stamp one of them.
    """
    parts = done.timings.parts
    missing = [name for name in names if name not in parts]
    if missing:
        raise ConfigError(f"profile: the engine does not say when {', '.join(missing)} was: it cannot be measured")
    return sum(parts[name] for name in names)


def _edges(done: Completion) -> EdgePoint:
    first, last = ("prefill.hop", "prefill.queue") if done.prefill_engine_id else ("decode.hop", "decode.queue")
    return EdgePoint(
        dispatch=_part(done, "tokenize", "admit", "route", first, last),
        egress=_part(done, "detokenize", "encode", "egress"),
    )


def _handover(done: Completion) -> HandoverPoint | None:
    """None where nothing was moved: a prompt of one token, or one that decode had."""
    facts = done.transfer
    if facts is None or not facts.kv_bytes or done.mode is None:
        return None
    return HandoverPoint(
        mode=done.mode,
        tokens=done.usage.prompt_tokens,
        kv_bytes=facts.kv_bytes,
        serialization=_part(done, "proxy.serialization", "decode.admit") if done.mode == "read" else 0.0,
        wait=_part(done, "kv.wait", "decode.queue"),
        copy_seconds=facts.copy_seconds,
        layers=facts.layers,
        transport=facts.transport,
    )

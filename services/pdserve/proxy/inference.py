"""What both faces call: a decoded request in, its job and then its events out; models and topology."""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from pdserve.proxy import trace, validate
from pdserve.proxy.admission import Admission
from pdserve.proxy.config import ProxyConfig
from pdserve.proxy.drive import Driver
from pdserve.proxy.holding import Waited
from pdserve.proxy.job import Job
from pdserve.proxy.parts import Point
from pdserve.proxy.registry import Registry
from pdserve.proxy.routing import Choice, unpaired_because
from pdserve.proxy.tokenizing.shelf import Shelf
from pdserve.proxy.trace import RandomBytes
from pdserve.proxy.types import Ask, Chat, Event, Mode, OnFailure, TokenIds
from pdserve.rpc.errors import (
    DeadlinePassed,
    IncompatibleEngines,
    KvdUnavailable,
    NoEngines,
    PdserveError,
    Unavailable,
)
from pdserve.runtime.clock import Clock
from pdserve.runtime.log import about

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model that can be asked for now."""

    id: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One line of the topology; fields as in pdserve.api.serving.v1.EngineStatus."""

    engine_id: str
    role: str
    model: str
    address: str
    state: str
    free_kv_tokens: int
    total_kv_tokens: int
    running: int
    waiting: int
    beat_age_seconds: float
    excluded_because: str


@dataclass(frozen=True, slots=True)
class Topology:
    """The engines behind the proxy."""

    engines: tuple[EngineStatus, ...]
    default_mode: Mode
    queued: int
    in_flight: int


class Inference:
    """The proxy's work behind its faces."""

    def __init__(
        self,
        config: ProxyConfig,
        registry: Registry,
        admission: Admission,
        shelf: Shelf,
        driver: Driver,
        clock: Clock,
        random: RandomBytes,
        refused: Callable[[PdserveError], None] = lambda _: None,
    ) -> None:
        """`refused`: is told why a request was not taken; neither blocks nor raises."""
        self._config = config
        self._registry = registry
        self._admission = admission
        self._shelf = shelf
        self._driver = driver
        self._clock = clock
        self._random = random
        self._refused = refused
        self._arriving = 0
        self._bounds = validate.Bounds(config.max_n, config.max_logprobs, config.max_stop)
        self._trace_ratio = 1.0 if config.trace_ratio is None else config.trace_ratio

    @property
    def clock(self) -> Clock:
        """The proxy's clock."""
        return self._clock

    def new_request_id(self) -> str:
        """For a request whose client chose none."""
        return self._random(16).hex()

    def check_open(self) -> None:
        """Raises Draining where the proxy takes nothing new."""
        self._admission.check_open()

    def placeable(self) -> list[str]:
        """The models of which a text that says nothing of its route could be placed now: there are engines for it, and
        what makes it token ids is loaded.

        Raises:
            Draining: the proxy takes nothing new.
            NoEngines: there are no engines; says what is missing.
            KvdUnavailable: there are, but a kvd drains, and prompts are not to be computed at decode meanwhile.
            Unavailable: there are, and no tokenizer.
        """
        self.check_open()
        found: list[str] = []
        missing: list[str] = []
        no_tokenizer: list[str] = []
        drains = False
        recompute = self._config.on_failure is OnFailure.RECOMPUTE
        for model in self._registry.models():
            try:
                self._admission.candidates(model, self._config.route, recompute=recompute)
            except (NoEngines, KvdUnavailable, IncompatibleEngines) as error:
                missing.append(f"{model}: {error.message}")
                drains = drains or isinstance(error, KvdUnavailable)
                continue
            if why := self._shelf.lacking(model):
                no_tokenizer.append(why)
            else:
                found.append(model)
        if no_tokenizer and not found:
            raise Unavailable("; ".join((*no_tokenizer, *missing)))
        if not found:
            kind = KvdUnavailable if drains else NoEngines
            raise kind("; ".join(missing) or "no engine is registered")
        return found

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Around what a face does until it has a job: an error there is a refusal, and counted as one."""
        try:
            yield
        except PdserveError as error:
            self._refused(error)
            raise

    async def prepare(self, ask: Ask, received_ns: int) -> Job:
        """Validates and tokenises, and waits for engines where none could serve it at this moment; no credits are held
        yet. `received_ns`: when the first byte was there. A prompt is tokenised before that wait, which so is part of
        `admit`; of a proxy that knows no model yet, after it, since it has no tokenizer either.

        Raises:
            InvalidRequest and its kinds: what can never succeed.
            NoEngines, IncompatibleEngines, KvdUnavailable, Overloaded, Draining, Unavailable: what cannot now.
            DeadlinePassed: it took longer than the client waits.
        """
        now = self._clock.monotonic()
        request_id = ask.request_id or self.new_request_id()
        context = trace.accept(ask.traceparent, self._random, self._trace_ratio)
        about(request_id=request_id, trace_id=context.trace_id)
        self._admission.check_room()
        validate.check_ask(ask, self._bounds)
        route, on_failure = ask.route or self._config.route, ask.on_failure or self._config.on_failure
        timeout = min(ask.timeout or self._config.request_timeout, self._config.request_timeout)
        deadline = now + timeout

        def resolved() -> str:
            self.check_open()
            listed = self._registry.models()
            # Who names none means what is served, not what was.
            served = self._registry.known() if ask.model or not listed else listed
            return validate.resolve_model(ask.model, served, settled=self._registry.settled)

        waited = Waited()
        model = await self._held(resolved, deadline, waited)

        def candidates() -> Sequence[Choice]:
            self.check_open()
            return self._admission.candidates(model, route, recompute=on_failure is OnFailure.RECOMPUTE)

        self._admission.holding.check(candidates, waited)
        prompt = await self._shelf.tokenize(model, ask.prompt, max(deadline - self._clock.monotonic(), 0.0))
        tokenized_ns = self._clock.monotonic_ns()
        choices = await self._held(candidates, deadline, waited)
        if isinstance(ask.prompt, TokenIds):
            validate.check_token_ids(ask.prompt.ids, choices[0].decode.vocab_size)
        sampling = validate.fit(choices, len(prompt), ask.sampling)
        if self._clock.monotonic() >= deadline:
            raise DeadlinePassed("the request's deadline passed before it could be dispatched")
        return Job(
            request_id=request_id,
            trace=context,
            model=model,
            prompt=prompt,
            sampling=sampling,
            mode=ask.mode or self._config.mode,
            route=route,
            on_failure=on_failure,
            deadline=deadline,
            points={Point.RECEIVED: received_ns, Point.TOKENIZED: tokenized_ns},
            chat=isinstance(ask.prompt, Chat),
            waited=waited,
        )

    async def _held(self, possible: Callable[[], T], deadline: float, waited: Waited) -> T:
        self._arriving += 1
        try:
            return await self._admission.holding.until(possible, deadline, waited)
        finally:
            self._arriving -= 1

    def run(self, job: Job) -> AsyncGenerator[Event, None]:
        """The job's events; see Driver.run. Close the generator, or cancel the job, to end it early."""
        return self._driver.run(job)

    def models(self) -> list[ModelInfo]:
        """The models that have a routable engine, and the longest context among their engines."""
        found: list[ModelInfo] = []
        for model in self._registry.models():
            engines = self._registry.routable(model)
            if engines:
                found.append(ModelInfo(model, max(entry.card.max_model_len for entry in engines)))
        return found

    def topology(self) -> Topology:
        """What there is and why it is used or not."""
        now = self._clock.monotonic()
        entries = self._registry.entries()
        lines: list[EngineStatus] = []
        for entry in entries:
            card = entry.card
            missed = self._registry.missed(entry, now)
            state = "suspect" if missed or entry.stuck else "draining" if entry.draining else "ready"
            lines.append(
                EngineStatus(
                    engine_id=card.engine_id,
                    role=card.role.value,
                    model=card.model,
                    address=card.address,
                    state=state,
                    free_kv_tokens=entry.free_kv_tokens,
                    total_kv_tokens=card.total_kv_tokens,
                    running=entry.running,
                    waiting=entry.waiting,
                    beat_age_seconds=max(0.0, now - entry.heard_at),
                    excluded_because=entry.excluded_because() or unpaired_because(entry, entries),
                )
            )
        for stranger in self._registry.strangers():
            instance = stranger.instance
            lines.append(
                EngineStatus(
                    engine_id="",
                    role={"P": "prefill", "D": "decode"}.get(instance.type, ""),
                    model="",
                    address=instance.http_address,
                    state="foreign",
                    free_kv_tokens=0,
                    total_kv_tokens=0,
                    running=0,
                    waiting=0,
                    beat_age_seconds=max(0.0, now - stranger.heard_at),
                    excluded_because="a stock MORI-IO instance: it has no kvd to hand KV over with",
                )
            )
        queued = len(self._admission)
        # Of those that wait, what has no engines yet to be validated against is no job.
        in_flight = self._driver.running - (queued - self._arriving)
        return Topology(tuple(lines), self._config.mode, queued, max(0, in_flight))

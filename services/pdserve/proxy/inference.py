"""What both faces call: a decoded request in, its job and then its events out; models and topology."""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pdserve.proxy import trace, validate
from pdserve.proxy.admission import Admission
from pdserve.proxy.config import ProxyConfig
from pdserve.proxy.drive import Driver
from pdserve.proxy.job import Job
from pdserve.proxy.parts import Point
from pdserve.proxy.registry import Registry
from pdserve.proxy.routing import unpaired_because
from pdserve.proxy.tokenizing.shelf import Shelf
from pdserve.proxy.trace import RandomBytes
from pdserve.proxy.types import Ask, Chat, Event, Mode, TokenIds
from pdserve.rpc.errors import DeadlinePassed, PdserveError
from pdserve.runtime.clock import Clock
from pdserve.runtime.log import about


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

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Around what a face does until it has a job: an error there is a refusal, and counted as one."""
        try:
            yield
        except PdserveError as error:
            self._refused(error)
            raise

    async def prepare(self, ask: Ask, received_ns: int) -> Job:
        """Validates and tokenises; nothing is held yet. `received_ns`: when the first byte was there.

        Raises:
            InvalidRequest and its kinds: what can never succeed.
            NoEngines, IncompatibleEngines, Overloaded, Draining, Unavailable: what cannot now.
            DeadlinePassed: tokenising took longer than the client waits.
        """
        now = self._clock.monotonic()
        request_id = ask.request_id or self.new_request_id()
        context = trace.accept(ask.traceparent, self._random, self._trace_ratio)
        about(request_id=request_id, trace_id=context.trace_id)
        self._admission.check_room()
        model = validate.resolve_model(ask.model, self._registry.models())
        validate.check_ask(ask, self._bounds)
        route = ask.route or self._config.route
        choices = self._admission.candidates(model, route)
        timeout = min(ask.timeout or self._config.request_timeout, self._config.request_timeout)
        if isinstance(ask.prompt, TokenIds):
            validate.check_token_ids(ask.prompt.ids, choices[0].decode.vocab_size)
        prompt = await self._shelf.tokenize(model, ask.prompt, timeout)
        sampling = validate.fit(choices, len(prompt), ask.sampling)
        deadline = now + timeout
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
            on_failure=ask.on_failure or self._config.on_failure,
            deadline=deadline,
            points={Point.RECEIVED: received_ns, Point.TOKENIZED: self._clock.monotonic_ns()},
            chat=isinstance(ask.prompt, Chat),
        )

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
        return Topology(tuple(lines), self._config.mode, queued, max(0, self._driver.running - queued))

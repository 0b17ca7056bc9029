"""What the runner needs of an endpoint: a port with two adapters, `over_grpc` and `over_http`."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.bench.results import EngineFacts, Failure
from pdserve.rpc.errors import InvalidRequest, NoEngines, PdserveError, UnknownModel

Clock = Callable[[], float]
"""Monotonic seconds; the event loop's own, so that deadlines and stamps are of one clock."""


@dataclass(frozen=True, slots=True)
class Asking:
    """What all requests of a measurement have in common."""

    model: str = ""
    """Empty: the endpoint's only one."""
    mode: str = ""
    """read or write; empty: the deployment's default."""
    route: str = ""
    """split, split_or_colocated or colocated; empty: the deployment's default."""
    ignore_eos: bool = True
    """Answers run to the length that was asked for; an endpoint that does not know the parameter may refuse it."""
    temperature: float | None = 0.0
    timeout: float = 600.0
    """Longest time of one request, seconds."""


@dataclass(slots=True)
class Trail:
    """What is seen of one request while it runs; what there is of it stays when the request fails."""

    sent: float | None = None
    """When it was sent; None: not yet."""
    chunks: list[float] = field(default_factory=list)
    """When each chunk with tokens came."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an endpoint says at the end of an answer; None and empty where it says nothing."""

    output_tokens: int
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    mode: str = ""
    transport: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Seconds by name."""
    unattributed: float = 0.0
    fallbacks: int = 0
    """Times the request left the path that it began on."""


@dataclass(frozen=True, slots=True)
class Described:
    """What an endpoint says of itself."""

    model: str
    max_model_len: int | None = None
    """Longest prompt and answer together, tokens; None: it does not say."""
    engines: Sequence[EngineFacts] = ()


Send = Callable[[Trail], Awaitable[Outcome]]
"""Sends one prepared request, keeps the trail, and returns at its end. May be called once.

Raises PdserveError where the request fails.
"""


class Endpoint(Protocol):
    """Something that answers prompts. For one event loop."""

    async def describe(self, timeout: float) -> Described:
        """Asks what is served.

        Raises:
            PdserveError: it does not answer within `timeout` seconds, or not with what was asked for.
        """
        ...

    def prepare(self, prompt: str | Sequence[int], output_tokens: int) -> Send:
        """Does all that takes time before the request is due.

        Raises:
            PdserveError: it cannot be sent.
        """
        ...

    async def aclose(self) -> None:
        """Ends the connection and what runs over it; safe twice."""
        ...


def failure(error: PdserveError) -> Failure:
    """An error as it is kept; a reason that this version has no class for is kept too."""
    return Failure(error.metadata.get("reason", error.reason), error.message)


def pick(models: Mapping[str, int | None], wanted: str, where: str) -> tuple[str, int | None]:
    """The model that was asked for and its longest context, or the only one there is.

    Raises:
        PdserveError: there is none, or no such one, or none was named among several.
    """
    if not models:
        raise NoEngines(f"{where} serves no model now")
    if not wanted and len(models) > 1:
        raise InvalidRequest(f"{where} serves {', '.join(models)}: name one with --model")
    name = wanted or next(iter(models))
    if name not in models:
        raise UnknownModel(f"{where} serves {', '.join(models)}, not {name}")
    return name, models[name]

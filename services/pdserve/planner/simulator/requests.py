"""A request on its way, and the sequence that it is on one engine."""

from dataclasses import dataclass, field

from pdserve.planner.simulator.fleet import Job


@dataclass(slots=True)
class Request:
    """What is known of one request."""

    index: int
    """Its place in the jobs."""
    job: Job
    """Its size."""
    sent: float
    """When the client sent it, seconds."""
    made: int = 0
    """Tokens of the answer, less those of the decode steps that its sequence is in now."""
    attempt: int = 0
    """Raised at each failure; what carries an older one is stale."""
    pieces: list[tuple[int, int, int] | float] = field(default_factory=list)
    """When tokens were made, in order: one's time, or (engine, from, to) in that engine's decode steps."""
    prefilled: float | None = None
    """When its prompt was first computed."""
    landed: float | None = None
    """When decode first knew of its KV."""
    done: float | None = None
    """When the last token was made."""
    producer: "Sequence | None" = None
    """On the prefill engine, until its KV was taken."""
    consumer: "Sequence | None" = None
    """On the engine that answers."""
    prefill: int = -1
    """The engine that computes the prompt for another, of the present attempt."""
    decode: int = -1
    """The engine that answers, of the present attempt."""
    reserved: list[tuple[int, int]] = field(default_factory=list)
    """(engine, tokens) of the proxy's credits."""

    @property
    def left(self) -> int:
        """Tokens still to make."""
        return self.job.output - self.made

    @property
    def need(self) -> int:
        """Tokens whose KV must be there before the next one can be made."""
        return self.job.prompt + self.made


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on one engine."""

    request: Request
    """Whose it is."""
    need: int
    """Tokens to be computed, or received, before it makes a token."""
    computed: int = 0
    """Of `need`."""
    produces: bool = False
    """Prefill of a split: is over when `need` is computed, and holds its memory until that was taken."""
    consumes: bool = False
    """Awaits its KV from a producer."""
    held: int = 0
    """Tokens of KV memory taken; of a decoding one, as of `joined`."""
    joined: int = -1
    """The engine's decode step at which it began to decode; -1: it does not."""
    begun: float = 0.0
    """When its first chunk began, seconds."""
    accepted: float | None = None
    """When a consumer's memory was reserved, seconds."""
    over: bool = False
    """A producer that has computed all, or a sequence that is no longer on its engine."""

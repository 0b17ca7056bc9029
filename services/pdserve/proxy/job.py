"""One validated request on its way: what was asked, when things happened, and the handle that ends it."""

from dataclasses import dataclass, field

from pdserve.proxy.attempt import Attempt
from pdserve.proxy.holding import Waited
from pdserve.proxy.trace import TraceContext
from pdserve.proxy.types import Mode, OnFailure, Route, Sampling
from pdserve.rpc.errors import PdserveError, RequestCancelled


@dataclass(slots=True, eq=False)
class Job:
    """A validated request. `cancel` and `end` end it from anywhere."""

    request_id: str
    trace: TraceContext
    model: str
    prompt: tuple[int, ...]
    sampling: Sampling
    """`max_tokens` is set."""
    mode: Mode
    route: Route
    on_failure: OnFailure
    deadline: float
    """Monotonic seconds."""
    points: dict[int, int]
    """Nanoseconds by Point."""
    chat: bool = False
    """A conversation; else a plain completion."""
    waited: Waited = field(default_factory=Waited)
    """For engines, since it came."""
    attempt: Attempt | None = None
    ended_by: PdserveError | None = None
    """Why it was ended from outside; None while it was not."""

    def cancel(self) -> None:
        """Nobody waits for the answer: both legs end now. Harmless after the end."""
        self.end(RequestCancelled("the client went away"))

    def end(self, error: PdserveError) -> None:
        """Both legs end now, and the request with this error; the first call counts. Harmless after the end."""
        if self.ended_by is None:
            self.ended_by = error
        if self.attempt is not None:
            self.attempt.close(self.ended_by)

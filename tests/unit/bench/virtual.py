"""An event loop whose time passes only while everybody waits, and an endpoint that plays a script in that time."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pdserve.bench.endpoint import Described, Outcome, Send, Trail
from pdserve.bench.measure import View
from pdserve.bench.plan import Load
from pdserve.bench.results import Record, Run
from pdserve.rpc.errors import PdserveError, Unavailable

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    """Waits for no file: passes the loop's time instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("everybody waits for something that no timer brings")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its `time()` begins at 0 and jumps to the next timer."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds."""
        return self._jumping.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """What `work` gives, in no real time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


@dataclass
class Answer:
    """How one request is answered."""

    ttft: float = 0.1
    itls: Sequence[float] = ()
    error: PdserveError | None = None
    """Raised after the tokens, in place of the end."""
    hang: bool = False
    """No end comes."""
    says: dict[str, Any] = field(default_factory=dict)
    """Members of the outcome."""


class Scripted:
    """See Endpoint: request number k of those prepared is answered by `script(k)`."""

    def __init__(self, script: Callable[[int], Answer], longest: int | None = 4096) -> None:
        self.script = script
        self.longest = longest
        self.prompts: list[Any] = []
        self.output_tokens: list[int] = []
        self.in_flight = self.most_in_flight = 0
        self.gone = False
        """Refuses everything."""

    async def describe(self, timeout: float) -> Described:
        if self.gone:
            raise Unavailable("nobody listens")
        return Described("scripted", self.longest)

    def prepare(self, prompt: Any, output_tokens: int) -> Send:
        answer = self.script(len(self.prompts))
        self.prompts.append(prompt)
        self.output_tokens.append(output_tokens)
        return lambda trail: self._send(answer, trail)

    async def _send(self, answer: Answer, trail: Trail) -> Outcome:
        clock = asyncio.get_running_loop().time
        trail.sent = clock()
        if self.gone:
            raise Unavailable("nobody listens")
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            for gap in (answer.ttft, *answer.itls):
                await asyncio.sleep(gap)
                trail.chunks.append(clock())
            if answer.hang:
                await asyncio.Event().wait()
            if answer.error is not None:
                raise answer.error
        finally:
            self.in_flight -= 1
        return Outcome(**({"output_tokens": len(trail.chunks)} | answer.says))

    async def aclose(self) -> None:
        pass


class Quiet(View):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.records: list[Record] = []
        self.on_begin: Callable[[], None] = lambda: None
        self.on_ended: Callable[[Record], None] = lambda _: None

    def begin(self, load: Load, requests: int) -> None:
        self.on_begin()

    def sent(self) -> None:
        pass

    def ended(self, record: Record) -> None:
        self.records.append(record)
        self.on_ended(record)

    def end(self, run: Run) -> None:
        pass

    def say(self, line: str) -> None:
        self.said.append(line)

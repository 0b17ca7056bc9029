"""What the service says of one request's answers: tokens as they come, and the sum at the end."""

from collections.abc import Sequence

from pdserve.decode.messages import Ask, Finished, Tokens
from pdserve.decode.taking import Taking
from pdserve.engine.ends import sum_facts
from pdserve.engine.hosting.stamps import Cut, Progress, Stamps
from pdserve.engine.port import Output
from pdserve.runtime.clock import Clock

STAMP_SECONDS = 0.05
"""Longest that the first token waits for kvd's word on when the blocks landed: the engine may hear it
a moment before this process does."""


class Answer:
    """Collects the outputs of the n answers of one request."""

    def __init__(self, ask: Ask, takings: Sequence[Taking], clock: Clock, progress: Progress) -> None:
        """`takings`: one per answer, or none without a source. `progress`: is told up to the first token."""
        self._takings = takings
        self._progress = progress
        self._clock = clock
        self._stamped = False
        self._completion = 0
        self._cached = 0
        self._recomputed = [0] * ask.answers

    @property
    def recomputes(self) -> int:
        """Answers so far whose prompts were computed here in place of a hand-over."""
        return sum(tokens > 0 for tokens in self._recomputed) if self._takings else 0

    def heard(self, output: Output) -> None:
        """The engine has said something; before anybody looks at it."""
        if self._stamped:
            return
        times = output.times
        if output.token_ids:
            self._progress.passed(Cut.DECODE_SCHEDULED, times.scheduled_ns)
            self._progress.passed(Cut.FIRST_TOKEN_SAMPLED, times.first_token_ns)
        elif times.scheduled_ns:
            self._progress.passed(Cut.DECODE_SCHEDULED, times.scheduled_ns)

    async def event(self, index: int, output: Output) -> Tokens | None:
        """What to send for an output; None where it says nothing new."""
        self._completion += len(output.token_ids)
        self._cached = max(self._cached, output.cached_tokens)
        self._recomputed[index] = max(self._recomputed[index], output.recomputed_tokens)
        if not (output.token_ids or output.text or output.finish):
            return None
        stamps = None
        if output.token_ids:
            if self._takings:
                self._takings[index].first_token.set()
            if not self._stamped:
                self._stamped = True
                stamps = await self._stamps(index)
        return Tokens(index, output.text, output.token_ids, output.logprobs, output.finish, output.stop_reason, stamps)

    async def finished(self, timeout: float) -> Finished:
        """The sum, once all answers have ended; waits at most `timeout` seconds per answer for kvd."""
        landed = [await taking.facts(timeout) for taking in self._takings]
        return Finished(
            self._completion,
            self._cached,
            sum(self._recomputed) if self._takings else 0,
            sum_facts([facts for facts in landed if facts is not None]),
        )

    async def _stamps(self, index: int) -> Stamps:
        progress = self._progress
        progress.passed(Cut.DETOKENIZED, self._clock.monotonic_ns())
        if self._takings:
            facts = await self._takings[index].facts(STAMP_SECONDS)
            progress.passed(Cut.DECODE_BLOCKS_RESERVED, facts.accepted_ns if facts else 0)
            progress.passed(Cut.KV_LANDED, facts.landed_ns if facts else 0)
        return dict(progress.stamps)

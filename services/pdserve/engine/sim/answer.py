"""One answer of a simulated model: its tokens, its text, and when it ends. Pure."""

import math
from dataclasses import dataclass

from pdserve.engine.port import Candidate, Finish, Position, Sampling
from pdserve.engine.sim import content
from pdserve.engine.sim.config import EOS

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step adds to an answer."""

    token_id: int
    text: str = ""
    logprobs: tuple[Position, ...] = ()
    finish: Finish | None = None
    stop_reason: str = ""


def text_of(token_id: int) -> str:
    """A token as text; special tokens have none, lone bytes of other characters show as U+FFFD."""
    return bytes((token_id,)).decode("utf-8", "replace") if token_id < 256 else ""


class Answer:
    """Made one token at a time; `most` is the number after which it ends by length."""

    def __init__(self, sampling: Sampling, most: int, eos_every: int) -> None:
        self._sampling = sampling
        self._most = most
        self._eos_every = eos_every
        greedy = sampling.temperature == 0
        self._seed = 0 if greedy or sampling.seed is None else sampling.seed
        self._held_back = max((len(stop) for stop in sampling.stop), default=1) - 1
        self._text = ""
        self._sent = 0
        self.count = 0
        """Tokens so far."""

    def add(self, raw: int) -> Piece:
        """The token that follows a text whose prefix word is `raw`."""
        sampling = self._sampling
        self.count += 1
        may_stop = self.count >= sampling.min_tokens
        eos = not sampling.ignore_eos and may_stop and content.ends_here(raw, self._eos_every)
        token = EOS if eos else content.next_token(raw, self._seed)
        logprobs = self._logprobs(raw, token)
        if token == EOS:
            return Piece(token, self._rest(), logprobs, Finish.STOP)
        if may_stop and token in sampling.stop_token_ids:
            return Piece(token, self._rest(), logprobs, Finish.STOP, str(token))
        before = len(self._text)
        self._text += text_of(token)
        if may_stop and (found := self._stop_string(before)):
            at, stop = found
            self._text = self._text[:at]
            return Piece(token, self._rest(), logprobs, Finish.STOP, stop)
        if self.count >= self._most:
            return Piece(token, self._rest(), logprobs, Finish.LENGTH)
        return Piece(token, self._safe(), logprobs)

    def _stop_string(self, before: int) -> tuple[int, str] | None:
        """Where the text has a stop string that the last token completed, and which; the first of several.
        One that was complete in the first `before` characters, when it could not end the answer, is text."""
        strings = [stop for stop in self._sampling.stop if stop]
        found = [(self._text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in strings]
        return min(((at, stop) for at, stop in found if at >= 0), default=None)

    def _safe(self) -> str:
        """New text that no stop string can still take back."""
        end = max(self._sent, len(self._text) - self._held_back)
        new, self._sent = self._text[self._sent : end], end
        return new

    def _rest(self) -> str:
        new, self._sent = self._text[self._sent :], len(self._text)
        return new

    def _logprobs(self, raw: int, token: int) -> tuple[Position, ...]:
        wanted = self._sampling.logprobs
        if wanted is None:
            return ()
        chosen = content.confidence(raw)
        sampled = Candidate(token, text_of(token), math.log(chosen))
        others = []
        for place in range(1, wanted):
            other = content.runner_up(token if token != EOS else 32, place)
            others.append(Candidate(other, text_of(other), math.log((1 - chosen) * 0.5**place)))
        return (Position(sampled, (sampled, *others)[:wanted]),)

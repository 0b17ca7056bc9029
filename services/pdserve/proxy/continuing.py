"""What a client has been told of an answer, and where another attempt takes it up. Pure.

An engine makes text with some delay: a character may take several tokens, and while a stop string
may yet come, the last `held` characters (one less than the longest stop string has) stay back. So
the seam is laid at a token whose text the client has in full, and what the client has beyond it
comes again and is left out:

    tokens     prompt | t1 ... ts | ts+1 ... tk |            tk: the last that the client has
    attempt 2  [      prompt      ] ts+1 ... tk   tk+1 ...   its prompt, and what it makes
    client       told | told      | left out    | passed on

A stop string that is not complete at tk begins in the `held` characters behind what was told, hence
behind the seam: the engine sees all of it. A seam inside a character would be wrong: vLLM's
detokeniser then gives out the prompt's text once more.
"""

from dataclasses import dataclass, replace

from pdserve.proxy.types import Delta, Sampling


class Diverged(Exception):
    """What came again is not what the client has."""


@dataclass(frozen=True, slots=True)
class Part:
    """What an attempt is asked for: all of an answer, or what is missing of it."""

    prompt: tuple[int, ...]
    sampling: Sampling
    """`max_tokens` is set."""


class Telling:
    """The deltas of one request on their way to the client."""

    def __init__(self, whole: Part) -> None:
        """`whole`: what the client asked for."""
        self._whole = whole
        self._held = max((len(stop) for stop in whole.sampling.stop), default=1) - 1
        self._open = set(range(whole.sampling.n))
        self._count = 0
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._chars = 0
        self._seams = [(0, 0)]
        """(tokens, characters of their text), where both are known to match."""
        self._tokens_again: tuple[int, ...] = ()
        self._text_again = ""

    @property
    def count(self) -> int:
        """Tokens that the client has, over all n answers."""
        return self._count

    @property
    def begun(self) -> bool:
        """The client has something of the answer."""
        return self._count > 0 or self._chars > 0

    @property
    def complete(self) -> bool:
        """The client has all of every answer."""
        return not self._open

    def hear(self, delta: Delta) -> Delta | None:
        """What of an attempt's delta is new to the client, and is told now; None for nothing.

        Raises:
            Diverged: this attempt does not say what the client has already.
        """
        new = self._leave_out(delta) if self._tokens_again or self._text_again else delta
        if new is None:
            return None
        self._count += len(new.token_ids)
        self._chars += len(new.text)
        if new.finish is not None:
            self._open.discard(new.index)
        if self._whole.sampling.n == 1:
            self._tokens += new.token_ids
            self._text.append(new.text)
            # Text that came with one token ends with that token's last character, but for what is held
            # back. Of several tokens the last may have begun a character.
            if len(delta.token_ids) == 1 and new.text:
                self._seams.append((self._count, self._chars + self._held))
        return new

    def resume(self) -> Part | None:
        """What another attempt has to be asked for, whose deltas are heard next; None where no attempt
        could go on as this answer would have."""
        whole = self._whole
        greedy = whole.sampling.temperature == 0
        if not _continuable(whole.sampling, greedy=greedy):
            return None
        tokens, chars = next(seam for seam in reversed(self._seams) if seam[1] <= self._chars)
        left = (whole.sampling.max_tokens or 0) - tokens
        if left < 1 or not (greedy or tokens == self._count):  # a sampled token does not come again
            return None
        self._tokens_again = tuple(self._tokens[tokens:])
        self._text_again = "".join(self._text)[chars:]
        fewest = max(0, whole.sampling.min_tokens - tokens)
        return Part(
            whole.prompt + tuple(self._tokens[:tokens]), replace(whole.sampling, max_tokens=left, min_tokens=fewest)
        )

    def _leave_out(self, delta: Delta) -> Delta | None:
        known = min(len(delta.token_ids), len(self._tokens_again))
        chars = min(len(delta.text), len(self._text_again))
        if delta.token_ids[:known] != self._tokens_again[:known] or delta.text[:chars] != self._text_again[:chars]:
            raise Diverged("other tokens came than the client has")
        self._tokens_again, self._text_again = self._tokens_again[known:], self._text_again[chars:]
        if delta.finish is not None and (self._tokens_again or self._text_again):
            raise Diverged("the answer ended before what the client has of it")
        new = replace(
            delta, token_ids=delta.token_ids[known:], text=delta.text[chars:], logprobs=delta.logprobs[known:]
        )
        return new if new.token_ids or new.text or new.finish else None


def _continuable(sampling: Sampling, *, greedy: bool) -> bool:
    """Whether the tokens so far, as part of a prompt, leave the choice of the next as it was.

    - Several answers share one prompt and one hand-over; continued, each would need its own.
    - Presence and frequency penalties count the answer's tokens and not the prompt's. (The repetition
      penalty counts both.)
    - A seed promises the same answer again; another request begins another sequence.
    """
    penalties = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    return sampling.n == 1 and not penalties and (greedy or sampling.seed is None)

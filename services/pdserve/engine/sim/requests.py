"""One request inside a simulated engine. Data and small sums only."""

import enum
from dataclasses import dataclass, field

import numpy as np

from pdserve.engine.port import Request
from pdserve.engine.sim import content
from pdserve.engine.sim.answer import Answer
from pdserve.engine.sim.content import Words


class Status(enum.Enum):
    """Where a request is; the words are vLLM's."""

    WAITING = "waiting"
    WAITING_FOR_REMOTE = "waiting_for_remote"
    """Has blocks that a peer fills."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    """Over; its blocks may still be held by a hand-over."""


@dataclass(eq=False, slots=True)
class SimRequest:
    """`handle` is unique in the engine's life, `request.request_id` only among what is there."""

    handle: str
    request: Request
    answer: Answer
    tokens: list[int]
    """Prompt and answer so far."""
    raws: Words
    """Prefix word of each position of `tokens`; longer than needed."""
    status: Status = Status.WAITING
    block_ids: list[int] = field(default_factory=list)
    computed: int = 0
    """Leading tokens whose KV is in the blocks (awaited, while WAITING_FOR_REMOTE)."""
    cached_blocks: int = 0
    """Leading blocks that the prefix cache knows."""
    local_tokens: int = 0
    """Prompt tokens found in the prefix cache when it was first given blocks."""
    started: bool = False
    """Has been given blocks before."""
    handed_over: bool = False
    """A peer has filled its blocks and nobody has looked yet."""
    recomputed_tokens: int = 0
    scheduled_ns: int = 0
    first_token_ns: int = 0

    @classmethod
    def make(cls, handle: str, request: Request, answer: Answer) -> "SimRequest":
        """From what the engine was asked."""
        tokens = list(request.prompt)
        return cls(handle, request, answer, tokens, content.prefixes(tokens))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    def append(self, token: int) -> None:
        """One more token of the answer."""
        count = len(self.tokens)
        if count == len(self.raws):
            self.raws = np.concatenate([self.raws, np.zeros(max(64, count), dtype=np.uint64)])
        self.raws[count] = content.extend(int(self.raws[count - 1]), token)
        self.tokens.append(token)

    def keys(self, first: int, last: int, block_size: int) -> list[int]:
        """Prefix-cache keys of whole blocks `first` to `last` - 1."""
        return [int(self.raws[(block + 1) * block_size - 1]) for block in range(first, last)]

"""What to measure of a deployment: prompt lengths, batches, contexts, and how often. Values only."""

import math
from dataclasses import dataclass

from pdserve.rpc.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Design:
    """What to measure."""

    prompts: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)
    """Prompt lengths, tokens."""
    batches: tuple[int, ...] = (1, 2, 4, 8)
    """Sequences that decode at once, on each engine."""
    contexts: tuple[int, ...] = (16, 256)
    """Prompt lengths of these, tokens."""
    answer: int = 40
    """Steps that a batch is watched for, at least; its answers are longer by what its prompts take."""
    repeats: int = 3
    """Times that everything is measured; in turns, so that a drift of the machine falls on all alike."""
    token_budget: int | None = None
    """The engines' most tokens in a step, where longer prompts are to be measured than one step takes."""
    model: str = ""
    """Empty: the deployment's only one."""
    timeout: float = 300.0
    """Seconds for a request."""

    def __post_init__(self) -> None:
        """Raises ConfigError for a design that cannot tell the costs apart."""
        for name, least in (("prompts", 2), ("batches", 2), ("contexts", 2)):
            values = getattr(self, name)
            if len(set(values)) < least or min(values) < 1:
                raise ConfigError(f"profile: {name} needs at least {least} different counts above 0, not {values}")
        if self.repeats < 1 or self.answer < 8:
            raise ConfigError("profile: at least 1 repeat, and answers of at least 8 tokens")
        if self.token_budget is not None and self.token_budget < 1:
            raise ConfigError(f"profile: a token budget of {self.token_budget}")

    def steps(self, tokens: int, beside: int = 0) -> int:
        """Of a prompt; each of the `beside` sequences that decode takes one token of the budget."""
        return math.ceil(tokens / max(self.token_budget - beside, 1)) if self.token_budget else 1

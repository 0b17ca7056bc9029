"""What a comparison measures: one frozen value, checked once. Pure."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pdserve.bench import goodput
from pdserve.rpc.errors import ConfigError

EngineKind = Literal["vllm", "sim"]

_START = {"vllm": 35.0, "sim": 5.0}
"""Seconds that a deployment takes to be ready and to be gone, for the estimate: measured on two cores."""
_TAIL = {"vllm": 0.12, "sim": 0.04}
"""Seconds of one decode step under load, for the estimate."""
_SPARE_TOKENS = 512
"""Of a neighbour's answer, beyond what calibration is thought to take."""


@dataclass(frozen=True, slots=True)
class Settings:
    """One comparison. Two runs of the command with equal settings continue each other.

    Raises:
        ConfigError: a value that cannot be.
    """

    engine: EngineKind
    model: str
    """As `pdserve up --model` takes it; empty for sim."""
    rates: tuple[float, ...]
    """Offered, requests a second, ascending."""
    requests: tuple[int, ...]
    """Of each rate."""
    input_len: int
    """Tokens of each prompt."""
    output_len: int
    """Tokens of each answer; forced."""
    burstiness: float = 1.0
    """Shape of the gaps between arrivals; 1 is Poisson."""
    seed: int = 0
    """Of arrivals and prompts; repeat k has seed + k."""
    threshold: float = goodput.THRESHOLD
    """Attainment that counts as held."""
    batch: int = 8
    """Answers that the neighbour decodes at once while one engine is calibrated."""
    calibration: int = 6
    """Requests that are counted for the SLOs; one before them is not."""
    warmup: int = 2
    """Requests before the first rate of each deployment, not counted."""
    budgets: tuple[int, ...] = ()
    """Token budgets for the tuned pair: none: found by rule; one: taken; more: tried."""
    scale: float = 1.0
    """Factor on the simulated engine's costs; 1 for vLLM."""
    engine_args: tuple[str, ...] = ()
    """Passed to every engine of every configuration."""

    def __post_init__(self) -> None:
        if not self.rates or len(self.rates) != len(self.requests):
            raise ConfigError(f"{len(self.rates)} rates and {len(self.requests)} numbers of requests: one for each")
        if any(not 0 < rate < math.inf for rate in self.rates):
            raise ConfigError("a rate must be positive and finite")
        if list(self.rates) != sorted(set(self.rates)):
            raise ConfigError("rates must ascend, each once")
        for name in ("input_len", "output_len", "batch", "calibration"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: at least 1")
        if min(self.requests) < 1 or any(budget < 1 for budget in self.budgets) or self.warmup < 0:
            raise ConfigError("numbers of requests and budgets must be positive, a warm-up not negative")
        if self.seed < 0:
            raise ConfigError(f"seed {self.seed}: not below 0")
        if self.output_len < 2:
            raise ConfigError("an answer of one token has no gap: the ITL cannot be measured")
        if not self.burstiness > 0 or not 0 < self.scale < math.inf:
            raise ConfigError("burstiness and scale must be positive")
        if self.engine == "vllm" and self.scale != 1:
            raise ConfigError("only the simulated engine's time can be scaled")
        goodput.check_threshold(self.threshold)

    @property
    def trial(self) -> int:
        """Index of the rate at which token budgets are tried: the middle one, the higher of two."""
        return len(self.rates) // 2

    @property
    def neighbour_tokens(self) -> int:
        """Length of the neighbour's answers during calibration: twice the tokens that are asked for beside them, one
        after another, since a prompt takes the time of several tokens."""
        return 2 * (self.calibration + 1) * self.output_len + _SPARE_TOKENS

    @property
    def max_model_len(self) -> int:
        """Context of every engine, tokens."""
        return self.input_len + self.neighbour_tokens

    def told(self) -> dict[str, Any]:
        """As it is stored, and compared when a comparison goes on."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def per_rate(requests: Sequence[int], rates: Sequence[float]) -> tuple[int, ...]:
    """One number of requests for each rate: one number stands for all.

    Raises:
        ConfigError: neither one nor one each.
    """
    if len(requests) == 1:
        return tuple(requests) * len(rates)
    if len(requests) != len(rates):
        raise ConfigError(f"{len(requests)} numbers of requests for {len(rates)} rates: give one, or one each")
    return tuple(requests)


def estimate(settings: Settings, configurations: int, repeats: int, trials: int) -> float:
    """Seconds that a whole comparison will take, about.

    Each deployment has its start, its warm-up and its rates; a rate has its arrivals and the last answers after them.
    """
    step, start = _TAIL[settings.engine] * settings.scale, _START[settings.engine]
    answer = settings.output_len * step
    offered = [count / rate + answer for rate, count in zip(settings.rates, settings.requests, strict=True)]
    before = start + settings.warmup * answer * 0.6
    calibrated = start + (settings.calibration + 1) * answer * 0.8 + 15
    return calibrated + trials * (before + offered[settings.trial]) + configurations * repeats * (before + sum(offered))

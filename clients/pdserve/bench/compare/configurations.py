"""The five deployments that are compared, and the command line that starts each. Pure.

    a  one colocated engine with all cores
    b  two colocated engines, a core each, behind the proxy
    c  a prefill and a decode engine, a core each, READ
    d  the same, WRITE
    e  as b, with the token budget that suits the ITL objective: the fair opponent

The proxy gives a request to the colocated engine with the least reserved KV; idle engines take turns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pdserve.bench.compare.settings import Settings
from pdserve.rpc.errors import ConfigError

Key = Literal["a", "b", "c", "d", "e"]

_FOUR: Mapping[str, float] = {
    "prefill-base": 0.03738,
    "prefill-per-token": 5.31e-05,
    "decode-base": 0.02389,
    "decode-per-seq": 0.0001424,
    "mixed-base": 0.00524,
    "mixed-per-token": 5.834e-05,
}
"""Step costs of an engine of four MI300X, seconds, and seconds per token or sequence: a fit to the per-request figures
of the MORI-IO connector post at 8 requests a second; pdserve/planner/profiles/mi300x.toml says how."""
_EIGHT: Mapping[str, float] = {
    "prefill-base": 0.06801,
    "prefill-per-token": 2.774e-05,
    "decode-base": 0.02475,
    "decode-per-seq": 4.573e-05,
    "mixed-base": 0.04326,
    "mixed-per-token": 2.774e-05,
}
"""The same of one engine of eight: pdserve/planner/profiles/mi300x-tp8.toml."""
_BUDGET = 8192
"""Tokens in one step, in both."""
_KV_TOKENS = 1 << 19
"""Of a simulated engine: enough that no request waits for room."""
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Configuration:
    """One deployment."""

    key: Key
    title: str
    """In a few words, with its number of engines."""
    both: int = 0
    """Colocated engines; 0: one prefill and one decode engine."""
    mode: Literal["", "read", "write"] = ""
    """How KV is handed over; empty: it is not."""
    pin: bool = True
    """Each engine on a core of its own."""
    tuned: bool = False
    """Takes the token budget that was found."""

    @property
    def label(self) -> str:
        """For tables and reports."""
        return f"({self.key}) {self.title}"

    @property
    def engines(self) -> int:
        """How many."""
        return self.both or 2


CONFIGURATIONS: Mapping[Key, Configuration] = {
    one.key: one
    for one in (
        Configuration("a", "one colocated engine, all cores", both=1, pin=False),
        Configuration("b", "two colocated engines", both=2),
        Configuration("c", "READ 1P1D", mode="read"),
        Configuration("d", "WRITE 1P1D", mode="write"),
        Configuration("e", "two colocated engines, tuned budget", both=2, tuned=True),
    )
}
"""By key, in the order of telling."""

PAIR = CONFIGURATIONS["b"]
"""The one that the objectives come from."""


def chosen(keys: Sequence[str]) -> tuple[Configuration, ...]:
    """The configurations of these keys, in the order of telling.

    Raises:
        ConfigError: an unknown key, or none.
    """
    if unknown := sorted(set(keys) - set(CONFIGURATIONS)):
        raise ConfigError(f"no configuration {', '.join(unknown)}: there are {', '.join(CONFIGURATIONS)}")
    if not keys:
        raise ConfigError("no configuration was chosen")
    return tuple(one for key, one in CONFIGURATIONS.items() if key in keys)


def rotated(configurations: Sequence[Configuration], repeat: int) -> tuple[Configuration, ...]:
    """The order of one repeat, counted from 0: each begins one further on, so that none is always first."""
    cut = repeat % len(configurations)
    return (*configurations[cut:], *configurations[:cut])


def engine_args(configuration: Configuration, settings: Settings, budget: int | None) -> tuple[str, ...]:
    """What every engine of the deployment gets behind `--`; the user's own arguments come last and win.

    Raises:
        ConfigError: a tuned configuration and no budget.
    """
    if configuration.tuned and budget is None:
        raise ConfigError(f"{configuration.label} needs a token budget")
    tuned = budget if configuration.tuned else None
    made = _sim(configuration, settings, tuned) if settings.engine == "sim" else _vllm(settings, tuned)
    return (*made, *settings.engine_args)


def _vllm(settings: Settings, budget: int | None) -> tuple[str, ...]:
    args: tuple[str, ...] = ("--max-model-len", str(settings.max_model_len))
    return args if budget is None else (*args, "--max-num-batched-tokens", str(budget))


def _sim(configuration: Configuration, settings: Settings, budget: int | None) -> tuple[str, ...]:
    cost = _EIGHT if configuration.engines == 1 else _FOUR
    flags: dict[str, object] = {
        "max-model-len": settings.max_model_len,
        "num-blocks": _KV_TOKENS // _BLOCK,
        "block-size": _BLOCK,
        "token-budget": budget or _BUDGET,
    }
    flags |= {f"cost-{name}": f"{seconds * settings.scale:.9g}" for name, seconds in cost.items()}
    return tuple(word for name, value in flags.items() for word in (f"--sim-{name}", str(value)))


def up_words(
    configuration: Configuration, settings: Settings, budget: int | None, state_dir: Path, start_timeout: float
) -> tuple[str, ...]:
    """The words after `pdserve` that start the deployment.

    Without traces, whose store would be one more process on the same cores, and without restarts: an engine that dies
    ends the measurement.
    """
    words = ["up", "--engine", settings.engine]
    if settings.engine == "vllm":
        words += ["--model", settings.model]
    words += ["--both", str(configuration.both)] if configuration.both else ["--prefill", "1", "--decode", "1"]
    words += ["--mode", configuration.mode] if configuration.mode else []
    words += ["--pin"] if configuration.pin else []
    words += ["--no-traces", "--restarts", "0", "--grpc-port", "0", "--http-port", "0"]
    words += ["--start-timeout", f"{start_timeout:g}", "--state-dir", str(state_dir)]
    return (*words, "--", *engine_args(configuration, settings, budget))

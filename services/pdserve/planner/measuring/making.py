"""A profile out of a fit: what it says, and what it says of how it came about. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.planner.measuring.fits import Fitted
from pdserve.planner.measuring.points import Measured
from pdserve.planner.profile import Figure, Profile, RoleProfile
from pdserve.planner.simulator import EngineSpec, Handover

MISFIT = "misfit"
"""Key of [fit] that the plan looks at: why the profile is no good."""
TOKEN_BUDGET, MAX_SEQS = 2048, 256
"""Of an engine of which it was not told."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What the measurement itself does not know."""

    name: str
    """Of the profile."""
    about: str
    """What was measured, for people; empty: only the model."""
    when: str
    """Date and time."""
    machine: str
    """Processor and size of the machine that measured; no names."""
    accelerators: int
    """That one engine takes."""
    max_seqs: int | None
    """Most sequences that an engine runs at once; None: not known."""


def profile(measured: Measured, fitted: Fitted, facts: Facts, misfits: Sequence[str]) -> Profile:
    """The profile; with `misfits`, or of a measurement that broke off, it is marked as one that does not fit.

    Raises:
        ConfigError: numbers that make no engine.
    """
    budget = measured.token_budget or TOKEN_BUDGET
    seqs = min(facts.max_seqs or MAX_SEQS, budget)
    source = f"pdserve profile, {facts.when}, from a machine with {facts.machine}"
    mixed = "; mixed steps were not measured: taken as a decode step and the prompt's tokens"
    source += mixed if fitted.mixed_assumed else ""

    def role(kv_tokens: int) -> RoleProfile:
        return RoleProfile(EngineSpec(fitted.cost, budget, seqs, kv_tokens), facts.accelerators, source)

    moved = fitted.handover
    return Profile(
        name=facts.name,
        about=facts.about or f"{measured.model}, {measured.max_model_len} tokens of context",
        source=source,
        prefill=None if moved is None else role(measured.prefill_kv_tokens),
        decode=None if moved is None else role(measured.kv_tokens),
        colocated=role(measured.kv_tokens),
        handover=Handover()
        if moved is None
        else Handover(
            serialization=moved.serialization,
            tail=moved.tail.get("read", moved.tail.get("write", 0.0)),
            tail_write=moved.tail.get("write"),
            bytes_per_token=moved.bytes_per_token,
            bandwidth=math.inf if moved.bandwidth is None else moved.bandwidth,
            layers=moved.layers,
        ),
        handover_source="" if moved is None else f"{source}; over {moved.transport}",
        dispatch=fitted.dispatch,
        egress=fitted.egress,
        max_model_len=measured.max_model_len,
        fit=_fit(measured, fitted, facts, misfits),
    )


def _fit(measured: Measured, fitted: Fitted, facts: Facts, misfits: Sequence[str]) -> dict[str, Figure]:
    found: dict[str, Figure] = {
        "how": "non-negative least squares on relative errors, biweight (pdserve.planner.measuring.lines)",
        "when": facts.when,
        "machine": facts.machine,
        "model": measured.model,
        "token_budget": "told" if measured.token_budget else f"not told: taken as {TOKEN_BUDGET}",
        "max_seqs": "told" if facts.max_seqs else f"not told: taken as {MAX_SEQS}",
    }
    for name, line in fitted.lines.items():
        found[f"{name}_points"] = len(line.residuals)
        found[f"{name}_left_out"] = line.left_out
        found[f"{name}_typical_residual"] = round(line.typical, 4)
        found[f"{name}_nine_in_ten_residual"] = round(line.nine_in_ten, 4)
    if fitted.handover is not None:
        found["transport"] = fitted.handover.transport
        if fitted.handover.line is None:
            found["bandwidth"] = "too few points: none is taken to bind"
        for mode, tail in fitted.handover.tail.items():
            found[f"{mode}_tail"] = round(tail, 6)
    why = [f"the measurement broke off: {measured.broke_off}"] if measured.broke_off else []
    if why := [*why, *misfits]:
        found[MISFIT] = "; ".join(why)
    return found

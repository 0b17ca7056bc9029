"""One line of a benchmark: a measurement against its target."""

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Result:
    """One measurement against its target; `target` None: a number to know, without one."""

    name: str
    value: float
    unit: str
    target: float | None
    met: bool
    detail: str


def line(result: Result, *, as_json: bool) -> str:
    """How a result is printed."""
    if as_json:
        return json.dumps(asdict(result))
    if result.target is None:
        verdict = f"{'no target':18}"
    else:
        verdict = f"target {result.target:<4} {'met' if result.met else 'MISSED':6}"
    return f"{result.name:22} {result.value:6.2f} {result.unit:11} {verdict}  {result.detail}"

"""The fits as a table for people. Pure."""

from pdserve.bench.report.words import number
from pdserve.bench.words import table as aligned
from pdserve.planner.measuring.fits import Fitted

_LINES = {
    "prefill": ("prefill_base", "prefill_per_token"),
    "decode": ("decode_base", "decode_per_seq", "decode_per_context_token"),
    "mixed": ("mixed_base", "mixed_per_token"),
}
_COLUMNS = ("step", "fit", "points", "left out", "typical error", "nine in ten within")


def table(fitted: Fitted) -> str:
    """One line a fit, and the hand-over below."""
    rows = []
    for name, line in fitted.lines.items():
        rows.append(
            (
                name,
                _formula(fitted, name),
                str(len(line.residuals)),
                str(line.left_out),
                f"{line.typical:.1%}",
                f"{line.nine_in_ten:.1%}",
            )
        )
    lines = [aligned(_COLUMNS, rows, left=2)]
    if fitted.mixed_assumed:
        lines.append("mixed steps: not measured, no engine serves whole requests; taken as decode and the tokens")
    return "\n".join([*lines, *_rest(fitted)])


def _formula(fitted: Fitted, name: str) -> str:
    if name == "read":
        line = fitted.lines[name]
        return f"{number(line.costs[0] * 1e3)} ms + {number(line.costs[1] * 1e12)} ms/GB"
    units = {
        "base": "ms",
        "per_token": "us/token",
        "per_seq": "us/sequence",
        "per_context_token": "ns/token of context",
    }
    said = []
    for cost in _LINES[name]:
        kind = cost.removeprefix(f"{name}_")
        factor = {"base": 1e3, "per_context_token": 1e9}.get(kind, 1e6)
        said.append(f"{number(getattr(fitted.cost, cost) * factor, 4)} {units[kind]}")
    return " + ".join(said)


def _rest(fitted: Fitted) -> list[str]:
    lines = [f"way in {fitted.dispatch * 1e3:.2f} ms, way out {fitted.egress * 1e3:.2f} ms"]
    moved = fitted.handover
    if moved is None:
        return [*lines, "no prefill and decode pair: nothing is known of a hand-over"]
    tails = ", ".join(f"{mode.upper()} {tail * 1e3:.2f} ms" for mode, tail in moved.tail.items())
    rate = "bandwidth not seen to bind"
    if moved.line is None:
        rate = "too few points for a bandwidth"
    elif moved.bandwidth is not None:
        rate = f"bandwidth {number(moved.bandwidth / 1e9)} GB/s"
    return [
        *lines,
        f"hand-over over {moved.transport}: {moved.bytes_per_token:.0f} bytes/token in {moved.layers} layers, "
        f"{rate}, serialization {moved.serialization * 1e3:.2f} ms, wait after the last byte: {tails}",
    ]

"""Published figures beside simulated ones, line by line, and whether each line that is held holds. Pure, seeded.

`validate` prints these lines, and the tests read them: both call the same functions.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pdserve.bench.slo import Slo
from pdserve.bench.workload.arrivals import like_vllm
from pdserve.planner.fit import JOBS, row_agrees
from pdserve.planner.profile import Profile
from pdserve.planner.published import Published
from pdserve.planner.simulator import Fleet, Job, Mode, Outcome, simulate

SLO = Slo(ttft=1.0, itl=0.05)
"""The published objectives: TTFT, and each request's P99 ITL."""

LOWEST_COLOCATED = 1.5
"""Requests per second from which on the colocated configurations are held."""


@dataclass(frozen=True, slots=True)
class Line:
    """One figure."""

    name: str
    """What it is of."""
    published: str
    """As published."""
    simulated: str
    """By the simulator."""
    error: str
    """Their difference, with its unit."""
    bound: str
    """What it is held to; empty where it is only shown."""
    held: bool
    """False: it is held to a bound and misses it."""


def fleets(profiles: Mapping[str, Profile]) -> dict[str, Fleet]:
    """The four published configurations. `profiles`: the shipped ones by name."""
    return {
        "standard_1xTP8": profiles["mi300x-tp8"].fleet(Mode.COLOCATED, engines=1),
        "standard_2xTP4": profiles["mi300x"].fleet(Mode.COLOCATED, engines=2),
        "read_1P1D": profiles["mi300x"].fleet(Mode.READ, prefills=1, decodes=1),
        "write_1P1D": profiles["mi300x"].fleet(Mode.WRITE, prefills=1, decodes=1),
    }


def run_at(fleet: Fleet, rate: float) -> Outcome:
    """The published run at `rate` requests per second."""
    return simulate(fleet, JOBS, like_vllm(rate, 1.0, len(JOBS), 0))


def percent(fleet: Fleet, rate: float) -> int:
    """Attainment of the published run, in percent."""
    return round(100 * run_at(fleet, rate).attainment(SLO))


def attainment(profiles: Mapping[str, Profile], published: Published) -> list[Line]:
    """All configurations at all rates; and each one's mean absolute error."""
    lines = []
    for name, fleet in fleets(profiles).items():
        colocated = name.startswith("standard")
        errors = []
        for rate, figures in published.attainment.items():
            ours = percent(fleet, rate)
            errors.append(abs(ours - figures[name]))
            bound = 10 if colocated else 8
            counts = not colocated or rate >= LOWEST_COLOCATED
            lines.append(
                Line(
                    f"{name} at {rate:g}/s",
                    f"{figures[name]} %",
                    f"{ours} %",
                    f"{ours - figures[name]:+d}",
                    f"+-{bound}" if counts else "",
                    not counts or errors[-1] <= bound,
                )
            )
        mean = statistics.fmean(errors)
        lines.append(
            Line(
                f"{name}, mean absolute error",
                "",
                "",
                f"{mean:.2f}",
                "" if colocated else "<=2.0",
                colocated or mean <= 2.0,
            )
        )
    return lines


def at_rate_8(profiles: Mapping[str, Profile], published: Published) -> list[Line]:
    """The figures that the constants were fitted on: attainment, their ratio, and what is left of the fit."""
    ours = {name: run_at(fleet, 8.0) for name, fleet in fleets(profiles).items()}
    shares = {name: round(100 * outcome.attainment(SLO)) for name, outcome in ours.items()}
    lines = []
    for name, low, high, slack in (
        ("write_1P1D", 73, 73, 3),
        ("read_1P1D", 70, 70, 3),
        ("standard_1xTP8", 26, 30, 4),
        ("standard_2xTP4", 26, 30, 4),
    ):
        share, met = shares[name], published.rate8[name].met_both
        held = low - slack <= share <= high + slack
        bound = f"{low - slack} to {high + slack}"
        lines.append(Line(f"{name} at 8/s, of 100", f"{met}", f"{share}", f"{share - met:+d}", bound, held))
    theirs = published.rate8["write_1P1D"].met_both / published.rate8["standard_2xTP4"].met_both
    ratio = shares["write_1P1D"] / shares["standard_2xTP4"]
    lines.append(
        Line(
            "write_1P1D / standard_2xTP4",
            f"{theirs:.2f}",
            f"{ratio:.2f}",
            f"{ratio - theirs:+.2f}",
            ">=2.2",
            ratio >= 2.2,
        )
    )
    for name, outcome in ours.items():
        figures = published.rate8[name]
        for what, theirs_all, ours_all in (
            ("TTFT", figures.ttft, [s.ttft for s in outcome.served]),
            ("P99 ITL", figures.itl, [s.itl_p99 for s in outcome.served]),
        ):
            a, b = statistics.median(theirs_all), statistics.median(ours_all)
            each = statistics.median(abs(x - y) for x, y in zip(theirs_all, ours_all, strict=True))
            shown = Line(
                f"{name}, median {what}", f"{1e3 * a:.1f} ms", f"{1e3 * b:.1f} ms",
                f"{1e3 * (b - a):+.1f} ms; a request {1e3 * each:.1f} ms", "", True,
            )  # fmt: skip
            lines.append(shown)
    return lines


def ratios(profile: Profile, published: Published) -> list[Line]:
    """The best splits. Fitted on rows 1 and 2; rows 3 and 4 are held too."""
    lines = []
    for number, row in enumerate(published.ratios, start=1):
        agrees, best = row_agrees(profile, row)
        wanted = " to ".join(f"{p}P:{d}D" for p, d in row.best)
        engines = "-".join(str(n) for n in (row.engines[0], row.engines[-1])[: 1 + (len(row.engines) > 1)])
        name = f"row {number}: {row.isl}/{row.osl}, {row.hit_rate:.0%} hits, {engines} engines"
        lines.append(Line(name, wanted, ", ".join(best), "", "equal", agrees))
    return lines


def moai(profile: Profile, published: Published) -> list[Line]:
    """1K/8K at 480 in flight, 960 requests: throughput, and which split has more of it."""
    lines, ours = [], {}
    for name, theirs in published.moai_tokens_per_s.items():
        prefills, decodes = (int(part) for part in name.removesuffix("D").split("P"))
        fleet = profile.fleet(Mode.READ, prefills=prefills, decodes=decodes)
        ours[name] = simulate(fleet, [Job(1024, 8192)] * 960, concurrency=480).total_throughput
        error = ours[name] / theirs - 1
        lines.append(
            Line(f"{name} 1K/8K, 480 in flight", f"{theirs:.0f} tokens/s", f"{ours[name]:.0f} tokens/s",
                 f"{error:+.1%}", "+-10 %", abs(error) <= 0.1)
        )  # fmt: skip
    better = ours["1P4D"] > ours["2P3D"]
    theirs_ratio = published.moai_tokens_per_s["1P4D"] / published.moai_tokens_per_s["2P3D"]
    ratio = ours["1P4D"] / ours["2P3D"]
    lines.append(
        Line(
            "1P4D / 2P3D on 1K/8K", f"{theirs_ratio:.3f}", f"{ratio:.3f}", f"{ratio - theirs_ratio:+.3f}", ">1", better
        )
    )
    return lines


def everything(profiles: Mapping[str, Profile], published: Published) -> dict[str, Callable[[], list[Line]]]:
    """The sections, by title."""
    return {
        "MI300X, Qwen3-235B, 2000 in, 1000 out, 100 requests at 8/s: fitted on": lambda: at_rate_8(profiles, published),
        "The same at other rates: percent that meet TTFT < 1 s and P99 ITL < 50 ms": lambda: attainment(
            profiles, published
        ),
        "MI325X: best P:D; fitted on rows 1 and 2": lambda: ratios(profiles["mi325x"], published),
        "MoAI, DeepSeek-R1 on five nodes: both figures are fitted on": lambda: moai(profiles["moai"], published),
    }

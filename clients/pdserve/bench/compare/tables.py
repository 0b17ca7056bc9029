"""A comparison on a terminal: its head, a line a run, all tables at its end. Pure."""

from collections.abc import Sequence

from pdserve.bench.compare.configurations import Configuration
from pdserve.bench.compare.folder import Cell
from pdserve.bench.compare.ratios import Curve, Pair
from pdserve.bench.compare.sections import Section, attainment_words, sections
from pdserve.bench.compare.settings import Settings
from pdserve.bench.goodput import fewest
from pdserve.bench.report.entries import Point
from pdserve.bench.report.words import count, plain
from pdserve.bench.results import Machine
from pdserve.bench.words import table


def report(settings: Settings, curves: Sequence[Curve], pairs: Sequence[Pair], cells: Sequence[Cell]) -> str:
    """All tables, each with a line that says what its figures are."""
    return "\n\n".join(f"{one.heading}\n\n{body(one)}" for one in sections(settings, curves, pairs, cells))


def body(of: Section) -> str:
    """A section without its heading."""
    return "\n".join([*([table(of.columns, of.rows)] if of.columns else []), *of.lines])


def run_line(point: Point) -> str:
    """One rate of one deployment, when it has ended."""
    return f"{point.load.at}: {attainment_words(point)}"


def head(
    settings: Settings, configurations: Sequence[Configuration], repeats: int, machine: Machine, expected: float
) -> str:
    """What is going to be measured, on what, and how long it will take (`expected`, seconds)."""
    loads = ", ".join(
        f"{number} at {plain(rate)} req/s" for rate, number in zip(settings.rates, settings.requests, strict=True)
    )
    what = settings.model if settings.engine == "vllm" else "the published step costs"
    lines = [
        f"{settings.engine} ({what}), {settings.input_len} tokens in, {settings.output_len} out, lengths forced",
        f"on {machine.cpu}, {machine.cores} cores, {machine.memory_gib:g} GiB, {machine.system}",
        f"requests: {loads}; arrivals as `vllm bench serve` makes them, seed {settings.seed} + repeat",
        *(f"  {one.label}" for one in configurations),
        "one deployment at a time on all cores; one deployment is offered all rates; "
        + (f"{repeats} repeats, each begins one configuration further on" if repeats > 1 else "1 repeat"),
        f"about {count(max(round(expected / 60), 1), 'minute')}",
        *_too_few(settings, repeats),
    ]
    if settings.scale != 1:
        lines.insert(
            3,
            f"costs x {settings.scale:g}: 1 s here stands for {plain(1 / settings.scale)} s, "
            f"1 req/s for {settings.scale:g} req/s; SLOs are measured here, so they scale too",
        )
    return "\n".join(lines)


def _too_few(settings: Settings, repeats: int) -> list[str]:
    """Whether so many requests can prove that a rate holds the threshold, all repeats together."""
    need = fewest(settings.threshold)
    short = [
        f"{plain(rate)} req/s ({number * repeats})"
        for rate, number in zip(settings.rates, settings.requests, strict=True)
        if need is None or number * repeats < need
    ]
    if not short:
        return []
    takes = f"even all good it takes {need} requests" if need is not None else "no number of requests does"
    return [f"too few requests for a bound at {', '.join(short)}: to prove {settings.threshold:.0%}, {takes}"]

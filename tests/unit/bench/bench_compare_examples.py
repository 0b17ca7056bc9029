"""Runs and results as a comparison makes them, small and without a seed: every figure is given."""

from collections.abc import Sequence

from pdserve.bench.compare.settings import Settings
from pdserve.bench.results import SCHEMA, Machine, Record, Results, Run, Target, Workload
from pdserve.bench.slo import Slo
from pdserve.bench.summary import summarise

MACHINE = Machine("a processor", 2, 23.5, "Linux 6.1")
SLO = Slo(ttft=1.0, itl=0.1)


def settings(**changes: object) -> Settings:
    """A small comparison of the simulated engine."""
    usual: dict[str, object] = {
        "engine": "sim", "model": "", "rates": (1.0, 2.0), "requests": (10, 10), "input_len": 100, "output_len": 10,
    }  # fmt: skip
    return Settings(**(usual | changes))  # type: ignore[arg-type]  # a test's own values


def record(index: int, missed: Sequence[str], mode: str = "", cached: int = 0) -> Record:
    """One request that was sent in time; `missed` as the SLO would have it."""
    return Record(
        index=index, due=0.1 * index, sent=0.1 * index, prompt_tokens=100, cached_tokens=cached, output_tokens=3,
        ttft=0.5, itls=(0.05, 0.05), tpot=0.05, e2e=0.6, mode=mode, missed=tuple(missed),
    )  # fmt: skip


def run(rate: float, good: int, count: int, *, miss: str = "itl", mode: str = "", partial: bool = False) -> Run:
    """`good` of `count` requests met everything, the others missed `miss`."""
    records = tuple(record(index, () if index < good else (miss,), mode) for index in range(count))
    return Run(rate, None, "2026-01-01T00:00:00Z", 10.0, summarise(records, 10.0, rate), records, partial)


def results(runs: Sequence[Run], label: str = "one", partial: bool = False) -> Results:
    """A document around runs."""
    return Results(
        SCHEMA, "2026-01-01T00:00:00Z", label, Target("127.0.0.1:1", "grpc", "sim"), MACHINE,
        Workload("", {"kind": "fixed"}, {"kind": "like_vllm"}, 10, 0), SLO, tuple(runs), None, partial,
        "the endpoint failed" if partial else "",
    )  # fmt: skip

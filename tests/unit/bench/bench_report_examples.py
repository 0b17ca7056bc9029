"""Example results for the report's tests. Fake: every number comes from a small seeded model, nothing was measured."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.bench.results import (
    SCHEMA,
    EngineFacts,
    Failure,
    Goodput,
    Machine,
    Record,
    Results,
    Run,
    Spread,
    Summary,
    Target,
    Tried,
    Workload,
)
from pdserve.bench.slo import Slo, percentile

SLO = Slo(ttft=1.0, itl=0.05)
RATES = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """One kind of deployment in the model."""

    label: str
    mode: str
    prefill: float
    """Seconds of prefill a request."""
    handover: float
    """Seconds of waiting for the KV cache."""
    gap: float
    """Seconds between tokens at no load."""
    stall: float
    """Seconds that another's prefill adds to a gap; 0: prefill is elsewhere."""


WRITE = Shape("WRITE 1P1D", "write", 0.128, 0.012, 0.024, 0.0)
READ = Shape("READ 1P1D", "read", 0.131, 0.058, 0.024, 0.0)
COLOCATED = Shape("2 x colocated, round robin", "", 0.075, 0.0, 0.019, 0.110)


def example(
    shape: Shape = WRITE,
    rates: Sequence[float] = RATES,
    *,
    requests: int = 100,
    tokens: int = 60,
    seed: int = 0,
    slo: Slo = SLO,
    failing: float = 0.0,
    label: str = "",
    goodput: bool = True,
) -> Results:
    """A whole file: a run at every rate. `failing` is the share of requests that fail."""
    made = [run(shape, rate, requests=requests, tokens=tokens, seed=seed, slo=slo, failing=failing) for rate in rates]
    split = bool(shape.mode)
    return Results(
        schema=SCHEMA,
        created="2026-11-30T12:00:00Z",
        label=label or shape.label,
        target=Target(
            address="127.0.0.1:8000",
            api="grpc",
            model="sim",
            mode=shape.mode,
            transport="shm" if split else "",
            engines=(
                EngineFacts("e1", "prefill" if split else "both"),
                EngineFacts("e2", "decode" if split else "both"),
            ),
        ),
        machine=Machine("an example CPU", 2, 24.0, "Linux 6.1"),
        workload=Workload(
            "2K/1K",
            {"kind": "fixed", "input": 2000, "output": 1000},
            {"kind": "like_vllm", "burstiness": 1.0},
            requests,
            seed,
        ),
        slo=slo,
        runs=tuple(made),
        goodput=_goodput(made) if goodput else None,
    )


def partial(results: Results, why: str = "the endpoint closed the connection") -> Results:
    """The same, broken off in its last run."""
    last = results.runs[-1]
    kept = replace(last, requests=last.requests[: len(last.requests) // 2], partial=True)
    kept = replace(kept, summary=summarise(kept.requests, kept.rate, kept.duration))
    return replace(results, runs=(*results.runs[:-1], kept), partial=True, why_partial=why)


def closed(results: Results) -> Results:
    """The same as if its rates were numbers in flight."""
    runs = tuple(replace(each, rate=None, concurrency=int(each.rate or 1) * 8) for each in results.runs)
    return replace(results, runs=runs, goodput=None)


def run(shape: Shape, rate: float, *, requests: int, tokens: int, seed: int, slo: Slo, failing: float = 0.0) -> Run:
    """One load. Prefill is one queue; a decode gap grows with the load and is stalled by others' prefills."""
    chance = random.Random(f"{shape.label} {rate} {seed}")
    due, free, records = 0.0, 0.0, []
    for index in range(requests):
        due += chance.expovariate(rate)
        queue = max(0.0, free - due)
        forward = shape.prefill * chance.uniform(0.9, 1.1)
        free = due + queue + forward
        records.append(_record(shape, rate, chance, index, due, queue, forward, tokens, slo, failing))
    duration = max(record.due + (record.e2e or 0.0) for record in records)
    summary = summarise(records, rate, duration)
    return Run(rate, None, "2026-11-30T11:58:00Z", duration, summary, tuple(records))


def _record(
    shape: Shape,
    rate: float,
    chance: random.Random,
    index: int,
    due: float,
    queue: float,
    forward: float,
    tokens: int,
    slo: Slo,
    failing: float,
) -> Record:
    if chance.random() < failing:
        error = chance.choice([Failure("NO_ENGINES", "no decode engine is registered"),
                               Failure("DEADLINE_EXCEEDED", "the deadline of 30 s has passed")])  # fmt: skip
        return Record(index, due, due, 2000, 0, 0, None, (), None, None, missed=("error",), error=error)
    parts = {"admit": 0.0004, "tokenize": 0.0021, "route": 0.0003}
    if shape.mode:
        parts |= {"prefill.hop": 0.0011, "prefill.queue": queue, "prefill.forward": forward}
        parts |= {"proxy.serialization": 0.0017 if shape.mode == "read" else 0.0, "decode.admit": 0.0012}
        parts |= {"kv.wait": shape.handover * chance.uniform(0.7, 1.6), "decode.queue": 0.004}
        parts |= {"decode.first_step": shape.gap}
    else:
        parts |= {"decode.queue": queue, "decode.first_step": forward}
    parts |= {"detokenize": 0.0002, "encode": 0.0001, "egress": 0.0003}
    unattributed = 0.0006
    ttft = sum(parts.values()) + unattributed + 0.0015
    base = shape.gap * (1 + 0.055 * rate) * chance.uniform(0.95, 1.1)
    hit = min(0.6, rate * shape.prefill * 0.12)
    gaps = tuple(
        base * chance.uniform(0.9, 1.12) + (shape.stall * chance.uniform(0.3, 1.3) if chance.random() < hit else 0.0)
        for _ in range(tokens - 1)
    )
    e2e = ttft + sum(gaps)
    tpot = sum(gaps) / len(gaps) if gaps else None
    return Record(
        index, due, due + chance.uniform(0.0001, 0.0009), 2000, 0, tokens, ttft, gaps, tpot, e2e, shape.mode,
        "shm" if shape.mode else "", parts, unattributed, slo.missed(ttft=ttft, itls=gaps, tpot=tpot, e2e=e2e),
    )  # fmt: skip


def summarise(records: Sequence[Record], rate: float | None, duration: float) -> Summary:
    """One run in figures, as results.py says."""
    done = [record for record in records if record.error is None]
    attainment = sum(not record.missed for record in records) / max(1, len(records))
    out = sum(record.output_tokens for record in done)
    duration = duration or 1.0
    names = {name for record in done for name in record.parts}
    missed = [name for record in records for name in record.missed]
    return Summary(
        requests=len(records),
        completed=len(done),
        failed=len(records) - len(done),
        attainment=attainment,
        good_rate=attainment * (rate or 0.0),
        request_throughput=len(done) / duration,
        output_token_throughput=out / duration,
        total_token_throughput=(out + sum(record.prompt_tokens for record in done)) / duration,
        ttft=_spread([record.ttft for record in done]),
        itl=_spread([gap for record in done for gap in record.itls]),
        tpot=_spread([record.tpot for record in done]),
        e2e=_spread([record.e2e for record in done]),
        late=_spread([record.sent - record.due for record in records]),
        parts={name: spread for name in sorted(names) if (spread := _spread([r.parts.get(name, 0.0) for r in done]))},
        unattributed=_spread([record.unattributed for record in done]),
        missed={name: missed.count(name) for name in dict.fromkeys(missed)},
    )


def _spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(sum(known) / len(known), percentile(known, 50), percentile(known, 90), percentile(known, 99))


def _goodput(runs: Sequence[Run]) -> Goodput:
    tried = tuple(Tried(each.rate or 0.0, each.summary.attainment) for each in runs)
    held = [each.rate for each in tried if each.attainment >= 0.9]
    value = max(held, default=0.0)
    high = min((each.rate for each in tried if each.rate > value), default=None)
    return Goodput(0.9, value, value, high, tried, "the rates of the sweep; no rate between them was tried")

"""One run in figures, out of its records. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

from pdserve.bench import goodput
from pdserve.bench.results import Record, Spread, Summary
from pdserve.bench.slo import sorted_percentile


def spread(values: Iterable[float]) -> Spread | None:
    """Mean and percentiles; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p99 = (sorted_percentile(ordered, q) for q in (50, 90, 99))
    return Spread(sum(ordered) / len(ordered), p50, p90, p99)


def summarise(records: Sequence[Record], duration: float, rate: float | None) -> Summary:
    """The figures of one run.

    Args:
        records: all that were sent.
        duration: of the run, seconds.
        rate: offered, requests a second; None: a closed loop.
    """
    done = [record for record in records if record.error is None]
    share = goodput.attainment([record.missed for record in records])
    per_second = 1 / duration if duration > 0 else 0.0
    # A closed loop offers as much as is taken: its good rate is what was good, a second.
    good = goodput.good_rate(share, rate if rate is not None else len(records) * per_second)
    output = sum(record.output_tokens for record in done)
    names = list(dict.fromkeys(name for record in done for name in record.parts))
    timed = [record for record in done if record.parts]
    return Summary(
        requests=len(records),
        completed=len(done),
        failed=len(records) - len(done),
        attainment=share,
        good_rate=good,
        request_throughput=len(done) * per_second,
        output_token_throughput=output * per_second,
        total_token_throughput=(output + sum(record.prompt_tokens for record in done)) * per_second,
        ttft=spread(record.ttft for record in done if record.ttft is not None),
        itl=spread(itl for record in done for itl in record.itls),
        tpot=spread(record.tpot for record in done if record.tpot is not None),
        e2e=spread(record.e2e for record in done if record.e2e is not None),
        late=spread(record.sent - record.due for record in records) if rate is not None else None,
        parts={name: found for name in names if (found := spread(record.parts.get(name, 0.0) for record in timed))},
        unattributed=spread(record.unattributed for record in timed),
        missed=dict(Counter(name for record in records for name in record.missed)),
    )

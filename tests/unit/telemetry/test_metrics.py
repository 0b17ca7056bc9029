"""The metrics' own machinery: counting, buckets, what is shown, and what is refused."""

import inspect
import random

import pytest
from prometheus_client import REGISTRY, Gauge

from pdserve.rpc.errors import BY_REASON
from pdserve.runtime.telemetry import catalogue, names
from pdserve.runtime.telemetry.catalogue import Kind, Metric
from pdserve.runtime.telemetry.metrics import Metrics
from pdserve.runtime.telemetry.tally import Reading, Tally, known_reason
from tests.unit.telemetry.exposed import kind_of, parse

HISTOGRAM = Metric("h_seconds", Kind.HISTOGRAM, "Some.", ("mode",), (0.1, 1.0))
COUNTER = Metric("c_total", Kind.COUNTER, "Some.", ("kind",))
PLAIN = Metric("p_total", Kind.COUNTER, "Some.")
GAUGE = Metric("g", Kind.GAUGE, "Some.", ("state",))
DECLARED = (catalogue.BUILD_INFO, HISTOGRAM, COUNTER, PLAIN, GAUGE)
ALL = {*catalogue.PROXY, *catalogue.KVD, *catalogue.DECODE}


def metrics() -> Metrics:
    """Of a service that has one of each kind."""
    return Metrics("pdserve-test", DECLARED)


def test_values_fall_into_the_buckets_that_prometheus_means() -> None:
    """A value on a bound belongs below it, one past the last bound only to infinity; buckets add up, sums are kept."""
    made = metrics()
    for value in (0.05, 0.1, 0.5, 7.0):
        made.tally.observe(HISTOGRAM, value, "read")
    made.tally.observe(HISTOGRAM, 0.5, "write")
    shown = parse(made.expose())
    buckets = [shown.of(HISTOGRAM, "_bucket", mode="read", le=le) for le in ("0.1", "1.0", "+Inf")]
    assert buckets == [2, 3, 4]
    assert shown.of(HISTOGRAM, "_count", mode="read") == 4
    assert shown.of(HISTOGRAM, "_sum", mode="read") == pytest.approx(7.65)
    assert shown.of(HISTOGRAM, "_count", mode="write") == 1


def test_buckets_agree_with_counting_by_hand() -> None:
    """Seeded: however values lie to the bounds, each bucket holds those not above its bound."""
    seed = 5
    print(f"seed {seed}")
    rng, made = random.Random(seed), Metrics("pdserve-test", catalogue.PROXY)
    values = [rng.choice((rng.uniform(0, 0.02), rng.uniform(0, 90), *catalogue.SECONDS)) for _ in range(500)]
    for value in values:
        made.tally.observe(catalogue.ITL, value, "read")
    shown = parse(made.expose())
    for bound in catalogue.SECONDS:
        assert shown.of(catalogue.ITL, "_bucket", le=repr(bound)) == sum(value <= bound for value in values)


def test_a_count_without_labels_is_there_from_the_start() -> None:
    """As 0, so that its first step is a step; what has labels begins with them, or as its reader says."""
    made = metrics()
    made.read(lambda: [(GAUGE, ("on",), True)])
    shown = parse(made.expose())
    assert shown.each(PLAIN) == [0]
    assert shown.each(COUNTER) == []
    assert shown.each(GAUGE) == [1]
    assert shown.each(catalogue.BUILD_INFO, service="pdserve-test") == [1]


def test_what_is_read_is_what_is_true_then() -> None:
    """A reader is asked each time, and only then."""
    made, asked = metrics(), list[int]()

    def reader() -> list[tuple[Metric, tuple[str, ...], float]]:
        asked.append(1)
        return [(COUNTER, ("a",), len(asked))]

    made.read(reader)
    assert asked == []
    assert parse(made.expose()).of(COUNTER) == 1
    assert parse(made.expose()).of(COUNTER) == 2


def test_nothing_undeclared_is_shown() -> None:
    """A metric that was not declared, labels that are not its own, or one series said twice: the answer fails."""
    other = Metric("other", Kind.GAUGE, "Some.")
    said: tuple[list[Reading], ...] = ([(other, (), 1.0)], [(GAUGE, (), 1.0)], [(GAUGE, ("x",), 1.0)] * 2)
    for wrong in said:
        made = metrics()
        made.read(wrong.copy)
        with pytest.raises(ValueError, match=f"^{wrong[0][0].name} with labels"):
            made.expose()


def test_a_tally_refuses_what_makes_no_sense() -> None:
    """Too few labels, a count that falls, a kind that it is not."""
    tally = Tally()
    for metric, labels, by in ((COUNTER, (), 1), (COUNTER, ("a",), -1), (GAUGE, ("a",), 1)):
        with pytest.raises(ValueError, match="cannot count"):
            tally.add(metric, *labels, by=by)
    with pytest.raises(ValueError, match="cannot take"):
        tally.observe(HISTOGRAM, 1.0)


def test_a_made_up_reason_makes_no_series() -> None:
    """Reasons come over the wire: only those of the error tree become labels."""
    assert [known_reason(reason) for reason in ("", "PEER_LOST", "X-1")] == ["", "PEER_LOST", "INTERNAL"]
    assert "INTERNAL" in BY_REASON


def test_a_process_of_its_own_shows_all_of_it() -> None:
    """A program also shows what else its process says, such as vLLM's metrics; a service in a test does not."""
    gauge = Gauge("vllm_like", "Somebody else's.")
    try:
        gauge.set(7)
        made = metrics()
        assert b"vllm_like" not in made.expose()
        made.with_process()
        assert parse(made.expose()).values["vllm_like", ()] == 7
    finally:
        REGISTRY.unregister(gauge)


def test_two_services_of_one_process_do_not_meet() -> None:
    """What one counts the other does not show."""
    a, b = metrics(), metrics()
    a.tally.add(PLAIN)
    assert (parse(a.expose()).of(PLAIN), parse(b.expose()).of(PLAIN)) == (1, 0)


def test_names_and_catalogue_are_the_same_list() -> None:
    """Each name in names.py is declared once, with a unit or kind in it as Prometheus wants, and none beside."""
    section = inspect.getsource(names).split("# -- metrics ")[1]
    constants = [line.split(":")[0] for line in section.splitlines() if ": Final" in line]
    named = [getattr(names, constant) for constant in constants]
    assert len(named) == len(set(named)) == len(constants) > 40
    assert set(named) == {metric.name for metric in ALL}
    assert len({metric.name for metric in ALL}) == len(ALL)
    for metric in ALL:
        assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER), metric.name
        assert metric.name.endswith("_seconds") or metric.kind is not Kind.HISTOGRAM, metric.name
        assert metric.help.endswith("."), metric.name
        assert not {"request_id", "transfer_id", "trace_id", "handle"} & {*metric.labels}, metric.name


def test_every_declared_metric_can_be_shown() -> None:
    """With one value each, the library and its parser agree on names, kinds and labels."""
    for service, declared in (
        (names.PROXY, catalogue.PROXY),
        (names.KVD, catalogue.KVD),
        (names.DECODE, catalogue.DECODE),
    ):
        made = Metrics(service, declared)
        gauges = [metric for metric in declared if metric.kind is Kind.GAUGE and metric is not catalogue.BUILD_INFO]
        for metric in declared:
            if metric.kind is Kind.COUNTER:
                made.tally.add(metric, *metric.labels)
            elif metric.kind is Kind.HISTOGRAM:
                made.tally.observe(metric, 1.0, *metric.labels)
        made.read([(metric, metric.labels, 1.0) for metric in gauges].copy)
        shown = parse(made.expose())
        assert shown.kinds == dict(map(kind_of, declared))
        assert shown.names == {metric.name for metric in declared}

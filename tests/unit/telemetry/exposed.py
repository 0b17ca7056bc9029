"""What a service shows to Prometheus, as Prometheus' own parser reads it."""

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from pdserve.runtime.telemetry.catalogue import Kind, Metric

Series = tuple[str, tuple[tuple[str, str], ...]]


@dataclass(frozen=True, slots=True)
class Exposed:
    """All samples of one answer."""

    values: dict[Series, float]
    kinds: dict[str, str]
    """Type by family; counters without their `_total`, as the parser has them."""

    def of(self, metric: Metric, suffix: str = "", **labels: str) -> float:
        """The sum over all series that have these labels; 0 where there are none."""
        return sum(self.each(metric, suffix, **labels))

    def each(self, metric: Metric, suffix: str = "", **labels: str) -> list[float]:
        """One value for each series that has these labels."""
        wanted = set(labels.items())
        return [
            value for (name, has), value in self.values.items() if name == metric.name + suffix and wanted <= {*has}
        ]

    def by(self, metric: Metric, *labels: str) -> dict[tuple[str, ...], float]:
        """What is not 0, by the values of these labels."""
        found: dict[tuple[str, ...], float] = {}
        for (name, has), value in self.values.items():
            if name == metric.name and value:
                key = tuple(dict(has)[label] for label in labels)
                found[key] = found.get(key, 0) + value
        return found

    @property
    def names(self) -> set[str]:
        """Of metrics that have samples, as they are declared; buckets, sums and counts are one histogram's."""
        return {name for name, kind in self._declared() if self._samples(name, kind)}

    def _declared(self) -> Iterable[tuple[str, str]]:
        for family, kind in self.kinds.items():
            yield family + "_total" if kind == "counter" else family, kind

    def _samples(self, name: str, kind: str) -> bool:
        wanted = f"{name}_count" if kind == "histogram" else name
        return any(series == wanted for series, _ in self.values)


def parse(body: bytes) -> Exposed:
    """Reads one answer.

    Raises:
        AssertionError: a series is there twice.
        ValueError: it is not Prometheus' format.
    """
    values: dict[Series, float] = {}
    kinds: dict[str, str] = {}
    for family in text_string_to_metric_families(body.decode()):
        assert family.name not in kinds, family.name
        kinds[family.name] = family.type
        for sample in family.samples:
            series = (sample.name, tuple(sorted(sample.labels.items())))
            assert series not in values, series
            values[series] = sample.value
    return Exposed(values, kinds)


def kind_of(metric: Metric) -> tuple[str, str]:
    """Family and type as the parser has them."""
    name = metric.name.removesuffix("_total") if metric.kind is Kind.COUNTER else metric.name
    return name, metric.kind.value

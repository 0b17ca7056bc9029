"""What one service shows to Prometheus. The one place that knows its library.

Each service object has its own: several live in one process in tests. Nothing is kept here: counts are in
a `Tally`, everything else is read from the service's own books when Prometheus asks.
"""

import importlib.metadata
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from pdserve.runtime.telemetry import catalogue
from pdserve.runtime.telemetry.catalogue import Kind, Metric
from pdserve.runtime.telemetry.tally import Labels, Reader, Reading, Tally

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Metrics(Collector):
    """See the module."""

    def __init__(self, service: str, declared: Sequence[Metric], tally: Tally | None = None) -> None:
        """`service`: as in names.py. `declared`: all that it will ever show. `tally`: where it counts; by
        default a new one."""
        self._declared = tuple(declared)
        self.tally = tally or Tally()
        self._info: Reading = (catalogue.BUILD_INFO, (service, importlib.metadata.version("pdserve")), 1)
        self._readers: list[Reader] = []
        self._process = False
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def read(self, reader: Reader) -> None:
        """Asks this reader too, whenever Prometheus does."""
        self._readers.append(reader)

    def with_process(self) -> None:
        """Shows also what this process as a whole says of itself: memory, CPU time, open files, and vLLM's
        own metrics where it is in it. For programs, of which a process runs one."""
        self._process = True

    def expose(self) -> bytes:
        """Everything, as CONTENT_TYPE says.

        Raises:
            ValueError: a reader said what was not declared, or something twice.
        """
        text = generate_latest(self._registry)
        return text + generate_latest(REGISTRY) if self._process else text

    def collect(self) -> Iterator[Family]:
        """See Collector."""
        found: dict[Metric, dict[Labels, float]] = {metric: {} for metric in self._declared}
        for metric in self._declared:
            if metric.kind is Kind.COUNTER and not metric.labels:
                found[metric][()] = 0  # from the start, so that its first step is seen
        self._take(found, [self._info], fresh=True)
        self._take(found, self.tally.readings(), fresh=False)
        for reader in self._readers:
            self._take(found, reader(), fresh=True)
        for metric, values in found.items():
            yield self._family(metric, values)

    def _take(self, found: dict[Metric, dict[Labels, float]], said: Iterable[Reading], *, fresh: bool) -> None:
        for metric, labels, value in said:
            if metric not in found or len(labels) != len(metric.labels):
                raise ValueError(f"{metric.name} with labels {labels} was not declared")
            if fresh and labels and labels in found[metric]:
                raise ValueError(f"{metric.name} with labels {labels} was read twice")
            found[metric][labels] = value

    def _family(self, metric: Metric, values: dict[Labels, float]) -> Family:
        if metric.kind is Kind.HISTOGRAM:
            histogram = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
            for labels, distribution in self.tally.distributions(metric):
                buckets = [
                    ("+Inf" if bound == math.inf else repr(bound), float(count))
                    for bound, count in distribution.cumulative(metric)
                ]
                histogram.add_metric(labels, buckets, distribution.sum)
            return histogram
        family: CounterMetricFamily | GaugeMetricFamily
        if metric.kind is Kind.COUNTER:
            family = CounterMetricFamily(metric.name, metric.help, labels=metric.labels)
        else:
            family = GaugeMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, value in values.items():
            family.add_metric(labels, value)
        return family

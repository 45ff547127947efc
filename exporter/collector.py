"""From the store to metric families; pure, and the only collector, so no family is announced twice."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from exporter import __version__, catalog
from exporter.catalog import Family
from exporter.lifecycle import Lifecycle
from exporter.signals import Gauges, Labels, Sample
from exporter.store import Buckets, Store

_NEW: dict[str, Callable[..., Metric]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


class StoreCollector(Collector):
    """The families of the catalog that have samples, in its order, label sets sorted.

    *derived* are further gauges, each from all that are known.
    """

    def __init__(
        self,
        store: Store,
        engine: Lifecycle,
        *derived: Callable[[Gauges], Iterable[Sample]],
    ) -> None:
        self._store = store
        self._engine = engine
        self._derived = derived
        self._les: dict[tuple[float, ...], list[str]] = {}

    def describe(self) -> Iterator[Metric]:
        for family in catalog.FAMILIES:
            yield _new(family)

    def gauges(self) -> dict[Family, dict[Labels, float]]:
        """All gauges as they are exported now, those derived from others too."""
        gauges = self._store.gauges(up=self._engine.up)
        for family, series in self._about_sources().items():
            gauges.setdefault(family, {}).update(series)
        for derive in (self._engine.samples, *self._derived):
            for sample in derive(gauges):
                gauges.setdefault(sample.family, {})[sample.labels] = sample.value
        return gauges

    def collect(self) -> Iterator[Metric]:
        gauges = self.gauges()
        for family in catalog.FAMILIES:
            numbers = gauges.get(family) if family.kind == "gauge" else self._store.counters.get(family)
            histograms = self._store.histograms.get(family)
            if numbers or histograms:
                metric: Any = _new(family)
                for labels, value in sorted((numbers or {}).items()):
                    metric.add_metric(labels, value)
                for labels, buckets in sorted((histograms or {}).items(), key=lambda item: item[0]):
                    metric.add_metric(labels, self._lines(buckets), buckets.sum)
                yield metric

    def _lines(self, buckets: Buckets) -> list[tuple[str, float]]:
        if buckets.bounds not in self._les:
            bounds = (*buckets.bounds, float("inf"))
            self._les[buckets.bounds] = [floatToGoString(b) for b in bounds]  # type: ignore[no-untyped-call]
        return list(zip(self._les[buckets.bounds], buckets.cumulative(), strict=True))

    def _about_sources(self) -> dict[Family, dict[Labels, float]]:
        store = self._store
        readings = store.readings.values()
        return {
            catalog.SOURCE_UP: {(r.source,): float(r.ok) for r in readings},
            catalog.SOURCE_SECONDS: {(r.source,): r.seconds for r in readings},
            catalog.SOURCE_SUCCESS: {(source,): at for source, at in store.last_success.items()},
            catalog.SOURCE_ERROR: {(r.source, r.reason): 1.0 for r in readings if r.reason},
            catalog.LAST_ERROR: {(kind,): at for kind, at in store.last_error.items()},
            catalog.BUILD_INFO: {(__version__,): 1.0},
        }


def _new(family: Family) -> Metric:
    return _NEW[family.kind](family.name, family.help, labels=family.labels)

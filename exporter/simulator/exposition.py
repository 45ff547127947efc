"""Counters, gauges and histograms as exposition text, in the order and shape of prometheus_client.

A class of our own because this page is rendered at every simulated poll: observing takes a bisection and
rendering no label formatting, for the text before each value is made once.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import inf

from prometheus_client.utils import floatToGoString


class Series:
    """One sample of a counter or gauge."""

    __slots__ = ("_prefix", "labels", "value")

    def __init__(self, name: str, labels: dict[str, str]) -> None:
        self.labels = _braces(labels)
        self.value = 0.0
        self._prefix = f"{name}{self.labels} "

    def lines(self) -> Iterator[str]:
        yield self._prefix + _number(self.value)


class Histogram:
    """Counts per bound, with the last for what is above all of *bounds*."""

    __slots__ = ("_bucket_prefixes", "_count_prefix", "_sum_prefix", "bounds", "counts", "labels", "sum")

    def __init__(self, name: str, labels: dict[str, str], bounds: Sequence[float]) -> None:
        self.labels = _braces(labels)
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        limits = [_number(bound) for bound in (*bounds, inf)]
        self._bucket_prefixes = [f"{name}_bucket{_braces(labels | {'le': limit})} " for limit in limits]
        self._count_prefix = f"{name}_count{self.labels} "
        self._sum_prefix = f"{name}_sum{self.labels} "

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def lines(self) -> Iterator[str]:
        total = 0
        for prefix, count in zip(self._bucket_prefixes, self.counts, strict=True):
            total += count
            yield prefix + _number(total)
        yield self._count_prefix + _number(total)
        yield self._sum_prefix + _number(self.sum)


class Family:
    """A name with its series, and the `_created` gauges the client library adds to all but gauges."""

    def __init__(self, name: str, kind: str, documentation: str, created: float) -> None:
        self._name = name
        self._kind = kind
        self._head = f"# HELP {name} {documentation}\n# TYPE {name} {kind}"
        self._created_name = f"{name.removesuffix('_total') if kind == 'counter' else name}_created"
        self._created_head = f"# HELP {self._created_name} {documentation}\n# TYPE {self._created_name} gauge"
        self._created = _number(created)
        self._series: list[Series | Histogram] = []

    def series(self, **labels: str) -> Series:
        series = Series(self._name, labels)
        self._series.append(series)
        return series

    def histogram(self, bounds: Sequence[float], **labels: str) -> Histogram:
        histogram = Histogram(self._name, labels, bounds)
        self._series.append(histogram)
        return histogram

    def lines(self) -> Iterator[str]:
        yield self._head
        for series in self._series:
            yield from series.lines()
        if self._kind != "gauge" and self._series:
            yield self._created_head
            for series in self._series:
                yield f"{self._created_name}{series.labels} {self._created}"


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _braces(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{value}"' for name, value in sorted(labels.items())) + "}"

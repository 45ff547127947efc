"""Quantiles of histograms, as Prometheus computes them."""

from collections.abc import Sequence
from itertools import accumulate

from exporter.catalog import Family
from exporter.store import Buckets, Store


def quantile(bounds: Sequence[float], cumulative: Sequence[int], q: float) -> float | None:
    """The *q* quantile in the unit of *bounds*, by linear interpolation as Prometheus has it; None without data."""
    total = cumulative[-1] if cumulative else 0
    if total == 0:
        return None
    rank = q * total
    for i, count in enumerate(cumulative):
        if count >= rank:
            if i == len(bounds):
                return bounds[-1]
            low, before = (bounds[i - 1], cumulative[i - 1]) if i else (0.0, 0)
            return low + (bounds[i] - low) * ((rank - before) / (count - before))
    return bounds[-1]


def of_counts(bounds: Sequence[float], counts: Sequence[int], q: float) -> float | None:
    """The same from the count in each bucket."""
    return quantile(bounds, list(accumulate(counts)), q)


def total(store: Store, family: Family) -> tuple[tuple[float, ...], list[int]]:
    """Bounds and cumulative counts of *family* over all its series."""
    series: list[Buckets] = list(store.histograms.get(family, {}).values())
    if not series:
        return (), []
    return series[0].bounds, [sum(column) for column in zip(*(b.cumulative() for b in series), strict=True)]

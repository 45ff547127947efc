"""Quantiles as Prometheus computes them."""

import pytest

from exporter import catalog
from exporter.quantile import quantile, total
from exporter.store import Store


@pytest.mark.parametrize(
    ("cumulative", "q", "expected"),
    [
        ([0, 0, 0], 0.5, None),
        ([], 0.5, None),
        ([4, 8, 8], 0.5, 1.0),
        ([4, 8, 8], 0.25, 0.5),
        ([4, 8, 8], 0.75, 1.5),
        ([0, 4, 8], 0.99, 2.0),  # in the bucket without an upper bound: its lower end
    ],
)
def test_a_quantile_is_interpolated_within_its_bucket(cumulative, q, expected) -> None:
    assert quantile((1.0, 2.0), cumulative, q) == expected


def test_series_of_a_family_are_taken_together() -> None:
    store = Store()
    assert total(store, catalog.LATENCY) == ((), [])
    for model in ("m", "n"):
        store.observe(catalog.LATENCY, (model,), 0.5, origin="log")
    bounds, counts = total(store, catalog.LATENCY)
    assert (len(bounds) + 1, counts[-1]) == (len(counts), 2)

"""The few numbers for a person: quantiles as Prometheus computes them, and what is unknown says so."""

import pytest

from exporter import catalog
from exporter.lifecycle import Lifecycle
from exporter.overview import quantile, rows, total
from exporter.signals import Reading, Sample
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


def test_what_is_unknown_says_so_and_what_is_known_is_told() -> None:
    store, life = Store(), Lifecycle(has_page=True)
    told = dict(rows(store, life))
    assert told["Engine"] == "not recognised yet"
    assert told["Phase"] == "starting, down"
    assert told["Running requests"] == told["KV cache in use"] == "unknown"
    assert told["Queue wait, since start"] == "none seen yet"
    assert told["Errors"] == "none"
    life.engine = "vllm"
    life.answered(healthy=True, moved=True, started_at=None)
    samples = (
        Sample(catalog.RUNNING, ("m", "0"), 3.0),
        Sample(catalog.RUNNING, ("m", "1"), 4.0),
        Sample(catalog.KV_USAGE, ("m", "0"), 0.25),
        Sample(catalog.KV_USAGE, ("m", "1"), 0.75),
        Sample(catalog.GPU_HEADROOM, ("0", "GPU-1"), float(3 << 30)),
    )
    store.publish(Reading("metrics", "metrics", ok=True, at=1.0, samples=samples))
    store.publish(Reading("gpu", "gpu", ok=False, at=1.0, reason="library_not_found"))
    store.observe(catalog.QUEUE_WAIT, ("m",), 0.0123, origin="log")
    store.observe(catalog.LATENCY, ("m",), 12.0, origin="log")
    store.count(catalog.ERRORS, ("cuda",), origin="log")
    told = dict(rows(store, life))
    assert told["Engine"] == "vllm"
    assert told["Phase"] == "serving, up"
    assert told["Running requests"] == "7"
    assert told["KV cache in use"] == "75.0%"
    assert told["Queue wait, since start"].endswith("\u00a0ms · 1 seen")
    assert told["Request latency, since start"].startswith("P50 1")
    assert told["Errors"] == "cuda 1"
    assert told["GPU 0 headroom"] == "3.0 GiB"
    assert told["Source gpu"] == "library_not_found"

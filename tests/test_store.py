"""What the store keeps, counts and caps, and what the collector makes of it."""

import itertools

import pytest
from harness import Clock
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from exporter import catalog
from exporter.catalog import geometric
from exporter.collector import StoreCollector
from exporter.lifecycle import Lifecycle
from exporter.signals import Reading, Sample
from exporter.store import OTHER, Buckets, Store


def page(store: Store) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StoreCollector(store, Lifecycle(has_page=True)))
    return generate_latest(registry).decode()


def reading(source: str, origin, *samples: Sample, reason: str = "") -> Reading:
    return Reading(source, origin, ok=not reason, at=5.0, samples=samples, reason=reason)


def test_bounds_are_geometric_and_end_where_they_should() -> None:
    bounds = geometric(0.001, 600.0, 1.15)
    assert (len(bounds), bounds[0], bounds[-1]) == (96, 0.001, 600.0)
    assert max(b / a for a, b in itertools.pairwise(bounds)) < 1.152


@given(st.lists(st.floats(0, 1000, allow_nan=False)))
def test_buckets_equal_the_librarys_own_histogram(values: list[float]) -> None:
    bounds = geometric(0.001, 600.0, 1.15)
    registry = CollectorRegistry()
    theirs = Histogram("x", "x", buckets=bounds, registry=registry)
    ours = Buckets(bounds)
    for value in values:
        theirs.observe(value)
        ours.observe(value)
    samples = {s.labels.get("le"): s.value for m in registry.collect() for s in m.samples if s.name == "x_bucket"}
    assert list(samples.values()) == ours.cumulative()
    assert ours.sum == pytest.approx(sum(values))


def test_an_observation_of_zero_is_counted_in_the_first_bucket() -> None:
    buckets = Buckets((1.0, 2.0))
    buckets.observe(0.0)
    assert buckets.cumulative() == [1, 1, 1]


def test_a_reading_replaces_the_last_one_whole_and_a_failed_one_leaves_nothing() -> None:
    store = Store()
    running = Sample(catalog.RUNNING, ("m", "0"), 3.0)
    store.publish(reading("metrics", "metrics", running, Sample(catalog.WAITING, ("m", "0"), 1.0)))
    store.publish(reading("metrics", "metrics", running))
    assert catalog.WAITING not in store.gauges()
    store.publish(reading("metrics", "metrics", reason="timeout"))
    assert catalog.RUNNING not in store.gauges()
    text = page(store)
    assert 'stopline_source_up{source="metrics"} 0.0' in text
    assert 'stopline_source_error{reason="timeout",source="metrics"} 1.0' in text
    assert 'stopline_source_last_success_timestamp_seconds{source="metrics"} 5.0' in text


def test_what_an_engine_does_is_unknown_while_it_is_not_up() -> None:
    store = Store()
    store.publish(
        reading("log", "log", Sample(catalog.RUNNING, ("", "0"), 9.0), Sample(catalog.KV_TOKENS, ("", "0"), 5.0))
    )
    assert set(store.gauges(up=False)) == {catalog.KV_TOKENS}


def test_a_failed_reading_cannot_carry_samples() -> None:
    with pytest.raises(ValueError, match="has a reason and no samples"):
        Reading("x", "metrics", ok=False, at=0.0)


def test_a_gauge_told_by_page_and_log_is_taken_from_the_page() -> None:
    store = Store()
    store.publish(reading("log", "log", Sample(catalog.RUNNING, ("", "0"), 9.0)))
    store.publish(reading("metrics", "metrics", Sample(catalog.RUNNING, ("m", "0"), 3.0)))
    assert store.gauges()[catalog.RUNNING] == {("m", "0"): 3.0}


@pytest.mark.parametrize("order", [("log", "metrics"), ("metrics", "log")])
def test_limits_told_by_page_and_log_complete_each_other(order) -> None:
    told = {
        "metrics": [("gpu_memory_utilization", 0.92)],
        "log": [("max_running_requests", 8.0), ("gpu_memory_utilization", 0.9)],
    }
    store = Store()
    for source in order:
        samples = [Sample(catalog.ENGINE_LIMIT, (name,), value) for name, value in told[source]]
        store.publish(reading(source, source, *samples))
    assert store.gauges()[catalog.ENGINE_LIMIT] == {("gpu_memory_utilization",): 0.92, ("max_running_requests",): 8.0}


def test_a_value_is_taken_from_the_most_exact_source_and_from_one_only() -> None:
    clock = Clock()
    store = Store(clock=clock)
    store.observe(catalog.QUEUE_WAIT, ("m",), 0.1, origin="metrics")
    clock.pass_(1.0)
    store.observe(catalog.QUEUE_WAIT, ("m",), 0.2, origin="log")
    store.observe(catalog.QUEUE_WAIT, ("m",), 0.1, origin="metrics")
    counts = {k: b.cumulative()[-1] for k, b in store.histograms[catalog.QUEUE_WAIT].items()}
    assert counts == {("m", "metrics"): 1, ("m", "log"): 1}


def test_a_source_that_fell_silent_gives_way_only_after_a_while() -> None:
    clock = Clock()
    store = Store(clock=clock)
    store.observe(catalog.QUEUE_WAIT, ("m",), 0.2, origin="log")
    for _ in range(100):  # a burst that the page shows before the log is read
        store.observe(catalog.QUEUE_WAIT, ("m",), 0.1, origin="metrics")
    clock.pass_(31)
    store.observe(catalog.QUEUE_WAIT, ("m",), 0.1, origin="metrics")  # what was missed until here is not counted
    store.observe(catalog.QUEUE_WAIT, ("m",), 0.1, origin="metrics")
    assert store.histograms[catalog.QUEUE_WAIT]["m", "metrics"].cumulative()[-1] == 1


def test_counts_come_from_the_page_even_if_the_log_tells_them_too() -> None:
    store = Store()
    store.expect(catalog.ERRORS, ("server_error",), origin="metrics")
    store.count(catalog.ERRORS, ("server_error",), origin="log")
    store.count(catalog.ERRORS, ("cuda",), origin="log")
    store.count(catalog.ERRORS, ("server_error",), 2.0, origin="metrics")
    assert store.counters[catalog.ERRORS] == {("server_error", "metrics"): 2.0, ("cuda", "log"): 1.0}
    assert set(store.last_error) == {"server_error", "cuda"}


def test_label_values_are_capped_and_the_overflow_is_counted() -> None:
    store = Store(cap=3)
    for n in range(1000):
        store.count(catalog.PREEMPTIONS, (f"m{n}",), origin="metrics")
    store.count(catalog.PREEMPTIONS, ("m1",), origin="metrics")
    series = store.counters[catalog.PREEMPTIONS]
    assert series == {("m0",): 1, ("m1",): 2, ("m2",): 1, (OTHER,): 997}
    assert store.counters[catalog.SERIES_DROPPED] == {("stopline_preemptions_total",): 997}


@pytest.mark.parametrize("name", ["a\nb", "x" * 129, "\x1b[31m"])
def test_a_label_value_that_could_harm_becomes_other(name: str) -> None:
    store = Store()
    store.count(catalog.PREEMPTIONS, (name,), origin="metrics")
    assert store.counters[catalog.PREEMPTIONS] == {(OTHER,): 1}


def test_series_of_a_model_that_is_served_no_longer_are_forgotten() -> None:
    store = Store(cap=2)
    for model in ("a", "b"):
        store.count(catalog.PREEMPTIONS, (model,), origin="metrics")
        store.observe(catalog.LATENCY, (model,), 1.0, origin="metrics")
    store.keep_models(["b"])
    store.count(catalog.PREEMPTIONS, ("c",), origin="metrics")
    assert store.counters[catalog.PREEMPTIONS] == {("b",): 1, ("c",): 1}
    assert set(store.histograms[catalog.LATENCY]) == {("b", "metrics")}


def test_wrong_labels_show_where_they_are_made() -> None:
    with pytest.raises(ValueError, match="wants labels"):
        Sample(catalog.RUNNING, ("m",), 1.0)
    with pytest.raises(ValueError, match="wants labels"):
        Store().count(catalog.PREEMPTIONS, ("m", "0"), origin="log")


def test_every_family_has_help_and_the_page_parses() -> None:
    store = Store()
    store.publish(reading("metrics", "metrics", Sample(catalog.KV_TOKENS, ('we"ird\\name', "0"), 1.0)))
    store.observe(catalog.LATENCY, ("m",), 1.0, origin="metrics")
    families = {f.name: f for f in text_string_to_metric_families(page(store))}
    assert families["stopline_kv_cache_capacity_tokens"].samples[0].labels["model"] == 'we"ird\\name'
    assert all(family.documentation for family in families.values())


def test_no_two_families_share_a_name_and_counters_end_in_total() -> None:
    names = [f.name for f in catalog.FAMILIES]
    assert len(names) == len(set(names))
    assert all(f.name.endswith("_total") == (f.kind == "counter") for f in catalog.FAMILIES)
    assert all((f.kind == "histogram") == (f.bounds is not None) for f in catalog.FAMILIES)

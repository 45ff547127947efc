"""A few numbers for a person: the rows of the plain page and the lines of the demo."""

from collections.abc import Iterator

from exporter import catalog
from exporter.catalog import Family
from exporter.lifecycle import Lifecycle
from exporter.store import Buckets, Store


def quantile(bounds: tuple[float, ...], cumulative: list[int], q: float) -> float | None:
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


def total(store: Store, family: Family) -> tuple[tuple[float, ...], list[int]]:
    """Bounds and cumulative counts of *family* over all its series."""
    series: list[Buckets] = list(store.histograms.get(family, {}).values())
    if not series:
        return (), []
    return series[0].bounds, [sum(column) for column in zip(*(b.cumulative() for b in series), strict=True)]


def rows(store: Store, lifecycle: Lifecycle) -> Iterator[tuple[str, str]]:
    """Name and value of what is known now; what is unknown says so."""
    gauges = store.gauges(up=lifecycle.up)
    yield "Engine", f"{lifecycle.engine or 'not recognised yet'} {lifecycle.info.get('version', '')}".strip()
    yield "Model", lifecycle.info.get("model", "unknown")
    yield "Phase", f"{lifecycle.phase}, {'up' if lifecycle.up else 'down'}"
    for name, family in (("Running", catalog.RUNNING), ("Waiting", catalog.WAITING)):
        series = gauges.get(family)
        yield f"{name} requests", f"{sum(series.values()):g}" if series else "unknown"
    usage = gauges.get(catalog.KV_USAGE)
    yield "KV cache in use", f"{max(usage.values()):.1%}" if usage else "unknown"
    for name, family in (
        ("Queue wait", catalog.QUEUE_WAIT),
        ("Time to first token", catalog.FIRST_TOKEN),
        ("Request latency", catalog.LATENCY),
        ("Step latency", catalog.STEP_LATENCY),
    ):
        bounds, counts = total(store, family)
        values = [quantile(bounds, counts, q) for q in (0.5, 0.99)]
        text = " · ".join(f"P{q} {_seconds(v)}" for q, v in zip((50, 99), values, strict=True) if v is not None)
        yield f"{name}, since start", f"{text} · {counts[-1]} seen" if text else "none seen yet"
    errors = {k[0]: v for k, v in store.counters.get(catalog.ERRORS, {}).items() if v}
    yield "Errors", ", ".join(f"{kind} {count:g}" for kind, count in errors.items()) or "none"
    for (gpu, _), free in sorted(gauges.get(catalog.GPU_HEADROOM, {}).items()):
        yield f"GPU {gpu} headroom", f"{free / (1 << 30):.1f} GiB"
    for reading in store.readings.values():
        yield f"Source {reading.source}", "ok" if reading.ok else reading.reason


def _seconds(value: float) -> str:
    return f"{value * 1000:.1f}\u00a0ms" if value < 1 else f"{value:.2f}\u00a0s"  # never apart at the end of a line

"""What a Stopline beside the server saw of a level: its page before and after, and its gauges meanwhile."""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from exporter import catalog
from exporter.catalog import Family
from exporter.load.result import Condition, Engine, Memory, Quantiles, Step
from exporter.load.verdict import Limits
from exporter.quantile import quantile
from exporter.sources.fetch import Access, Server, Unreadable

EVERY = 5.0
"""Seconds between two looks at the gauges during a level."""
_POLL = 0.25  # seconds between two looks while something is waited for
_GAUGES = (
    *(catalog.RUNNING, catalog.WAITING, catalog.KV_USAGE, catalog.GPU_TOTAL, catalog.GPU_USED, catalog.GPU_PEAK),
    *(catalog.GPU_HEADROOM, catalog.GPU_EFFECTIVE, catalog.GPU_PLATEAU, catalog.GPU_UTILIZATION),
    *(catalog.ENGINE_PREALLOCATES, catalog.THRESHOLD, catalog.PREEMPTIONS),
)
_NAMES = tuple(f.name for f in _GAUGES)
_DIMENSIONS = ("tensor", "pipeline", "data", "expert")

Labels = frozenset[tuple[str, str]]


class Page:
    """One exposition of the sidecar."""

    def __init__(self, text: str) -> None:
        """Raises ValueError if *text* is no exposition."""
        self._samples: dict[str, dict[Labels, float]] = defaultdict(dict)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name][frozenset(sample.labels.items())] = sample.value

    def series(self, name: str, **labels: str) -> dict[Labels, float]:
        """Values of the samples called *name* with at least these labels."""
        wanted = labels.items()
        return {key: value for key, value in self._samples.get(name, {}).items() if wanted <= key}

    def by(self, family: Family, label: str) -> dict[str, float]:
        """The sum of the series of *family* for each value of *label*."""
        sums: dict[str, float] = defaultdict(float)
        for key, value in self.series(family.name).items():
            sums[dict(key)[label]] += value
        return dict(sums)

    def total(self, family: Family) -> float | None:
        """The sum of all series; None if there is none."""
        series = self.series(family.name)
        return math.fsum(series.values()) if series else None

    def info(self, family: Family) -> dict[str, str]:
        """The labels of the one series of an info family; empty without."""
        return dict(next(iter(self.series(family.name)), frozenset()))


@dataclass(slots=True)
class Watch:
    """Extremes of the gauges over the polls of a level."""

    limits: Limits
    kv_usage: float | None = None
    kv_full: bool = False
    preallocates: bool | None = None
    gpus: dict[str, Memory] = field(default_factory=dict)
    _loads: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _preempted: float | None = None
    _earlier: dict[str, float] | None = None  # peaks of the minute before the level, by GPU

    def see(self, page: Page, *, minute: bool = False) -> None:
        """One poll, the first at the begin of the level; *minute*: it began more than a minute ago."""
        usage = page.series(catalog.KV_USAGE.name)
        if usage:
            now = max(usage.values())
            self.kv_usage = max(self.kv_usage or 0.0, now)
            preempted = page.total(catalog.PREEMPTIONS) or 0.0
            rising = self._preempted is not None and preempted > self._preempted
            self._preempted = preempted
            queue = (page.total(catalog.WAITING) or 0.0) > 0
            self.kv_full |= now >= self.limits.kv_cache_usage_ratio and (queue or rising)
        if (told := page.total(catalog.ENGINE_PREALLOCATES)) is not None:
            self.preallocates = told == 1
        self._memory(page, minute)

    def _memory(self, page: Page, minute: bool) -> None:
        total, used = page.by(catalog.GPU_TOTAL, "gpu"), page.by(catalog.GPU_USED, "gpu")
        peak, effective = page.by(catalog.GPU_PEAK, "gpu"), page.by(catalog.GPU_EFFECTIVE, "gpu")
        if self._earlier is None:
            self._earlier = peak
        peak = {gpu: top for gpu, top in peak.items() if minute or top > self._earlier.get(gpu, 0.0)}
        plateau, load = page.by(catalog.GPU_PLATEAU, "gpu"), page.by(catalog.GPU_UTILIZATION, "gpu")
        for gpu in total.keys() & used.keys():
            before = self.gpus.get(gpu)
            top = max(used[gpu], peak.get(gpu, 0.0), before.peak if before else 0.0)
            needed = total[gpu] - effective[gpu] if gpu in effective else None
            if before is not None and before.needed is not None:
                needed = max(before.needed, needed or 0.0)
            if gpu in load:
                self._loads[gpu].append(load[gpu])
            mean = math.fsum(self._loads[gpu]) / len(self._loads[gpu]) if self._loads[gpu] else None
            self.gpus[gpu] = Memory(total[gpu], top, needed, plateau.get(gpu), mean)


def increase(before: Page, after: Page, name: str, **labels: str) -> float:
    """By how much the counters called *name* grew, all together; one that restarted counts whole."""
    old = before.series(name, **labels)
    return math.fsum(_grown(old.get(key, 0.0), value) for key, value in after.series(name, **labels).items())


def _grown(old: float, new: float) -> float:
    return new - old if new >= old else new


def _histogram(before: Page, after: Page, family: Family, **labels: str) -> tuple[float, float, dict[float, float]]:
    """Count, sum and quantiles (by q) of what *family* got in between."""
    counts: dict[float, float] = defaultdict(float)
    old = before.series(f"{family.name}_bucket", **labels)
    for key, value in after.series(f"{family.name}_bucket", **labels).items():
        counts[float(dict(key)["le"])] += _grown(old.get(key, 0.0), value)
    bounds = tuple(sorted(counts))
    cumulative = [int(counts[bound]) for bound in bounds]
    found = {q: quantile(bounds[:-1], cumulative, q) for q in (0.5, 0.95, 0.99)}
    count = increase(before, after, f"{family.name}_count", **labels)
    total = increase(before, after, f"{family.name}_sum", **labels)
    return count, total, {q: value for q, value in found.items() if value is not None}


def engine(before: Page, after: Page, watch: Watch) -> Engine:
    """What happened between two pages, with the extremes of *watch*."""
    count, total, wait = _histogram(before, after, catalog.QUEUE_WAIT)
    queue = Quantiles(wait[0.5], wait[0.95], wait[0.99], total / count) if count and wait else Quantiles()
    phases = sorted({dict(key)["phase"] for key in after.series(f"{catalog.STEP_LATENCY.name}_count")})
    steps = {}
    for phase in phases:
        count, total, found = _histogram(before, after, catalog.STEP_LATENCY, phase=phase)
        if count and found:
            steps[phase] = Step(count, total / count, found[0.5], found[0.99])
    failed = {
        kind: grew
        for kind in after.by(catalog.ERRORS, "kind")
        if (grew := increase(before, after, catalog.ERRORS.name, kind=kind))
    }
    stepping = increase(before, after, catalog.STEP_SECONDS.name)
    talking = increase(before, after, catalog.COMMUNICATION.name)
    return Engine(
        queue_wait=queue,
        steps=steps,
        errors=failed,
        preemptions=increase(before, after, catalog.PREEMPTIONS.name),
        kv_cache_usage=watch.kv_usage,
        kv_cache_full=watch.kv_full,
        communication_share=talking / stepping if stepping and after.series(catalog.COMMUNICATION.name) else None,
        memory=watch.gpus,
        preallocates=watch.preallocates,
    )


def conditions(page: Page) -> dict[str, Condition]:
    """What the server is, as far as the sidecar knows: what must be alike in runs that are compared."""
    info = page.info(catalog.ENGINE_INFO)
    told: dict[str, Condition] = {
        key: info[key] for key in ("engine", "version", "model", "dtype", "quantization") if info.get(key)
    }
    split = page.by(catalog.PARALLELISM, "dimension")
    if split:
        told["parallelism"] = layout({name: int(split.get(name, 1)) for name in _DIMENSIONS})
    told |= page.by(catalog.ENGINE_LIMIT, "name")
    if gpu := page.info(catalog.GPU_INFO).get("name"):
        told["gpu"] = gpu
    return told


def layout(split: Mapping[str, int]) -> str:
    """``TP 2 / PP 1``, and the other dimensions where they are above 1."""
    text = f"TP {split.get('tensor', 1)} / PP {split.get('pipeline', 1)}"
    further = (("DP", "data"), ("EP", "expert"))
    return text + "".join(f" / {short} {split[name]}" for short, name in further if split.get(name, 1) > 1)


def limits(page: Page, chosen: Mapping[str, float]) -> Limits:
    """The thresholds of the sidecar, but where the user chose."""
    told = page.by(catalog.THRESHOLD, "line")
    return Limits(**{f.name: told[f.name] for f in fields(Limits) if f.name in told} | dict(chosen))


def identity(page: Page) -> dict[str, str]:
    """Model and config of the engine, for a pin."""
    info = page.info(catalog.ENGINE_INFO)
    return {key: info[key] for key in ("model", "config") if info.get(key)}


class Sidecar:
    """A running Stopline, asked over HTTP. Every method raises Unreadable when it does not answer."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        base = url.rstrip("/").removesuffix("/metrics")
        self._server = Server(base, session, Access(timeout=5.0))
        self.url = base

    async def page(self) -> Page:
        return self._parsed((await self._server.get("/metrics"))[0].splitlines())

    async def gauges(self) -> Page:
        """Only what changes all the time: parsing the whole page would cost the client that measures too much."""
        lines = (await self._server.get("/metrics"))[0].splitlines()
        return self._parsed(line for line in lines if line.startswith(_NAMES))

    async def settled(self, seconds: float = 10.0) -> Page:
        """The page after two further polls of the engine, so that all that has ended is on it.

        Where the sidecar only reads a log, the page after two seconds.
        """
        began = time.monotonic()
        polls: set[float] = set()
        while True:
            page = await self.page()
            polls |= set(page.series(catalog.SOURCE_SUCCESS.name, source="metrics").values())
            waited = time.monotonic() - began
            if len(polls) > 2 or waited > seconds or (not polls and waited > 2.0):
                return page
            await asyncio.sleep(_POLL)

    async def idle(self, seconds: float) -> bool:
        """Whether the engine's queue was empty, and nothing was running, within so many seconds."""
        end = time.monotonic() + seconds
        while True:
            page = await self.gauges()
            present = (page.total(catalog.RUNNING) or 0.0) + (page.total(catalog.WAITING) or 0.0)
            if present == 0 or time.monotonic() > end:
                return present == 0
            await asyncio.sleep(_POLL)

    async def watch(self, watch: Watch, began: float) -> None:
        """Keep *watch* informed until cancelled; *began* is when the level did, on the monotonic clock."""
        while True:
            await asyncio.sleep(EVERY)
            try:
                watch.see(await self.gauges(), minute=time.monotonic() - began > 60)
            except Unreadable:
                continue  # the next page will tell

    def _parsed(self, lines: Iterable[str]) -> Page:
        try:
            return Page("\n".join(lines) + "\n")
        except ValueError as error:
            raise Unreadable("broken", f"{self.url}/metrics is no metrics page: {error}") from None

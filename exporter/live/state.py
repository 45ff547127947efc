"""What the live page shows, as plain values: the answer of /api/state, whose shape is this file's dataclasses.

Units are in the names; what is not known is null or left out of its list, never 0. Names may be added, none changes
its meaning.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from exporter import __version__, baseline, catalog, remedies
from exporter.baseline import Pin
from exporter.catalog import Family
from exporter.config import Config
from exporter.history import History, Moments
from exporter.judge import RECENT, Evidence, Verdict, advise, judge
from exporter.learned import Baseline, Learned
from exporter.lifecycle import Lifecycle
from exporter.quantile import quantile
from exporter.signals import Gauges, Labels
from exporter.store import Store

SHOWN_SECONDS = 900.0
"""How far back the pictures go."""
_SMOOTHED = 60.0  # each point of them is of so long before it
_FRESH_SECONDS = 1.0
LEVEL_NEEDS = 100
"""Requests from which a level of the capacity curve counts."""
LEVEL_LASTS = 10.0
"""Seconds from which its throughput is told."""
_GPU = (catalog.GPU_TOTAL, catalog.GPU_USED, catalog.GPU_PEAK, catalog.GPU_HEADROOM, catalog.GPU_PLATEAU)
_PARTS = ("weights", "kv_used", "kv_free", "other")


@dataclass(frozen=True, slots=True)
class Engine:
    """The server. *started_at* is Unix time; *config* the hash of what makes two runs comparable."""

    name: str
    version: str
    model: str
    config: str
    phase: str
    up: bool | None
    """None where it is not watched."""
    started_at: float | None
    running: float | None
    waiting: float | None
    kv_usage_ratio: float | None
    facts: tuple[tuple[str, str], ...] = ()
    """Name and value of what is known of its set-up, for people."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU's memory in bytes. The parts add up to *used_bytes*; *limit_bytes* is where the memory line is.

    *over_bytes* is how far it is beyond that, by its use or its peak, whichever the line's rule goes by; else 0.
    """

    gpu: str
    uuid: str
    name: str
    up: bool
    total_bytes: float | None = None
    used_bytes: float | None = None
    free_bytes: float | None = None
    peak_bytes: float | None = None
    plateau_bytes: float | None = None
    effective_headroom_bytes: float | None = None
    limit_bytes: float | None = None
    parts_bytes: Mapping[str, float] = field(default_factory=dict)
    over_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Past:
    """The last quarter of an hour. Lists are as long as *seconds_ago*, oldest first; null where nothing was told.

    Quantiles are of the minute before each point, over all models; errors are those of each step.
    """

    seconds_ago: tuple[float, ...] = ()
    queue_wait_p50_seconds: tuple[float | None, ...] = ()
    queue_wait_p99_seconds: tuple[float | None, ...] = ()
    step_p50_seconds: tuple[float | None, ...] = ()
    step_p99_seconds: tuple[float | None, ...] = ()
    latency_p99_seconds: tuple[float | None, ...] = ()
    running: tuple[float | None, ...] = ()
    waiting: tuple[float | None, ...] = ()
    errors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Level:
    """A level of concurrency: up to so many requests in the engine. *counts* says that it saw enough requests."""

    concurrency: str
    requests: int
    p99_seconds: float | None
    tokens_per_second: float | None
    counts: bool


@dataclass(frozen=True, slots=True)
class Capacity:
    """The capacity curve of the model asked most, since Stopline started. *limit* is the highest level under the line,
    *first_over* the lowest at or above it."""

    model: str = ""
    levels: tuple[Level, ...] = ()
    line_seconds: float | None = None
    limit: str = ""
    first_over: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """Something that is read. *last_success* is Unix time; *reason* from the closed set of the README."""

    source: str
    ok: bool
    reason: str = ""
    cause: str = ""
    remedy: str = ""
    last_success: float | None = None


PARTLY = "metric_missing"
"""The reason of a page that is read and lacks something it should have."""


@dataclass(frozen=True, slots=True)
class State:
    """All of it. *at* is the Unix time it was made at; *lines* are latency, errors, memory."""

    version: str
    at: float
    engine: Engine
    lines: tuple[Verdict, ...]
    gpus: tuple[Gpu, ...]
    past: Past
    capacity: Capacity
    sources: tuple[Source, ...]
    pinned: Mapping[str, float] = field(default_factory=dict)
    """Pinned P99 by signal, in seconds."""


class Live:
    """Makes a State of what the sidecar knows now, when asked; made once a second at most.

    *gauges* are all that are exported; *config* and *pins* give what holds now.
    """

    def __init__(
        self,
        store: Store,
        lifecycle: Lifecycle,
        history: History,
        gauges: Callable[[], Gauges],
        *,
        config: Callable[[], Config],
        pins: Callable[[], Sequence[Pin]],
        expected: Callable[[], list[str]],
        clock: Callable[[], float],
        pace: float = 1.0,
    ) -> None:
        self._store = store
        self._lifecycle = lifecycle
        self._history = history
        self._gauges = gauges
        self._config = config
        self._pins = pins
        self._expected = expected
        self._clock = clock
        self._pace = pace
        self._learned = Learned(store, lifecycle, pace=pace)
        self._gpus: dict[Family, dict[Labels, tuple[float, float]]] = {}
        self._served = False
        self._made: tuple[float, State] | None = None
        history.noted += [self._learned.note, self._note]

    def state(self) -> State:
        """What holds now; up to a second old."""
        if self._made is None or self._clock() - self._made[0] >= _FRESH_SECONDS:
            self._made = self._clock(), self._make()
        return self._made[1]

    def evidence(self) -> Evidence:
        """What the lines are judged on."""
        gauges, store = self._gauges(), self._store
        moments = self._history.moments(gauges)
        self._note(moments, gauges)
        config = self._lifecycle.config(gauges)
        models = moments.models(catalog.LATENCY)
        found = {model: self._baseline(model, config, gauges) for model in models}
        return Evidence(
            moments,
            gauges,
            self._config().thresholds,
            now=moments.all[-1].at,
            wall=store.wall(),
            baselines={model: base for model, base in found.items() if base is not None},
            calm={model: self._learned.samples(model, config) for model in models},
            gpus={
                family: {labels: value for labels, (_, value) in series.items()}
                for family, series in self._gpus.items()
            },
            readings=store.readings,
            last_error=store.last_error,
            last_success=store.last_success,
            answers_told=any(o == "ok" for _, o in store.counters[catalog.REQUESTS]) or bool(models),
            work_told=bool(store.counters.get(catalog.TOKENS) or store.histograms.get(catalog.STEP_LATENCY)),
            served=self._served,
            watched=moments.all[-1].at - self._history.began,
            pace=self._pace,
        )

    # within

    def _note(self, moments: Moments, gauges: Gauges) -> None:
        """GPUs are held for two minutes, as the rules hold them."""
        now = moments.all[-1].at
        self._served |= self._lifecycle.up
        for family in _GPU:
            series = self._gpus.setdefault(family, {})
            series |= {labels: (now, value) for labels, value in gauges.get(family, {}).items()}
            for labels in [old for old, (at, _) in series.items() if now - at > RECENT / self._pace]:
                del series[labels]

    def _baseline(self, model: str, config: str, gauges: Gauges) -> Baseline | None:
        known = self._learned.baseline(model, config)
        pinned = {signal: value for (of, signal), value in self._pinned(gauges).items() if of == model}
        if "request" not in pinned:
            return known
        base = replace(known or Baseline(0.0, "pinned"), seconds=pinned["request"], source="pinned")
        return replace(base, queue_wait=pinned.get("queue_wait", base.queue_wait), step=pinned.get("step", base.step))

    def _pinned(self, gauges: Gauges) -> dict[tuple[str, str], float]:
        """Pinned P99 (seconds) by model and signal."""
        told = baseline.samples(self._pins(), self._lifecycle, gauges, self._config().engine.model)
        return {(s.labels[0], s.labels[1]): s.value for s in told if s.labels[2] == "0.99"}

    def _make(self) -> State:
        evidence = self.evidence()
        verdicts = judge(evidence)
        gauges = evidence.gauges
        return State(
            __version__,
            evidence.wall,
            self._engine(gauges),
            verdicts,
            tuple(_gpus(gauges, self._config())),
            _past(evidence, self._history.step),
            self._capacity(evidence),
            tuple(self._sources()),
            {signal: seconds for (_, signal), seconds in self._pinned(gauges).items()},
        )

    def _engine(self, gauges: Gauges) -> Engine:
        life = self._lifecycle
        running, waiting = (gauges.get(family) for family in (catalog.RUNNING, catalog.WAITING))
        usage = gauges.get(catalog.KV_USAGE)
        return Engine(
            life.engine,
            life.info.get("version", ""),
            life.info.get("model", "") or self._config().engine.model,
            life.config(gauges) if life.engine else "",
            life.phase,
            life.up if life.watched else None,
            life.started_at,
            sum(running.values()) if running else None,
            sum(waiting.values()) if waiting else None,
            max(usage.values()) if usage else None,
            tuple(_facts(life, gauges)),
        )

    def _capacity(self, evidence: Evidence) -> Capacity:
        store, config = self._store, self._lifecycle.config(evidence.gauges)
        series = store.histograms.get(catalog.LATENCY_BY_CONCURRENCY, {})
        asked: dict[str, int] = {}
        for (model, of, _), buckets in series.items():
            if of == config:
                asked[model] = asked.get(model, 0) + sum(buckets.counts())
        if not asked:
            return Capacity()
        model = max(asked, key=lambda each: asked[each])
        tokens, seconds = (
            store.counters.get(family, {}) for family in (catalog.TOKENS_BY_CONCURRENCY, catalog.SECONDS_BY_CONCURRENCY)
        )
        levels = []
        for concurrency in catalog.LEVELS:
            labels = (model, config, concurrency)
            if labels not in series:
                continue
            counts = series[labels].cumulative()
            lasted = seconds.get(labels, 0.0)
            levels.append(
                Level(
                    concurrency,
                    counts[-1],
                    quantile(series[labels].bounds, counts, 0.99),
                    tokens.get(labels, 0.0) / lasted if lasted >= LEVEL_LASTS else None,
                    counts[-1] >= LEVEL_NEEDS,
                )
            )
        base = evidence.baselines.get(model)
        line = base.seconds * evidence.thresholds.latency_ratio if base else None
        told = [(level.concurrency, level.p99_seconds) for level in levels if level.counts and level.p99_seconds]
        over = [at for at, p99 in told if line is not None and p99 >= line]
        below = [at for at, _ in told if line is not None and (not over or _rank(at) < _rank(over[0]))]
        return Capacity(model, tuple(levels), line, below[-1] if below else "", over[0] if over else "")

    def _sources(self) -> list[Source]:
        store = self._store
        found = []
        for name in [*store.readings, *(n for n in self._expected() if n not in store.readings)]:
            reading = store.readings.get(name)
            last = store.last_success.get(name)
            if reading is None:
                found.append(Source(name, ok=False, reason="not_tried", cause="not tried yet"))
            elif missing := sorted(s.labels[0] for s in reading.samples if s.family is catalog.METRIC_MISSING):
                more = f" and {len(missing) - 2} more" if len(missing) > 2 else ""
                cause = f"it lacks {', '.join(missing[:2])}{more}: {remedies.METRIC_MISSING.cause}"
                found.append(Source(name, False, PARTLY, cause, remedies.plain(remedies.METRIC_MISSING.remedy), last))
            elif reading.ok:
                found.append(Source(name, ok=True, last_success=last))
            else:
                found.append(Source(name, False, reading.reason, *advise(reading), last))
        return found


def _rank(concurrency: str) -> int:
    return catalog.LEVELS.index(concurrency)


def _gpus(gauges: Gauges, config: Config) -> list[Gpu]:
    limits = config.thresholds
    reserves = gauges.get(catalog.ENGINE_PREALLOCATES, {}).get(())
    names = {(labels[0], labels[1]): labels[2] for labels in gauges.get(catalog.GPU_INFO, {})}
    found = []
    for labels, up in sorted(gauges.get(catalog.GPU_UP, {}).items(), key=lambda item: (len(item[0][0]), item[0])):
        of = {family: gauges.get(family, {}).get(labels) for family in (*_GPU, catalog.GPU_EFFECTIVE)}
        total, free, plateau = of[catalog.GPU_TOTAL], of[catalog.GPU_HEADROOM], of[catalog.GPU_PLATEAU]
        used = of[catalog.GPU_USED]
        ends = []  # where each rule of the line is, and how far it is reached
        if used is not None:
            peak = max(used, of[catalog.GPU_PEAK] or 0.0)
            if free is not None:
                ends.append((used + free - limits.memory_headroom_bytes, peak))
            if total is not None and reserves == 0:
                ends.append((total * limits.memory_used_ratio, peak))
            if plateau is not None and reserves != 0:
                ends.append((plateau + limits.memory_growth_bytes, used))
        parts = gauges.get(catalog.GPU_PART, {})
        found.append(
            Gpu(
                labels[0],
                labels[1],
                names.get((labels[0], labels[1]), ""),
                up=up == 1.0,
                total_bytes=total,
                used_bytes=used,
                free_bytes=free,
                peak_bytes=of[catalog.GPU_PEAK],
                plateau_bytes=plateau,
                effective_headroom_bytes=of[catalog.GPU_EFFECTIVE],
                limit_bytes=min((end for end, _ in ends), default=None),
                parts_bytes={part: parts[*labels, part] for part in _PARTS if (*labels, part) in parts},
                over_bytes=max((reached - end for end, reached in ends if reached > end), default=0.0),
            )
        )
    return found


def _past(evidence: Evidence, step: float) -> Past:
    moments, now, pace = evidence.moments, evidence.now, evidence.pace
    shown = moments.last(SHOWN_SECONDS / pace + step, now)

    def points(family: Family, q: float) -> tuple[float | None, ...]:
        return tuple(moments.spread(family, None, _SMOOTHED / pace, moment.at).quantile(q) for moment in shown)

    return Past(
        tuple(round((now - moment.at) * pace, 3) for moment in shown),
        points(catalog.QUEUE_WAIT, 0.5),
        points(catalog.QUEUE_WAIT, 0.99),
        points(catalog.STEP_LATENCY, 0.5),
        points(catalog.STEP_LATENCY, 0.99),
        points(catalog.LATENCY, 0.99),
        tuple(moment.running for moment in shown),
        tuple(moment.waiting for moment in shown),
        tuple(sum(n for (family, _), n in m.counted.items() if family is catalog.ERRORS) for m in shown),
    )


_DIMENSIONS = {"tensor": "TP", "pipeline": "PP", "data": "DP", "expert": "EP"}
_LIMITS = {
    "max_running_requests": "Most requests running",
    "max_batched_tokens": "Most tokens in a step",
    "max_model_len": "Longest context",
    "gpu_memory_utilization": "Share of GPU memory taken",
}


def _facts(life: Lifecycle, gauges: Gauges) -> list[tuple[str, str]]:
    """What is known of the set-up, for people."""
    found = [
        (name, life.info[key])
        for key, name in (("dtype", "Type"), ("quantization", "Quantization"))
        if life.info.get(key)
    ]
    ways = gauges.get(catalog.PARALLELISM, {})
    if split := [f"{short} {ways[(key,)]:g}" for key, short in _DIMENSIONS.items() if (key,) in ways]:
        found.append(("Parallelism", " · ".join(split)))
    experts = {scope: value for (scope,), value in gauges.get(catalog.EXPERTS, {}).items()}
    if experts:
        words = {"total": "in all", "per_rank": "on each rank", "redundant": "redundant"}
        found.append(("Experts", " · ".join(f"{v:g} {words[k]}" for k, v in experts.items() if k in words)))
    limits = gauges.get(catalog.ENGINE_LIMIT, {})
    for key, name in _LIMITS.items():
        if (key,) in limits:
            value = limits[(key,)]
            found.append((name, f"{value:.0%}" if key == "gpu_memory_utilization" else f"{value:,.0f}"))
    if tokens := gauges.get(catalog.KV_TOKENS):
        found.append(("KV cache", f"{sum(tokens.values()):,.0f} tokens"))
    if names := sorted({labels[2] for labels in gauges.get(catalog.GPU_INFO, {})}):
        found.append(("GPUs", f"{len(gauges.get(catalog.GPU_UP, {}))} × {', '.join(names)}"))
    return found

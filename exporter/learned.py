"""The baseline that the sidecar knows by itself: what its engine's latency is while little is asked of it.

Learned as the recording rules do (deploy/rules/baseline.yaml), from this one replica and since this process started:
every five minutes what came while the replica was calm is put aside; an hour later it counts; the P99 of a day of it
is taken, of which the lower quartile over a week is the baseline. What the rules know of other replicas, and of the
time before this process, is not here. So until as many are an hour old, the first 200 calm requests stand in for it
(*provisional*).
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from exporter import catalog
from exporter.history import KEPT_SECONDS, Moments, Spread, Tally
from exporter.lifecycle import Lifecycle
from exporter.signals import Gauges, Labels
from exporter.store import Buckets, Store

NEEDED = 200
"""Requests from which a P99 is learned."""
CHUNK_SECONDS = 300.0
_LAG = 12  # chunks in an hour
_DAY, _WEEK = 24, 168  # hours
_RUNS = 8  # of model and configuration; the one heard of least lately goes first
_GRADES = (  # requests in the engine on average in 30 and in 5 minutes, and the levels that count then
    ("1", 0.25, 1.1, ("1",)),
    ("1-2", 1.0, 2.0, ("1", "2")),
    ("1-4", 4.0, 8.0, ("1", "2", "4")),
)


_FAMILIES = {"queue_wait": catalog.QUEUE_WAIT, "step": catalog.STEP_LATENCY}
_Chunk = dict[str, Tally]
"""What came in a while, by what it is of: the calm levels of _GRADES, parts of a request, and amounts as mere sums."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a calm engine's requests take (seconds), whence that is known, and what explains a growth above it.

    *queue_wait*, *step* are P99 in seconds, *step_mean* is seconds; *tokens* of a request by kind; *communication* is
    the share of the step spent in it. None where it is not known.
    """

    seconds: float
    source: Literal["pinned", "learned", "provisional"]
    samples: int = 0
    queue_wait: float | None = None
    step: float | None = None
    step_mean: float | None = None
    communication: float | None = None
    tokens: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class _Run:
    """What is known of one model in one configuration."""

    pending: deque[_Chunk] = field(default_factory=lambda: deque(maxlen=_LAG + 1))
    hours: deque[_Chunk] = field(default_factory=lambda: deque(maxlen=_DAY))
    past: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=_WEEK))
    chunks: int = 0
    provisional: dict[str, float] = field(default_factory=dict)


class Learned:
    """Learns from *store*; `note` is to be called after every step of the history, *pace* is that one's."""

    def __init__(self, store: Store, lifecycle: Lifecycle, *, pace: float = 1.0) -> None:
        self._store = store
        self._lifecycle = lifecycle
        self._runs: dict[tuple[str, str], _Run] = {}
        self._pace = pace
        self._since: float | None = None
        self._before: dict[Labels, tuple[int, ...]] = {}

    def note(self, moments: Moments, gauges: Gauges) -> None:
        """A step is over; put a chunk aside if it ended one."""
        now = moments.all[-1].at
        if self._since is None:
            self._since = moments.all[0].at
        if now - self._since < CHUNK_SECONDS / self._pace - 1e-6:
            return
        self._since = now
        config = self._lifecycle.config(gauges)
        short, long = (self._held(moments, seconds / self._pace, now) for seconds in (CHUNK_SECONDS, KEPT_SECONDS))
        calm = [(name, levels) for name, most30, most5, levels in _GRADES if long <= most30 and short <= most5]
        for model in moments.models(catalog.LATENCY):
            chunk = self._chunk(moments, model, config, calm, now)
            self._keep((model, config), chunk)
        series = self._store.histograms.get(catalog.LATENCY_BY_CONCURRENCY, {})
        self._before = {labels: buckets.counts() for labels, buckets in series.items()}

    def baseline(self, model: str, config: str) -> Baseline | None:
        """Of *model* in the configuration *config*; None while too little is known."""
        run = self._runs.get((model, config))
        if run is None:
            return None
        learned = _quartiles(run.past)
        if "request" in learned:
            return _baseline(learned, "learned", self.samples(model, config))
        if "request" in run.provisional:
            return _baseline(run.provisional, "provisional", self.samples(model, config))
        return None

    def samples(self, model: str, config: str) -> int:
        """Calm requests that were seen, at a concurrency of at most 4."""
        run = self._runs.get((model, config))
        if run is None:
            return 0
        chunks = (*run.hours, *run.pending)
        return sum(count for chunk in chunks if "1-4" in chunk for _, count in chunk["1-4"].pairs())

    # within

    def _held(self, moments: Moments, seconds: float, now: float) -> float:
        """Requests in the engine on average: as its gauges say, or by Little's law, whichever is more."""
        told = [m.in_engine for m in moments.last(seconds, now) if m.in_engine is not None]
        ended = moments.spread(catalog.LATENCY, None, seconds, now).sum / seconds
        return max(ended, sum(told) / len(told) if told else 0.0)

    def _chunk(
        self, moments: Moments, model: str, config: str, calm: Sequence[tuple[str, Sequence[str]]], now: float
    ) -> _Chunk:
        seconds = CHUNK_SECONDS / self._pace
        chunk = {}
        for name, levels in calm:
            grown = [self._grown((model, config, level)) for level in levels]
            chunk[name] = Tally.of([sum(column) for column in zip(*filter(None, grown), strict=True)], 0.0)
        if any(name == "1-4" for name, _ in calm):
            chunk["queue_wait"] = moments.spread(catalog.QUEUE_WAIT, model, seconds, now).tally()
            chunk["step"] = moments.spread(catalog.STEP_LATENCY, model, seconds, now).tally()
            chunk["communication"] = _total(moments.communicating(model, seconds, now))
            chunk["step_seconds"] = _total(moments.increase(catalog.STEP_SECONDS, seconds, now, model=model))
        chunk["ok"] = _total(moments.increase(catalog.REQUESTS, seconds, now, model=model, outcome="ok"))
        for kind in catalog.TOKEN_KINDS:
            chunk[kind] = _total(moments.increase(catalog.TOKENS, seconds, now, model=model, kind=kind))
        return chunk

    def _grown(self, labels: Labels) -> tuple[int, ...]:
        buckets: Buckets | None = self._store.histograms.get(catalog.LATENCY_BY_CONCURRENCY, {}).get(labels)
        if buckets is None:
            return ()
        counts, had = buckets.counts(), self._before.get(labels)
        return tuple(new - old for old, new in zip(had, counts, strict=True)) if had else counts

    def _keep(self, key: tuple[str, str], chunk: _Chunk) -> None:
        run = self._runs.pop(key, None) or _Run()
        self._runs[key] = run
        if len(self._runs) > _RUNS:
            del self._runs[next(iter(self._runs))]
        run.pending.append(chunk)
        if "request" not in run.provisional:
            run.provisional = self._quantiles((*run.hours, *run.pending))
        if len(run.pending) <= _LAG:
            return
        if run.chunks % _LAG == 0:
            run.hours.append({})
            run.past.append({})
        run.chunks += 1
        oldest = run.pending.popleft()
        both = run.hours[-1], oldest
        run.hours[-1] = {name: self._pooled(name, both).tally() for name in run.hours[-1].keys() | oldest.keys()}
        run.past[-1] = self._quantiles(run.hours)

    def _pooled(self, name: str, chunks: Sequence[_Chunk]) -> Spread:
        bounds = self._store.bounds(_FAMILIES.get(name, catalog.LATENCY_BY_CONCURRENCY))
        return Spread(bounds, (chunk[name] for chunk in chunks if name in chunk))

    def _quantiles(self, chunks: Sequence[_Chunk]) -> dict[str, float]:
        """What these chunks make of each signal; without those that they do not tell."""
        found: dict[str, float | None] = {}
        for name, *_ in _GRADES:
            spread = self._pooled(name, chunks)
            if spread.count >= NEEDED:
                found["request"] = spread.quantile(0.99)
                break
        found["queue_wait"] = self._pooled("queue_wait", chunks).quantile(0.99)
        steps = self._pooled("step", chunks)
        found |= {"step": steps.quantile(0.99), "step_mean": steps.mean}
        found["communication"] = _over(_sum("communication", chunks), _sum("step_seconds", chunks))
        for kind in catalog.TOKEN_KINDS:
            found[kind] = _over(_sum(kind, chunks), _sum("ok", chunks))
        return {name: value for name, value in found.items() if value is not None}


def _total(amount: float) -> Tally:
    return Tally.of((), amount)


def _sum(name: str, chunks: Sequence[_Chunk]) -> float:
    return sum(chunk[name].sum for chunk in chunks if name in chunk)


def _over(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _quartiles(past: deque[dict[str, float]]) -> dict[str, float]:
    """The lower quartile of each signal, as Prometheus' quantile_over_time has it."""
    found = {}
    for name in {name for hour in past for name in hour}:
        values = sorted(hour[name] for hour in past if name in hour)
        rank = 0.25 * (len(values) - 1)
        (low, high) = next(pairwise([*values[int(rank) :], values[-1]]))
        found[name] = low + (high - low) * (rank - int(rank))
    return found


def _baseline(known: Mapping[str, float], source: Literal["learned", "provisional"], samples: int) -> Baseline:
    return Baseline(
        known["request"],
        source,
        samples,
        queue_wait=known.get("queue_wait"),
        step=known.get("step"),
        step_mean=known.get("step_mean"),
        communication=known.get("communication"),
        tokens={kind: known[kind] for kind in catalog.TOKEN_KINDS if kind in known},
    )

"""The last half hour in steps: what the live page draws, and what the stop lines are judged on there.

A step is 15 s, as long as Prometheus usually waits between two scrapes. It holds what was counted in it, histograms
without their empty buckets, and a few gauges at its end, so that half an hour of one busy model takes some 100 kB.
"""

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from exporter import catalog
from exporter.catalog import Family
from exporter.lifecycle import Lifecycle
from exporter.quantile import of_counts
from exporter.signals import Gauges, Labels
from exporter.store import OTHER, Store

STEP_SECONDS = 15.0
KEPT_SECONDS = 1800.0
_MODELS = 8
"""Kept apart; all further ones are taken together."""

_TIMED = (catalog.LATENCY, catalog.QUEUE_WAIT, catalog.STEP_LATENCY)
_COUNTED = (
    catalog.ERRORS,
    catalog.REQUESTS,
    catalog.LONG_ANSWERS,
    catalog.TOKENS,
    catalog.PREEMPTIONS,
    catalog.COMMUNICATION,
    catalog.STEP_SECONDS,
)

Key = tuple[Family, Labels]
_Of = TypeVar("_Of", str, Labels)


@dataclass(frozen=True, slots=True)
class Tally:
    """Observations of a histogram: their sum (its unit), and number by bucket, packed without the empty ones."""

    sum: float
    packed: bytes

    @classmethod
    def of(cls, counts: Iterable[int], total: float) -> "Tally":
        """From the number in each bucket."""
        return cls(total, array("I", [x for at, n in enumerate(counts) if n > 0 for x in (at, n)]).tobytes())

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Buckets and how many there are in each."""
        numbers = array("I", self.packed)
        return zip(numbers[::2], numbers[1::2], strict=True)


class Spread:
    """Tallies of one histogram added up. *bounds* are its upper bounds without +Inf."""

    def __init__(self, bounds: Sequence[float], tallies: Iterable[Tally] = ()) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self.counts = [0] * (len(bounds) + 1)
        for tally in tallies:
            self.add(tally)

    def add(self, tally: Tally) -> None:
        self.sum += tally.sum
        for at, count in tally.pairs():
            self.counts[at] += count

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count else None

    def quantile(self, q: float) -> float | None:
        """As Prometheus computes it; None without data."""
        return of_counts(self.bounds, self.counts, q)

    def tally(self) -> Tally:
        return Tally.of(self.counts, self.sum)


@dataclass(frozen=True, slots=True)
class Moment:
    """What happened since the moment before, and how things stood at this one (*at*, seconds of the clock).

    *timed* is by family and model, *counted* by family and labels; a gauge that was not told is None.
    """

    at: float
    up: bool
    phase: str
    timed: Mapping[tuple[Family, str], Tally] = field(default_factory=dict)
    counted: Mapping[Key, float] = field(default_factory=dict)
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None

    @property
    def in_engine(self) -> float | None:
        return None if self.running is None else self.running + (self.waiting or 0.0)


class Moments:
    """Moments, oldest first, and what was in a part of them. Times are seconds of the clock.

    *bounds* gives the upper bounds of a family's histograms.
    """

    def __init__(self, moments: Sequence[Moment], bounds: Callable[[Family], Sequence[float]]) -> None:
        self.all = moments
        self._at = [moment.at for moment in moments]
        self._bounds = bounds

    def last(self, seconds: float, until: float) -> Sequence[Moment]:
        """Those of the *seconds* before *until*, the one at that very time too."""
        return self.all[bisect_right(self._at, until - seconds) : bisect_right(self._at, until)]

    def spread(self, family: Family, model: str | None, seconds: float, until: float) -> Spread:
        """What a histogram observed in that time, of one model or of all."""
        spread = Spread(self._bounds(family))
        for moment in self.last(seconds, until):
            for (of, whose), tally in moment.timed.items():
                if of is family and model in (None, whose):
                    spread.add(tally)
        return spread

    def increase(self, family: Family, seconds: float, until: float, **labels: str) -> float:
        """By how much the counters of *family* with these *labels* grew in that time, all together."""
        wanted = [(family.labels.index(name), value) for name, value in labels.items()]
        return sum(
            amount
            for moment in self.last(seconds, until)
            for (of, values), amount in moment.counted.items()
            if of is family and all(values[at] == value for at, value in wanted)
        )

    def communicating(self, model: str, seconds: float, until: float) -> float:
        """Seconds spent in collective operations in that time: told as one, or one by one, whichever is more."""
        whole = self.increase(catalog.COMMUNICATION, seconds, until, model=model, op="all")
        return max(whole, self.increase(catalog.COMMUNICATION, seconds, until, model=model) - whole)

    def models(self, family: Family) -> list[str]:
        return sorted({whose for moment in self.all for of, whose in moment.timed if of is family})


class History:
    """Takes note of the *store* every step, as *tick* waits. *gauges* are all that are exported.

    *began* is the clock's time since which it looks. *pace* divides the length of a step and of what is kept: rules
    with shorter windows are tested with it. *noted* is called after every step.
    """

    def __init__(
        self,
        store: Store,
        lifecycle: Lifecycle,
        gauges: Callable[[], Gauges],
        *,
        clock: Callable[[], float],
        tick: Callable[[], Awaitable[None]],
        pace: float = 1.0,
    ) -> None:
        self._store = store
        self._lifecycle = lifecycle
        self._gauges = gauges
        self._clock = clock
        self._tick = tick
        self._kept = deque[Moment](maxlen=round(KEPT_SECONDS / STEP_SECONDS) + 1)
        self._models = set[str]()
        self._keys: dict[Any, Any] = {}
        self.began = clock()
        self.step = STEP_SECONDS / pace
        self.noted: list[Callable[[Moments, Gauges], None]] = []
        self._before = self._totals()
        self._due = clock() + self.step

    async def run(self) -> None:
        """Take note until cancelled."""
        while True:
            self.look()
            await self._tick()

    def look(self) -> None:
        """Take note if a step is over."""
        if self._clock() < self._due:
            return
        self._due = max(self._due + self.step, self._clock())
        now, gauges = self._totals(), self._gauges()
        self._kept.append(self._moment(now, gauges))
        self._before = now
        self._keys = {key: key for key in (*now.timed, *now.counted)}
        self._models &= {whose for _, whose in now.timed} | {labels[0] for _, labels in now.counted}
        for call in self.noted:
            call(Moments(list(self._kept), self._store.bounds), gauges)

    def moments(self, gauges: Gauges) -> Moments:
        """All that is kept, and at the end what came since, with the *gauges* as they are."""
        return Moments([*self._kept, self._moment(self._totals(), gauges)], self._store.bounds)

    # within

    def _moment(self, now: "_Totals", gauges: Gauges) -> Moment:
        held = gauges.get(catalog.RUNNING), gauges.get(catalog.WAITING), gauges.get(catalog.KV_USAGE)
        running, waiting, usage = (series.values() if series else None for series in held)
        return Moment(
            self._clock(),
            self._lifecycle.up,
            self._lifecycle.phase,
            dict(_grown(self._before.timed, now.timed)),
            dict(_increased(self._before.counted, now.counted)),
            None if running is None else sum(running),
            None if waiting is None else sum(waiting),
            None if usage is None else max(usage),
        )

    def _totals(self) -> "_Totals":
        totals = _Totals()
        for family in _TIMED:
            for labels, buckets in self._store.histograms.get(family, {}).items():
                key = self._one_key(family, self._known(labels[0]))
                total, counts = totals.timed.get(key, (0.0, ()))
                told = buckets.counts()
                summed = tuple(map(int.__add__, counts, told)) if counts else told
                totals.timed[key] = total + buckets.sum, summed
        for family in _COUNTED:
            for labels, value in self._store.counters.get(family, {}).items():
                if family.labels[0] == "model":
                    labels = (self._known(labels[0]), *labels[1:])
                counter = self._one_key(family, labels)
                totals.counted[counter] = totals.counted.get(counter, 0.0) + value
        return totals

    def _one_key(self, family: Family, of: _Of) -> tuple[Family, _Of]:
        """The same object whenever it is asked for: thousands of them are kept."""
        key = family, of
        known: tuple[Family, _Of] = self._keys.setdefault(key, key)
        return known

    def _known(self, model: str) -> str:
        if model not in self._models:
            if len(self._models) >= _MODELS:
                return OTHER
            self._models.add(model)
        return model


@dataclass(slots=True)
class _Totals:
    timed: dict[tuple[Family, str], tuple[float, tuple[int, ...]]] = field(default_factory=dict)
    counted: dict[Key, float] = field(default_factory=dict)


Timed = Mapping[tuple[Family, str], tuple[float, tuple[int, ...]]]


def _grown(before: Timed, now: Timed) -> Iterator[tuple[tuple[Family, str], Tally]]:
    for key, (total, counts) in now.items():
        earlier, had = before.get(key, (0.0, ()))
        if not had or any(new < old for old, new in zip(had, counts, strict=True)):
            earlier, had = 0.0, (0,) * len(counts)  # born, or forgotten and born again
        if counts != had:
            yield key, Tally.of(map(int.__sub__, counts, had), total - earlier)


def _increased(before: Mapping[Key, float], now: Mapping[Key, float]) -> Iterator[tuple[Key, float]]:
    for key, value in now.items():
        earlier = before.get(key, 0.0)
        if value != earlier:
            yield key, value - earlier if value > earlier else value

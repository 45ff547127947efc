"""What is known now: the latest reading of each source, and the sidecar's own counters and histograms."""

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import accumulate

from exporter import catalog
from exporter.catalog import Family
from exporter.claims import EXACT_COUNTS, EXACT_VALUES, Claims
from exporter.concurrency import Levels
from exporter.signals import Labels, Origin, Reading, Sample
from exporter.untold import Untold

OTHER = "other"
_MAX_LABEL = 128


class Buckets:
    """Counts of observed values per upper bound. *bounds* ascend and leave out +Inf."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Add *count* observations of *value*; a value equal to a bound is at or below it."""
        self._counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def observe_all(self, values: Iterable[float]) -> None:
        """Add one observation of each of *values*."""
        bounds, counts, total = self.bounds, self._counts, self.sum
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self.sum = total

    def counts(self) -> tuple[int, ...]:
        """Count in each bucket, that above all bounds last."""
        return tuple(self._counts)

    def cumulative(self) -> list[int]:
        """Count at or below each bound, the count of all last."""
        return list(accumulate(self._counts))


class Store:
    """Readings are replaced whole; counters and histograms only grow, fed by what sources tell.

    Used from the event loop only. *cap* is the number of values one label of one family may have; further values
    become ``other`` and are counted. *lag* is how many seconds later than a page a log may be read. *levels* finds
    out at which concurrency a request was served; without it nothing is kept by concurrency. *untold* finds out which
    failed requests no error tells, which then are errors of the kind ``other``, and which an engine that is being
    stopped ends on purpose, which count as nothing.
    """

    def __init__(
        self,
        *,
        factor: float = 1.15,
        cap: int = 64,
        lag: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        levels: Levels | None = None,
        untold: Untold | None = None,
    ) -> None:
        self.claims = Claims(clock, lag + 0.4)
        self.wall = wall
        self.counters: dict[Family, dict[Labels, float]] = defaultdict(dict)
        self.histograms: dict[Family, dict[Labels, Buckets]] = defaultdict(dict)
        self.readings: dict[str, Reading] = {}
        self.last_success: dict[str, float] = {}
        self.last_error: dict[str, float] = {}
        self.fixed: dict[Family, dict[Labels, float]] = {}
        """Gauges that come from the settings and not from a source."""
        self.cap = cap
        self._levels = levels
        self._untold = untold
        self._values: dict[tuple[Family, str], set[str]] = defaultdict(set)
        self._capped: dict[tuple[Family, Labels], Labels] = {}
        self._bounds = {
            f: catalog.geometric(*f.bounds, max(factor, f.factor)) for f in catalog.FAMILIES if f.bounds is not None
        }

    # readings

    def publish(self, reading: Reading) -> None:
        """Replace what *reading.source* said last."""
        self.readings[reading.source] = reading
        if reading.ok:
            self.last_success[reading.source] = reading.at
        if self._levels is not None:
            if any(sample.family in catalog.DOING for sample in reading.samples):
                self._levels.told(self.gauges)
            for entry in self._levels.settle(self.gauges):
                labels = self._label_set(entry.family, entry.labels, reading.origin)
                if entry.family.kind == "histogram":
                    self._histogram(entry.family, labels).observe(entry.value, entry.count)
                else:
                    self._add(entry.family, labels, entry.value)
        for origin, requests in self._untold.due() if self._untold is not None else ():
            self._add(catalog.ERRORS, self._label_set(catalog.ERRORS, ("other",), origin), requests)
            self.last_error["other"] = self.wall()

    def gauges(self, *, up: bool = True) -> dict[Family, dict[Labels, float]]:
        """The gauges of all good readings; where two kinds of source tell the same, the more exact has it.

        The same is a family, or one of its label sets where they name different things (a limit, a dimension).
        While the engine is not *up*, what it is doing is unknown, whoever told it last.
        """
        best: dict[Family | tuple[Family, Labels], int] = {}
        merged = {family: dict(series) for family, series in self.fixed.items()}
        for reading in self.readings.values():
            rank = EXACT_COUNTS.index(reading.origin) if reading.origin in EXACT_COUNTS else 0
            for sample in reading.samples:
                family, labels = sample.family, sample.labels
                if family in catalog.DOING and not up:
                    continue
                same = (family, labels) if family.closed else family
                known = best.setdefault(same, rank)
                if rank < known and not family.closed:
                    merged[family] = {}
                if rank <= known:
                    best[same] = rank
                    merged.setdefault(family, {})[labels] = sample.value
        return merged

    def bounds(self, family: Family) -> tuple[float, ...]:
        """Upper bounds that a histogram's series have, without +Inf."""
        return self._bounds[family]

    # events

    def count(self, family: Family, labels: Labels, amount: float = 1.0, *, origin: Origin) -> None:
        """Add *amount* to a counter, if *origin* has the word on it. *labels* leave out ``source``."""
        untold = self._untold
        failed = family is catalog.REQUESTS and labels[1] == "error"
        if untold is not None and failed and untold.planned:
            return
        if untold is not None and family is catalog.ERRORS and labels[0] != "rejected":
            untold.told()  # also where another source has the word on it
        if self.claims.admits(_signal(family, labels), origin, EXACT_COUNTS, amount):
            labels = self._label_set(family, labels, origin)
            self._add(family, labels, amount)
            if family is catalog.ERRORS:
                self.last_error[labels[0]] = self.wall()
            elif failed and amount > 0 and untold is not None:
                untold.failed(amount, origin)
            elif family is catalog.TOKENS and self._levels is not None and labels[1] == "generation":
                self._levels.generated(labels[0], amount)

    def observe(
        self, family: Family, labels: Labels, value: float, count: int = 1, *, origin: Origin, ago: float | None = 0.0
    ) -> None:
        """Put *count* observations of *value* (seconds) into a histogram, if *origin* has the word on it.

        They were made *ago* seconds ago; if that is not known, None, they belong to no level of concurrency.
        """
        if self.claims.admits(_signal(family, labels), origin, EXACT_VALUES, count):
            labels = self._label_set(family, labels, origin)
            self._histogram(family, labels).observe(value, count)
            if family is catalog.LATENCY and self._levels is not None and ago is not None:
                self._levels.finished(labels[0], value, count, ago=ago)

    def count_all(self, family: Family, labels: Labels, amounts: Sequence[float], *, origin: Origin) -> None:
        """`count` for each of *amounts*."""
        signal = _signal(family, labels)
        if self.claims.owes(signal, origin) or family in (catalog.ERRORS, catalog.TOKENS) or labels[-1:] == ("error",):
            for amount in amounts:
                self.count(family, labels, amount, origin=origin)
        elif self.claims.admits(signal, origin, EXACT_COUNTS, sum(amounts)):
            series, labels = self.counters[family], self._label_set(family, labels, origin)
            total = series.get(labels, 0.0)
            for amount in amounts:  # one by one, so that it does not matter to the last digit how many come at once
                total += amount
            series[labels] = total

    def observe_all(self, family: Family, labels: Labels, values: Sequence[float], *, origin: Origin) -> None:
        """`observe` for each of *values*, made just now."""
        if self.claims.owes(_signal(family, labels), origin) or family is catalog.LATENCY:
            for value in values:
                self.observe(family, labels, value, origin=origin)
        elif self.claims.admits(_signal(family, labels), origin, EXACT_VALUES, len(values)):
            self._histogram(family, self._label_set(family, labels, origin)).observe_all(values)

    def expect(self, family: Family, labels: Labels, *, origin: Origin) -> bool:
        """Let a counter or histogram exist at 0: *origin* can tell it, though nothing has happened yet.

        True if another source told it until now.
        """
        order = EXACT_VALUES if family.kind == "histogram" else EXACT_COUNTS
        taken = self.claims.take(_signal(family, labels), origin, order)
        self.create(family, labels, origin=origin)
        return taken

    def create(self, family: Family, labels: Labels, *, origin: Origin) -> None:
        """Let a series exist at 0 without a word on who tells it."""
        labels = self._label_set(family, labels, origin)
        if family.kind == "histogram":
            self._histogram(family, labels)
        else:
            self.counters[family].setdefault(labels, 0.0)

    def set_total(self, family: Family, labels: Labels, total: float) -> None:
        """Set a counter about the sidecar itself to a total kept elsewhere."""
        self.counters[family][labels] = total

    def drop(self, family: Family, count: int = 1) -> None:
        """Count values that were left out."""
        series = self.counters[catalog.SERIES_DROPPED]
        series[(family.name,)] = series.get((family.name,), 0.0) + count

    def keep_models(self, models: Iterable[str]) -> None:
        """Forget the series of models that are served no longer."""
        keep = {*models, "", OTHER}
        for kept in (self.counters, self.histograms):
            for family, series in kept.items():
                if "model" in family.labels:
                    at = family.labels.index("model")
                    for labels in [s for s in series if s[at] not in keep]:
                        del series[labels]
        for (family, label), values in self._values.items():
            if label == "model":
                values &= keep
                self._capped = {k: v for k, v in self._capped.items() if k[0] is not family}

    # within

    def _add(self, family: Family, labels: Labels, amount: float) -> None:
        series = self.counters[family]
        series[labels] = series.get(labels, 0.0) + amount

    def _histogram(self, family: Family, labels: Labels) -> Buckets:
        series = self.histograms[family]
        if labels not in series:
            series[labels] = Buckets(self._bounds[family])
        return series[labels]

    def _label_set(self, family: Family, labels: Labels, origin: Origin) -> Labels:
        if family.labels[-1] == "source":
            labels = (*labels, origin)
        key = (family, labels)
        known = self._capped.get(key)
        if known is None:
            if len(labels) != len(family.labels):
                raise ValueError(f"{family.name} wants labels {family.labels}, got {labels}")
            known = tuple(self._cap_value(family, *pair) for pair in zip(family.labels, labels, strict=True))
            if known != labels:  # not remembered: what overflows has no end
                self.drop(family)
            else:
                self._capped[key] = known
        return known

    def _cap_value(self, family: Family, label: str, value: str) -> str:
        seen = self._values[family, label]
        if value not in seen:
            if len(seen) >= self.cap or len(value) > _MAX_LABEL or not value.isprintable():
                return OTHER
            seen.add(value)
        return value


_PARTED = {  # families of which a source has the word on one kind or outcome, not on all: where that label stands
    family: family.labels.index(label)
    for family in catalog.FAMILIES
    for label in ("kind", "outcome")
    if label in family.labels
}


def _signal(family: Family, labels: Labels) -> Hashable:
    """What a source has the word on: a family, or one kind or outcome of it; a share's two parts are one."""
    if family is catalog.COMMUNICATION:
        return catalog.STEP_SECONDS
    return (family, labels[_PARTED[family]]) if family in _PARTED else family


def gauge(family: Family, value: float, *labels: str) -> Sample:
    """A sample, written short."""
    return Sample(family, labels, value)

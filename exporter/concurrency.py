"""How many requests were in the engine while one was: the level of concurrency that its latency belongs to.

An engine tells at moments how many requests it holds. From one moment to the next that is taken to change evenly, so
the mean over a request's life is known as soon as the first moment after its end has come. It must be the whole life:
the last requests of an overload end when hardly any other is left, and their latency is not that of a calm engine.
A server that only logs its requests tells no such gauges; there the lives themselves show how many there were, once
all that overlap have ended.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

from exporter import catalog
from exporter.catalog import LEVELS, Family
from exporter.lifecycle import Lifecycle
from exporter.signals import Gauges, Labels

WARM_UP_REQUESTS = 20
WARM_UP_SECONDS = 60.0
LONGEST_GAP_SECONDS = 60.0
"""Between two moments; further apart, nothing is known of the time between them."""
_SHORTEST_GAP_SECONDS = 0.2
_MOMENTS = 4096
_LIVES = 20_000
_SETTLE_SECONDS = 1.0
_HOLD_SECONDS = 10.0
_HOLD_LIVES = 1.5  # times the longest life: in a queue that grows, the next one is hardly longer
_ROUNDING = math.log2(1.1)  # so much above a power is still that power: ends are read a moment late


def level(in_engine: float) -> str:
    """The concurrency label for so many requests: the next power of two, give or take a tenth; above 1024 ``inf``."""
    power = math.ceil(math.log2(max(1.0, in_engine)) - _ROUNDING)
    return LEVELS[min(power, len(LEVELS) - 1)]


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that belongs to a level: *count* observations of *value* for a histogram, else an increase."""

    family: Family
    labels: Labels
    value: float
    count: int = 1


@dataclass(frozen=True, slots=True)
class _Life:
    model: str
    begin: float
    end: float
    count: int
    warm: bool


class Moments:
    """A number that was told at moments, ascending, and changed evenly between them. Bounded; the oldest go first."""

    def __init__(self) -> None:
        self._at: list[float] = []
        self._areas: list[float] = []  # under the number, up to each moment
        self._value = 0.0

    @property
    def until(self) -> float:
        """The last moment; -inf before the first."""
        return self._at[-1] if self._at else -math.inf

    def add(self, at: float, value: float) -> tuple[float, float]:
        """*value* at the moment *at*; gives the seconds since the one before and the mean in them, else 0, 0."""
        seconds = at - self.until
        if not 0 < seconds <= LONGEST_GAP_SECONDS:
            self._at, self._areas, self._value = [at], [0.0], value
            return 0.0, 0.0
        mean = (self._value + value) / 2
        self._at.append(at)
        self._areas.append(self._areas[-1] + mean * seconds)
        self._value = value
        if len(self._at) > 2 * _MOMENTS:
            del self._at[:_MOMENTS], self._areas[:_MOMENTS]
        return seconds, mean

    def mean(self, begin: float, end: float) -> float | None:
        """Over that time; None if it is not known for all of it."""
        if not self._at or begin < self._at[0] or end > self._at[-1]:
            return None
        begin = min(begin, end - 1e-6)
        return (self._area(end) - self._area(begin)) / (end - begin)

    def _area(self, at: float) -> float:
        after = max(1, min(bisect_left(self._at, at), len(self._at) - 1))
        before = after - 1
        share = (at - self._at[before]) / (self._at[after] - self._at[before])
        return self._areas[before] + share * (self._areas[after] - self._areas[before])


@dataclass(slots=True)
class _Run:
    """One life of the engine."""

    life: int
    since: float | None = None  # it serves
    served: int = 0
    moments: Moments = field(default_factory=Moments)
    lives: deque[_Life] = field(default_factory=lambda: deque(maxlen=_LIVES))
    tokens: dict[str, float] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    settled_at: float = -math.inf
    judged: float = -math.inf  # lives that ended until then
    began: float = -math.inf

    @property
    def known_since(self) -> float:
        """What ended before may not have been seen, or is gone already."""
        return max(self.began, self.moments.until)

    def is_warm(self, now: float) -> bool:
        return self.since is not None and self.served >= WARM_UP_REQUESTS and now - self.since >= WARM_UP_SECONDS


class Levels:
    """Gathers what happens in the engine and gives it back by level, a moment later.

    What an engine does in the first 20 requests and the first 60 seconds after its start, whichever ends later, is
    its warm-up and belongs to no level. *clock* gives seconds.
    """

    def __init__(self, lifecycle: Lifecycle, clock: Callable[[], float]) -> None:
        self._lifecycle = lifecycle
        self._clock = clock
        self._run = _Run(lifecycle.lives, began=clock())

    def finished(self, model: str, seconds: float, count: int, *, ago: float = 0.0) -> None:
        """*count* requests ended *ago* seconds ago that had taken so many *seconds* each."""
        run, now = self._present()
        run.lives.append(_Life(model, now - ago - seconds, now - ago, count, run.is_warm(now)))
        run.served += count

    def generated(self, model: str, tokens: float) -> None:
        """So many tokens of answers have come since the last moment."""
        run, now = self._present()
        if run.is_warm(now):
            run.tokens[model] = run.tokens.get(model, 0.0) + tokens

    def told(self, gauges: Callable[[], Gauges]) -> None:
        """The engine has told how many requests it holds: *gauges* has it."""
        run, now = self._present()
        if now - run.moments.until < _SHORTEST_GAP_SECONDS:
            return
        known = gauges()
        held = [known.get(family, {}) for family in (catalog.RUNNING, catalog.WAITING)]
        if not any(held):
            return
        seconds, mean = run.moments.add(now, sum(chain.from_iterable(series.values() for series in held)))
        if run.is_warm(now) and seconds:
            config = self._lifecycle.config(known)
            for model in {labels[0] for series in held for labels in series} | run.tokens.keys():
                labels = (model, config, level(mean))
                # moments fall into busy times as often as the engine is busy: so many of the seconds count
                run.entries += [
                    Entry(catalog.SECONDS_BY_CONCURRENCY, labels, seconds * min(1.0, mean)),
                    Entry(catalog.TOKENS_BY_CONCURRENCY, labels, run.tokens.get(model, 0.0)),
                    Entry(catalog.LATENCY_BY_CONCURRENCY, labels, 0.0, 0),  # is there at 0 before the first ends
                ]
        run.tokens.clear()

    def settle(self, gauges: Callable[[], Gauges]) -> Iterator[Entry]:
        """What has come to belong to a level since the last call."""
        run, now = self._present()
        due: list[tuple[_Life, float]] = []
        if now - run.moments.until <= LONGEST_GAP_SECONDS:
            due = list(_by_moments(run))
        elif now - run.settled_at >= _SETTLE_SECONDS:
            run.settled_at = now
            due = list(_by_lives(run, now))
        entries, run.entries = run.entries, []
        yield from entries
        if due:
            config = self._lifecycle.config(gauges())
            for life, mean in due:
                labels = (life.model, config, level(mean))
                yield Entry(catalog.LATENCY_BY_CONCURRENCY, labels, life.end - life.begin, life.count)

    def _present(self) -> tuple[_Run, float]:
        if self._lifecycle.lives != self._run.life:
            self._run = _Run(self._lifecycle.lives, began=self._clock())
        now = self._clock()
        if self._run.since is None and self._lifecycle.phase == "serving":
            self._run.since = now
        return self._run, now


def _by_moments(run: _Run) -> Iterator[tuple[_Life, float]]:
    while run.lives and run.lives[0].end <= run.moments.until:
        life = run.lives.popleft()
        mean = run.moments.mean(life.begin, life.end)
        if life.warm and mean is not None:
            yield life, mean


def _by_lives(run: _Run, now: float) -> Iterator[tuple[_Life, float]]:
    """Those of which all is known that they overlap: no later end can, and what ended before was seen."""
    longest = max((life.end - life.begin for life in run.lives), default=0.0)
    hold = max(_HOLD_SECONDS, _HOLD_LIVES * longest)
    judged, run.judged = run.judged, max(run.judged, now - hold)
    area = _area_of(run.lives)
    for life in run.lives:
        if judged < life.end <= run.judged and life.warm and life.end > life.begin and life.begin >= run.known_since:
            yield life, (area(life.end) - area(life.begin)) / (life.end - life.begin)
    while run.lives and run.lives[0].end < run.judged - hold:
        run.lives.popleft()


class _Past:
    """Moments, each with how many things happened then."""

    def __init__(self, moments: Iterable[tuple[float, int]]) -> None:
        happened = sorted(moments)
        self._at = [at for at, _ in happened]
        self._counts = list(accumulate((n for _, n in happened), initial=0))
        self._sums = list(accumulate((at * n for at, n in happened), initial=0.0))

    def seconds_until(self, at: float) -> float:
        """The time that has gone by since each of those that happened before, all together."""
        n = bisect_left(self._at, at)
        return self._counts[n] * at - self._sums[n]


def _area_of(lives: Sequence[_Life]) -> Callable[[float], float]:
    """The time that all *lives* together have lasted up to a moment."""
    zero = lives[0].begin if lives else 0.0  # large numbers would cost digits
    begun = _Past((life.begin - zero, life.count) for life in lives)
    ended = _Past((life.end - zero, life.count) for life in lives)

    def area(at: float) -> float:
        return begun.seconds_until(at - zero) - ended.seconds_until(at - zero)

    return area

"""Finer histograms from an engine's coarse ones, by the exact counts and sum of what came between two polls.

The values of a window lie in their coarse buckets and add up to the window's sum; how they spread between is told by
a *shape*, other values that ought to be spread like them. Both are put in order and go together, the lowest with the
lowest; each value is the shape's less one offset, or the end of its bucket if that is beyond it. The offset is the one
that makes the total right. So counts per coarse bucket stay exact, and so does the sum; a window with a single request
gives its very value; and without a shape the values are as near to one another as their buckets allow.

Where it is known how much the shape's values are larger at *least*, and the total asks for a smaller offset, the window
holds more of the shape's high values than its share: each value then goes with a higher one, until the offset is right.
One late request among two is so told from two that were a little late.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

_TOLERANCE = 1e-6
_INSIDE = 1e-9  # a value at the lower end of a bucket belongs to the bucket below
PARTS = 32  # of one bucket and window, at most: more values than this go in groups
_HIGHEST = 3.0  # exponent, to which values go with higher ones: the middle of two with the highest of a million
_HALVINGS = 8

Placed = Sequence[tuple[float, float]]
"""Values in seconds, each with how many there are of it; in a shape that need not be a whole number."""


@dataclass(frozen=True, slots=True)
class Window:
    """What came between two polls of one histogram: *counts* per coarse bucket (the last is above *bounds*)."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def width(self) -> float:
        """Mean width of the buckets that the values are in, in seconds; that without an upper bound has no end."""
        ends = zip((0.0, *self.bounds), (*self.bounds, math.inf), self.counts, strict=True)
        return sum(n * (high - low) for low, high, n in ends if n > 0) / (sum(self.counts) or 1)


@dataclass(frozen=True, slots=True)
class _Group:
    """Some of the values of one bucket."""

    low: float
    high: float
    count: int


def values(
    window: Window,
    longest: float = math.inf,
    shape: Placed | None = None,
    least: float | None = None,
    parts: int = PARTS,
) -> list[tuple[float, int]] | None:
    """Fine values for *window*, spread like *shape*; None if it cannot be true and must be dropped.

    That is: a negative count or sum, a sum that the buckets do not allow, or a mean above *longest* seconds
    (some engines subtract clock readings that were never taken, and report the uptime of the host).
    Values of one bucket beyond so many *parts* go in groups.
    """
    total = sum(window.counts)
    if min(window.counts, default=0) < 0 or not math.isfinite(window.sum) or window.sum < 0:
        return None
    if total == 0:
        return [] if window.sum <= _TOLERANCE else None
    if window.sum / total > longest:
        return None
    buckets = list(_buckets(window))
    lowest = sum(n * low for low, _, n in buckets)
    highest = sum(n * high for _, high, n in buckets)
    slack = _TOLERANCE * max(1.0, window.sum)
    if not lowest - slack <= window.sum <= highest + slack:
        return None
    parts = parts if shape else 1
    groups = [
        _Group(low + _INSIDE * (high - low), high, count) for low, high, n in buckets for count in _split(n, parts)
    ]
    if not shape or total == 1:
        return _less(groups, [0.0] * len(groups), window.sum)
    if least is None:
        return _less(groups, _along(shape, groups)(1.0), window.sum)
    return _less(groups, _late_enough(groups, _along(shape, groups), least, window.sum), window.sum)


def even(window: Window, share: float, most: int) -> Placed:
    """A shape: the values of each bucket spread evenly, over so much of it as *share* says; *most* are distinct."""
    return [
        (share * (low + (high - low) * (i + 0.5) / parts), n / parts)
        for low, high, n in _buckets(window)
        if n > 0
        for parts in (min(n, most),)
        for i in range(parts)
    ]


def _buckets(window: Window) -> Iterable[tuple[float, float, int]]:
    """Both ends of each bucket, and its count; the one without an upper bound ends as far off as the sum needs."""
    highest = window.bounds[-1] if window.bounds else 0.0
    end = highest + max(highest, window.sum / max(window.counts[-1], 1))
    return zip((0.0, *window.bounds), (*window.bounds, end), window.counts, strict=True)


def _split(n: int, parts: int) -> Iterable[int]:
    """*n* as the sum of at most so many numbers, as equal as may be."""
    parts = min(n, parts)
    return ((n * (i + 1)) // parts - (n * i) // parts for i in range(parts))


def _along(shape: Placed, groups: Sequence[_Group]) -> Callable[[float], list[float]]:
    """The value of *shape* at the rank of each group's middle; with a *power* above 1 at a higher rank."""
    shape = sorted(shape)
    ranks = list(accumulate(n for _, n in shape))
    end, last = ranks[-1], len(ranks) - 1
    count = sum(group.count for group in groups)
    ends = accumulate(group.count for group in groups)
    above = [1 - (end - group.count / 2) / count for end, group in zip(ends, groups, strict=True)]

    def spread(power: float) -> list[float]:
        return [shape[min(bisect_left(ranks, (1 - part**power) * end), last)][0] for part in above]

    return spread


def _late_enough(
    groups: Sequence[_Group], along: Callable[[float], list[float]], least: float, total: float
) -> list[float]:
    """The groups' values, as high as they must be for *least* to be taken off and *total* to be left."""

    def enough(spread: list[float]) -> bool:
        pairs = zip(spread, groups, strict=True)
        return sum(min(max(value - least, g.low), g.high) * g.count for value, g in pairs) >= total

    usual, high = along(1.0), along(math.exp(_HIGHEST))
    if enough(usual) or not enough(high):
        return usual
    low_power, high_power = 0.0, _HIGHEST
    for _ in range(_HALVINGS):
        power = (low_power + high_power) / 2
        spread = along(math.exp(power))
        if enough(spread):
            high_power, high = power, spread
        else:
            low_power = power
    return high


def _less(groups: Sequence[_Group], spread: Sequence[float], total: float) -> list[tuple[float, int]]:
    """*spread* less the one offset with which the groups, each kept in its bucket, add up to *total*."""
    if len(groups) == 1:
        (only,) = groups
        return [(min(max(total / only.count, only.low), only.high), only.count)]
    turns = []  # the offsets from which on a group is below the end of its bucket, and those from which on at its start
    left = 0.0
    for value, group in zip(spread, groups, strict=True):
        turns.append((value - group.high, group.count))
        turns.append((value - group.low, -group.count))
        left += group.high * group.count
    turns.sort()
    offset, moving = turns[0][0], 0
    for turn, count in turns:
        after = left - moving * (turn - offset)
        if after <= total:
            offset = offset + (left - total) / moving if moving and left > total else offset
            break
        left, offset = after, turn
        moving += count
    return [(min(max(v - offset, g.low), g.high), g.count) for v, g in zip(spread, groups, strict=True)]

"""Finer histograms from an engine's coarse ones, by the exact counts and sum of what came between two polls.

The values of a window lie in their coarse buckets and add up to the window's sum; how they spread between is told by
a *shape*, other values that ought to be spread like them. Both are put in order and go together, the lowest with the
lowest; each value is the shape's less one offset, or the end of its bucket if that is beyond it. The offset is the one
that makes the total right. So counts per coarse bucket stay exact, and so does the sum; a window with a single request
gives its very value; and without a shape the values are as near to one another as their buckets allow.

The shape of a queue wait are the times to first token of the requests that may be ending now: less the time that
serving takes, which is the offset, they are the waits, and who did not wait is at 0. That of other times are the last
of their own.
"""

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

_TOLERANCE = 1e-6
_INSIDE = 1e-9  # a value at the lower end of a bucket belongs to the bucket below
_PARTS = 32  # of one bucket and window, at most: more values than this go in groups
_STEPS = 64  # halvings, until the offset is as exact as a float

Placed = list[tuple[float, int]]
"""Values in seconds, each with how many there are of it."""


@dataclass(frozen=True, slots=True)
class Window:
    """What came between two polls of one histogram: *counts* per coarse bucket (the last is above *bounds*)."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


class Recent:
    """The last values of one histogram, poll by poll."""

    def __init__(self, most: int = 4096) -> None:
        self._polls: deque[tuple[Placed, int]] = deque()
        self._most = most
        self._count = 0

    def add(self, placed: Placed) -> None:
        """Those of one more poll."""
        self._polls.append((placed, sum(n for _, n in placed)))
        self._count += self._polls[-1][1]
        while self._count - self._polls[0][1] >= self._most:
            self._count -= self._polls.popleft()[1]

    def last(self, count: float) -> Placed:
        """So many, or a few more: whole polls, the newest first."""
        found: Placed = []
        for placed, n in reversed(self._polls):
            if count <= 0:
                break
            found += placed
            count -= n
        return found


def values(window: Window, longest: float = math.inf, shape: Placed | None = None) -> Placed | None:
    """Fine values for *window*, spread like *shape*; None if it cannot be true and must be dropped.

    That is: a negative count or sum, a sum that the buckets do not allow, or a mean above *longest* seconds
    (some engines subtract clock readings that were never taken, and report the uptime of the host).
    """
    total = sum(window.counts)
    if min(window.counts, default=0) < 0 or not math.isfinite(window.sum) or window.sum < 0:
        return None
    if total == 0:
        return [] if window.sum <= _TOLERANCE else None
    if window.sum / total > longest:
        return None
    lows = (0.0, *window.bounds)
    highs = (*window.bounds, _open_end(window))
    least = sum(n * low for n, low in zip(window.counts, lows, strict=True))
    most = sum(n * high for n, high in zip(window.counts, highs, strict=True))
    slack = _TOLERANCE * max(1.0, window.sum)
    if not least - slack <= window.sum <= most + slack:
        return None
    parts = 1 if not shape else _PARTS
    groups = [
        _Group(low + _INSIDE * (high - low), high, count)
        for n, low, high in zip(window.counts, lows, highs, strict=True)
        for count in _split(n, parts)
    ]
    spread = _along(shape, groups) if shape else [0.0] * len(groups)
    return _shifted(groups, spread, window.sum)


@dataclass(frozen=True, slots=True)
class _Group:
    """Some of the values of one bucket."""

    low: float
    high: float
    count: int


def _split(n: int, parts: int) -> Iterable[int]:
    """*n* as the sum of at most so many numbers, as equal as may be."""
    parts = min(n, parts)
    return ((n * (i + 1)) // parts - (n * i) // parts for i in range(parts))


def _along(shape: Placed, groups: Sequence[_Group]) -> list[float]:
    """The value of *shape* at the rank of each group's middle."""
    shape = sorted(shape)
    ranks = list(accumulate(n for _, n in shape))
    scale = ranks[-1] / sum(group.count for group in groups)
    ends = accumulate(group.count for group in groups)
    middles = ((end - group.count / 2) * scale for end, group in zip(ends, groups, strict=True))
    return [shape[bisect_left(ranks, middle)][0] for middle in middles]


def _shifted(groups: Sequence[_Group], spread: Sequence[float], total: float) -> Placed:
    """*spread* less the one offset with which the groups, each kept in its bucket, add up to *total*."""

    rows = [(value, group.low, group.high, group.count) for value, group in zip(spread, groups, strict=True)]
    least = min(value - high for value, _, high, _ in rows)
    most = max(value - low for value, low, _, _ in rows)
    for _ in range(_STEPS):
        offset = (least + most) / 2
        if sum(min(max(value - offset, low), high) * n for value, low, high, n in rows) > total:
            least = offset
        else:
            most = offset
    return [(min(max(value - most, low), high), n) for value, low, high, n in rows]


def _open_end(window: Window) -> float:
    """Where the bucket without an upper bound ends: as far as the sum needs."""
    lowest = window.bounds[-1] if window.bounds else 0.0
    return lowest + max(lowest, window.sum / max(window.counts[-1], 1))

"""Finer histograms from an engine's coarse ones, by the exact counts and sum of what came between two polls.

The values of a window lie in their coarse buckets and add up to the window's sum. So every observation of bucket
i is placed at lo_i + f * (hi_i - lo_i), with the one f in 0..1 that makes the total right. Counts per coarse
bucket stay exact, and so does the sum; a window with a single request gives its very value.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

_TOLERANCE = 1e-6
_INSIDE = 1e-9  # a value at the lower end of a bucket belongs to the bucket below


@dataclass(frozen=True, slots=True)
class Window:
    """What came between two polls of one histogram: *counts* per coarse bucket (the last is above *bounds*)."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


def values(window: Window, longest: float = math.inf) -> Iterator[tuple[float, int]] | None:
    """(value, how many) pairs in seconds for *window*; None if it cannot be true and must be dropped.

    That is: a negative count or sum, a sum that the buckets do not allow, or a mean above *longest* seconds
    (some engines subtract clock readings that were never taken, and report the uptime of the host).
    """
    total = sum(window.counts)
    if min(window.counts, default=0) < 0 or not math.isfinite(window.sum) or window.sum < 0:
        return None
    if total == 0:
        return iter(()) if window.sum <= _TOLERANCE else None
    if window.sum / total > longest:
        return None
    lows = (0.0, *window.bounds)
    highs = (*window.bounds, _open_end(window))
    least = sum(n * low for n, low in zip(window.counts, lows, strict=True))
    most = sum(n * high for n, high in zip(window.counts, highs, strict=True))
    slack = _TOLERANCE * max(1.0, window.sum)
    if not least - slack <= window.sum <= most + slack:
        return None
    share = (window.sum - least) / (most - least) if most > least else 0.0
    share = min(1.0, max(_INSIDE, share))
    return ((low + share * (high - low), n) for n, low, high in zip(window.counts, lows, highs, strict=True) if n)


def _open_end(window: Window) -> float:
    """Where the bucket without an upper bound ends: as far as the sum needs."""
    lowest = window.bounds[-1] if window.bounds else 0.0
    return lowest + max(lowest, window.sum / max(window.counts[-1], 1))

"""Quantiles of few samples, and how far they can be trusted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """Where the true quantile lies, in the unit of the samples; *high* is infinite where too few samples bound it."""

    low: float
    high: float


def quantile(values: Sequence[float], q: float) -> float:
    """The *q* quantile, by the midpoints of ranks (Hyndman and Fan's type 5); nan without values.

    Between two values in proportion; if one of the two is infinite, so is the quantile.
    """
    if not values:
        return math.nan
    ordered, count = sorted(values), len(values)
    position = min(max(q * count - 0.5, 0.0), count - 1.0)
    low, part = int(position), position % 1
    return ordered[low] if part < 1e-9 else ordered[low] * (1 - part) + ordered[low + 1] * part


def interval(values: Sequence[float], q: float, confidence: float = CONFIDENCE) -> Interval:
    """Holds the true *q* quantile with this confidence, whatever the values are distributed like.

    How many of n independent values lie below the true quantile is binomial(n, q), so two order statistics bound it.
    Without a rank that is sure enough the bound is 0 or infinity. (Hahn and Meeker, Statistical Intervals, 5.2)
    """
    ordered, count = sorted(values), len(values)
    tail = (1 - confidence) / 2
    below = _cumulative(count, q)
    lows = [k for k in range(1, count + 1) if below[k - 1] <= tail]
    highs = [k for k in range(1, count + 1) if below[k - 1] >= 1 - tail]
    return Interval(ordered[lows[-1] - 1] if lows else 0.0, ordered[highs[0] - 1] if highs else math.inf)


def enough(q: float, confidence: float = CONFIDENCE) -> int:
    """How many samples it takes until the interval of the *q* quantile is bounded on both sides."""
    return math.ceil(math.log((1 - confidence) / 2) / math.log(max(q, 1 - q)))


def mean(values: Sequence[float]) -> float:
    """nan without values."""
    return math.fsum(values) / len(values) if values else math.nan


def _cumulative(count: int, q: float) -> list[float]:
    """P(X <= k) for k = 0 … count, X binomial(count, q)."""
    total, out = 0.0, []
    for k in range(count + 1):
        log = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        total += math.exp(log + k * math.log(q) + (count - k) * math.log1p(-q))
        out.append(min(total, 1.0))
    return out

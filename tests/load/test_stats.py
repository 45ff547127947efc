"""Quantiles of few samples and how sure they are."""

import math
from random import Random

import pytest

from exporter.load.stats import Interval, enough, interval, mean, quantile


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ([], 0.99, math.nan),
        ([3.0], 0.01, 3.0),
        ([3.0], 0.99, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.5),
        ([5.0, 1.0, 4.0, 2.0, 3.0], 0.5, 3.0),
        ([float(n) for n in range(1, 101)], 0.99, 99.5),
        ([float(n) for n in range(1, 201)], 0.99, 198.5),
        ([float(n) for n in range(1, 201)], 1.0, 200.0),
    ],
)
def test_quantile(values: list[float], q: float, expected: float) -> None:
    assert quantile(values, q) == pytest.approx(expected, nan_ok=True)


def test_a_quantile_that_touches_a_failed_request_is_infinite() -> None:
    values = [1.0] * 198 + [math.inf] * 2
    assert quantile(values, 0.99) == math.inf
    assert quantile(values, 0.95) == 1.0
    assert quantile([1.0] * 199 + [math.inf], 0.99) == 1.0


def test_the_interval_is_the_one_of_the_tables() -> None:
    """Of 100 values the median lies, with 95 % confidence, between the 40th and the 61st: a standard table."""
    assert interval([float(n) for n in range(1, 101)], 0.5) == Interval(40.0, 61.0)


def test_few_samples_do_not_bound_p99_from_above() -> None:
    assert interval([float(n) for n in range(1, 201)], 0.99).high == math.inf
    assert enough(0.99) == 368
    assert interval([float(n) for n in range(367)], 0.99).high == math.inf
    assert interval([float(n) for n in range(368)], 0.99).high == 367.0
    assert interval([1.0], 0.5) == Interval(0.0, math.inf)


def test_the_interval_holds_the_true_p99_as_often_as_it_says() -> None:
    random = Random(1)
    true = -math.log(0.01)
    held = 0
    for _ in range(1000):
        found = interval([random.expovariate(1.0) for _ in range(400)], 0.99)
        held += found.low <= true <= found.high
    assert 950 <= held <= 999


def test_mean() -> None:
    assert mean([1.0, 2.0, 6.0]) == 3.0
    assert math.isnan(mean([]))

"""Fine values from coarse counts: counts per bucket and the sum stay exact, nonsense is dropped."""

import math
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.refine import Window, values

VLLM = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)


def window(bounds: tuple[float, ...], observed: list[float]) -> Window:
    counts = [0] * (len(bounds) + 1)
    for value in observed:
        counts[bisect_left(bounds, value)] += 1
    return Window(bounds, tuple(counts), math.fsum(observed))


@given(
    st.sampled_from([VLLM, (0.0, 0.001, 0.1, 1.0), (), (1.0,)]),
    st.lists(st.floats(1e-6, 5000.0, allow_nan=False), min_size=1, max_size=50),
)
def test_counts_per_coarse_bucket_and_the_sum_are_exact(bounds: tuple[float, ...], observed: list[float]) -> None:
    coarse = window(bounds, observed)
    placed = values(coarse)
    assert placed is not None
    pairs = list(placed)
    again = [0] * (len(bounds) + 1)
    for value, count in pairs:
        again[bisect_left(bounds, value)] += count
    assert tuple(again) == coarse.counts
    assert math.fsum(v * n for v, n in pairs) == pytest.approx(coarse.sum, rel=1e-6, abs=1e-6)


@given(st.floats(1e-6, 1000.0))
def test_a_single_request_gives_its_very_value(value: float) -> None:
    placed = values(window(VLLM, [value]))
    assert placed is not None
    assert list(placed) == [(pytest.approx(value, rel=1e-6), 1)]


@pytest.mark.parametrize(
    "bad",
    [
        Window((0.3,), (-1, 2), 0.5),
        Window((0.3,), (1, 0), -0.1),
        Window((0.3,), (2, 0), 0.9),
        Window((0.3,), (0, 2), 0.5),
        Window((0.3,), (0, 1), 600_000.0),
        Window((0.3,), (1, 0), math.nan),
        Window((0.3,), (0, 1), math.inf),
        Window((0.3,), (0, 0), 1.0),
    ],
    ids=["fall", "negative-sum", "sum-above", "sum-below", "uptime", "nan", "infinite", "sum-of-nothing"],
)
def test_a_window_that_cannot_be_true_is_dropped(bad: Window) -> None:
    assert values(bad, longest=86_400.0) is None


def test_an_empty_window_gives_nothing() -> None:
    placed = values(Window((0.3,), (0, 0), 0.0))
    assert placed is not None
    assert list(placed) == []


def test_a_wait_below_the_floor_is_seen() -> None:
    """vLLM's buckets begin at 0.3 s: natively 2 ms and 290 ms are the same P99 of 0.297 s."""
    fast, slow = values(window(VLLM, [0.002])), values(window(VLLM, [0.004]))
    assert fast is not None
    assert slow is not None
    assert (next(fast)[0], next(slow)[0]) == (pytest.approx(0.002), pytest.approx(0.004))

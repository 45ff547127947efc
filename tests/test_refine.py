"""Fine values from coarse counts: counts per bucket and the sum stay exact, nonsense is dropped."""

import math
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.refine import Placed, Window, even, values

VLLM = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0)


def window(bounds: tuple[float, ...], observed: list[float]) -> Window:
    counts = [0] * (len(bounds) + 1)
    for value in observed:
        counts[bisect_left(bounds, value)] += 1
    return Window(bounds, tuple(counts), math.fsum(observed))


SECONDS = st.floats(1e-6, 5000.0, allow_nan=False)
SHAPE = st.lists(st.tuples(st.floats(0.0, 5000.0), st.floats(0.01, 1000.0)), max_size=20)
LEAST = st.none() | st.floats(0.0, 5000.0)


@given(
    st.sampled_from([VLLM, (0.0, 0.001, 0.1, 1.0), (), (1.0,)]),
    st.lists(SECONDS, min_size=1, max_size=50),
    SHAPE,
    LEAST,
    st.integers(1, 100),
)
def test_counts_per_coarse_bucket_and_the_sum_are_exact_whatever_the_shape(
    bounds: tuple[float, ...], observed: list[float], shape: Placed, least: float | None, times: int
) -> None:
    coarse = window(bounds, observed * times)
    placed = values(coarse, shape=shape, least=least)
    assert placed is not None
    again = [0] * (len(bounds) + 1)
    for value, count in placed:
        again[bisect_left(bounds, value)] += count
    assert tuple(again) == coarse.counts
    assert math.fsum(v * n for v, n in placed) == pytest.approx(coarse.sum, rel=1e-6, abs=1e-6)


@given(st.lists(st.integers(-5, 20), min_size=3, max_size=3), st.floats(), SHAPE, LEAST)
def test_a_window_is_placed_within_its_buckets_or_dropped(
    counts: list[int], total: float, shape: Placed, least: float | None
) -> None:
    placed = values(Window((0.3, 1.0), tuple(counts), total), longest=86_400.0, shape=shape, least=least)
    possible = min(counts) >= 0 and 0.3 * counts[1] + counts[2] <= total <= 86_400.0 * sum(counts)
    possible = possible and (counts[2] > 0 or total <= 0.3 * counts[0] + counts[1])
    if placed is None:
        assert not possible
    else:
        assert sum(n for _, n in placed) == sum(counts)
        assert sum(v * n for v, n in placed) == pytest.approx(total, rel=1e-5, abs=1e-5)


@given(st.floats(1e-6, 1000.0), SHAPE, LEAST)
def test_a_single_request_gives_its_very_value(value: float, shape: Placed, least: float | None) -> None:
    placed = values(window(VLLM, [value]), shape=shape, least=least)
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
    assert (fast[0][0], slow[0][0]) == (pytest.approx(0.002), pytest.approx(0.004))


def test_without_a_shape_values_are_as_near_to_one_another_as_their_buckets_allow() -> None:
    placed = values(window(VLLM, [2.1, 2.2, 2.6]))
    assert placed == [(pytest.approx(2.2, rel=1e-6), 2), (pytest.approx(2.5, rel=1e-6), 1)]


def test_who_waited_is_told_from_who_did_not_by_the_first_tokens() -> None:
    """Three had their first token at once and one late: the wait is that one's, not a quarter of it each one's."""
    placed = values(window(VLLM, [0.0001, 0.0001, 0.0001, 0.2]), shape=[(0.05, 1), (0.06, 2), (0.27, 1)])
    assert placed is not None
    assert [v for v, _ in placed] == pytest.approx([0, 0, 0, 0.2], abs=1e-3)


def test_the_offset_of_a_standing_queue_is_the_time_of_service() -> None:
    placed = values(window(VLLM, [6.0, 7.0, 8.0]), shape=[(6.4, 1), (7.4, 1), (8.4, 1)])
    assert placed == [(pytest.approx(wait), 1) for wait in (6.0, 7.0, 8.0)]


def test_many_values_of_one_bucket_go_in_groups() -> None:
    placed = values(window(VLLM, [0.1] * 100_000), shape=[(n / 1000, 1) for n in range(200)])
    assert placed is not None
    assert len(placed) <= 32
    assert sum(n for _, n in placed) == 100_000


def test_one_who_waited_long_is_told_from_two_who_waited_a_little() -> None:
    """Of a hundred that may be ending one waited; where less than 50 ms of service cannot be, it is among these two."""
    shape = [(0.06, 99), (0.3, 1)]
    placed = values(window(VLLM, [0.0001, 0.24]), shape=shape, least=0.05)
    assert placed is not None
    assert [v for v, _ in placed] == pytest.approx([0, 0.24], abs=0.01)
    shared = values(window(VLLM, [0.0001, 0.24]), shape=shape)
    assert shared is not None
    assert [v for v, _ in shared] == pytest.approx([0.12, 0.12], abs=0.01)


def test_where_the_shape_has_nothing_late_enough_it_is_used_as_it_is() -> None:
    placed = values(window(VLLM, [6.0, 7.0]), shape=[(5.1, 1), (6.1, 1)], least=1.0)
    assert placed == [(pytest.approx(6.0), 1), (pytest.approx(7.0), 1)]


def test_an_even_shape_is_within_the_first_part_of_each_bucket() -> None:
    assert even(Window((1.0, 2.0), (2, 100, 0), 150.0), 0.5, 2) == [(0.125, 1), (0.375, 1), (0.625, 50), (0.875, 50)]


def test_the_offset_is_exact_whatever_the_number_of_buckets() -> None:
    observed = [0.001 * n for n in range(1, 2000)]
    placed = values(window(tuple(n / 10 for n in range(1, 15)), observed), shape=[(n / 7, 1.5) for n in range(30)])
    assert placed is not None
    assert math.fsum(v * n for v, n in placed) == pytest.approx(math.fsum(observed), rel=1e-12)

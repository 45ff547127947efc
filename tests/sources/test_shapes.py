"""Waits and latencies are spread by the first tokens of those who end now, where the page tells when these were."""

import math
from bisect import bisect_left

import pytest

from exporter import catalog
from exporter.refine import Window
from exporter.sources.shapes import Ended, Shapes

BOUNDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0)
LABELS = ("m",)


def window(observed: list[float], bounds: tuple[float, ...] = BOUNDS) -> Window:
    counts = [0] * (len(bounds) + 1)
    for value in observed:
        counts[bisect_left(bounds, value)] += 1
    return Window(bounds, tuple(counts), math.fsum(observed))


def place(waits: list[float], decode: list[float] | None) -> list[float]:
    """Waits as told at the ninth poll; in the fourth second two of three had their first token late, else none."""
    shapes = Shapes()
    shapes.turn(0.0)
    for second in range(1, 10):
        shapes.turn(float(second))
        late = 0.29 if second == 4 else 0.06
        shapes.place(catalog.FIRST_TOKEN, LABELS, "0", window([0.06, late, late]), math.inf, 30.0)
    ended = None if decode is None else Ended(window(decode), 0.05)
    placed = shapes.place(catalog.QUEUE_WAIT, LABELS, "0", window(waits), math.inf, 30.0, ended)
    assert placed is not None
    return [v for v, n in placed for _ in range(n)]


def test_the_first_tokens_are_those_of_when_it_was() -> None:
    """Of two one had its first token in the fourth second, and waited."""
    assert place([0.0001, 0.2], [0.1, 4.9]) == pytest.approx([0, 0.2], abs=0.03)


@pytest.mark.parametrize(
    ("decode", "told"),
    [
        pytest.param(tuple(n / 2 for n in range(1, 20)), [5.2, 8.16], id="closely"),
        pytest.param(BOUNDS, [6.68, 6.68], id="no-closer-than-the-latency-itself"),
    ],
)
def test_a_latency_is_the_first_token_and_what_has_passed_since(decode: tuple[float, ...], told: list[float]) -> None:
    """Of two in one bucket one had its first token in the first second and the other, late, in the sixth."""
    shapes = Shapes()
    shapes.turn(0.0)
    for second in range(1, 10):
        shapes.turn(float(second))
        first = {1: [0.06], 6: [1.4]}.get(second, [])
        shapes.place(catalog.FIRST_TOKEN, LABELS, "0", window(first), math.inf, 2.0)
    ended = Ended(window([8.1, 3.8], decode))
    placed = shapes.place(catalog.LATENCY, LABELS, "0", window([8.16, 5.2]), math.inf, 2.0, ended)
    assert placed is not None
    assert sorted(v for v, n in placed for _ in range(n)) == pytest.approx(told, abs=0.3)
    assert math.fsum(value * n for value, n in placed) == pytest.approx(13.36)


def test_without_decode_times_the_last_first_tokens_count() -> None:
    assert place([0.1, 0.1], None) == pytest.approx([0.1, 0.1], abs=0.03)


@pytest.mark.parametrize("decode", [[9000.0, 9000.0], []], ids=["before-all-that-is-known", "none"])
def test_where_no_first_token_is_known_of_then_the_last_count(decode: list[float]) -> None:
    assert math.fsum(place([0.1, 0.1], decode)) == pytest.approx(0.2)


def test_nothing_is_placed_before_a_first_token_was_seen() -> None:
    shapes = Shapes()
    shapes.turn(1.0)
    shapes.turn(2.0)
    ended = Ended(window([1.2, 0.7]), -1.0)
    placed = shapes.place(catalog.QUEUE_WAIT, LABELS, "0", window([0.1, 0.2]), math.inf, 0.0, ended)
    assert placed == [(pytest.approx(0.15), 2)]


def test_what_is_remembered_is_bounded() -> None:
    shapes = Shapes()
    shapes.turn(0.0)
    for second in range(1, 300):
        shapes.turn(float(second))
        shapes.place(catalog.FIRST_TOKEN, LABELS, "0", window([0.06] * 100), math.inf, 30.0)
    recent = shapes._recent[catalog.FIRST_TOKEN, LABELS, "0"]
    assert 4096 <= recent.count < 4096 + 100
    assert recent.count == sum(poll.count for poll in recent.polls)

"""Five simulated minutes and more of everything that `make soak` does for hours."""

from pathlib import Path

import pytest
from soak import HAPPENINGS, Outcome, Soak
from vitals import Vitals

SERVED_SECONDS = 300.0


async def test_what_is_counted_is_what_happened_and_nothing_grows(tmp_path: Path) -> None:
    outcome = await Soak(tmp_path, speed=20.0, busy=0.3).run(served=SERVED_SECONDS)
    assert outcome.served_seconds >= SERVED_SECONDS
    assert len(outcome.events) == len(set(HAPPENINGS))
    assert outcome.problems() == []


def vitals(n: int, **changes: int) -> Vitals:
    return Vitals(
        60.0 * n, **{"resident_bytes": 50_000_000, "descriptors": 14, "threads": 10, "cpu_seconds": n} | changes
    )


@pytest.mark.parametrize(
    ("grows", "problems"),
    [
        ({}, []),
        ({"resident_bytes": 20_000}, ["memory grows by 1.20 MB an hour"]),
        ({"resident_bytes": 1_000_000}, ["memory grows by 60.00 MB an hour", "memory grew by 22.5 MB"]),
        ({"descriptors": 1}, ["descriptors grow by 22.5"]),
        ({"threads": 1}, ["threads grow by 22.5"]),
    ],
)
def test_what_grows_is_a_problem(grows: dict[str, int], problems: list[str]) -> None:
    still = vitals(0)
    samples = [vitals(n, **{name: getattr(still, name) + n * each for name, each in grows.items()}) for n in range(60)]
    assert Outcome(7200.0, 72_000.0, {}, {}, samples).problems() == problems

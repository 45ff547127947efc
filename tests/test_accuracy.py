"""What the refined queue wait shows below the engine's lowest bucket, on simulated loads and by the real reading path."""

from collections.abc import Callable

import pytest
from accuracy import LEAST, USUAL, Row, Watcher, failing, measure, of_values
from loads import FAST, SHORT, TOY, Case, cases

from exporter import catalog
from exporter.quantile import quantile, total
from exporter.simulator import Bursts, Engine, EngineConfig, Poisson, simulate
from exporter.simulator.load import Load
from exporter.simulator.metrics import REQUEST_BOUNDS


def waits(config: EngineConfig, load: Load, slowdown: float) -> tuple[float, float, float]:
    """P99 of the queue wait on a server so many times as slow, in seconds: true, native, refined."""
    engine, watcher = Engine(config, 1), Watcher(USUAL)
    engine.slow(slowdown)
    truth = simulate(engine, load, 120.0 * slowdown, on_poll=watcher.poll)
    values = truth.values("queue_wait")
    refined = quantile(*total(watcher.store, catalog.QUEUE_WAIT), 0.99)
    assert refined is not None
    return truth.quantile("queue_wait", 0.99), of_values(values, REQUEST_BOUNDS, 0.99), refined


def poisson(rate: float, seed: int) -> tuple[EngineConfig, Callable[[float], Load]]:
    return TOY, lambda slow: Poisson(rate / slow, mix=SHORT, seed=seed)


def bursts(seed: int) -> tuple[EngineConfig, Callable[[float], Load]]:
    return FAST, lambda slow: Bursts(45, 3.0 * slow, mix=SHORT, seed=seed)


@pytest.mark.parametrize(
    ("config", "load"),
    [
        pytest.param(*poisson(10.0, 1), id="17 ms"),
        pytest.param(*poisson(11.0, 4), id="29 ms"),
        pytest.param(*poisson(11.0, 1), id="45 ms"),
        pytest.param(*poisson(12.0, 2), id="73 ms"),
        pytest.param(*poisson(12.0, 1), id="78 ms"),
        pytest.param(*poisson(12.0, 4), id="79 ms"),
        pytest.param(*poisson(12.0, 3), id="94 ms"),
        pytest.param(*bursts(1), id="bursts, 94 ms"),
        pytest.param(*bursts(2), id="bursts, 93 ms"),
    ],
)
def test_a_wait_below_the_lowest_bucket_that_grows_is_seen_to_grow(
    config: EngineConfig, load: Callable[[float], Load]
) -> None:
    """All that takes time takes twice as long; the engine's own buckets, from 0.3 s on, show nothing of it.

    So it is for most loads and not for all: where hardly more than one in a hundred waits, a few of them decide.
    """
    before, after = (waits(config, load(slow), slow) for slow in (1.0, 2.0))
    assert 0.002 < before[0] < 0.1
    assert after[0] > 1.5 * before[0]
    assert after[1] == pytest.approx(before[1], rel=0.02)
    assert after[2] / before[2] == pytest.approx(after[0] / before[0], rel=0.15)


def test_a_load_is_measured_as_the_bench_does() -> None:
    case = Case("bursts", TOY, lambda: Bursts(40, 10.0, mix=SHORT, seed=1), seed=1)
    row = next(r for r in measure(case, (USUAL,)) if (r.signal, r.quantile) == ("queue_wait", 0.99))
    assert row.counts
    assert row.error(row.refined[USUAL]) < 0.15
    assert row.floor == pytest.approx(row.true, rel=0.15)


def test_the_loads_differ_and_have_names_of_their_own() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names) >= 60


@pytest.mark.parametrize(
    ("native", "floor", "refined", "why"),
    [
        (1.3, 1.0, 1.1, ""),
        (1.3, 1.0, 1.2, "off by more than 12 %"),
        (1.01, 1.0, 1.1, "native is nearer"),
        (1.01, 1.05, 1.1, "native is nearer, and nearer than exact values in our bounds"),
    ],
)
def test_why_a_load_is_worth_a_look(native: float, floor: float, refined: float, why: str) -> None:
    assert failing(Row("", "queue_wait", 0.99, 1000, 1.0, native, floor, {USUAL: refined})) == why


def test_a_server_at_rest_of_which_a_wait_is_told_is_worth_a_look() -> None:
    row = Row("", "queue_wait", 0.99, 1000, LEAST / 100, 0.297, LEAST, {USUAL: 0.02})
    assert not row.counts
    assert failing(row) == "at rest, and yet more than 1 ms told"

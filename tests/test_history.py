"""What the last half hour was: exact increases by step, windows of them, and a bound on what is kept."""

import tracemalloc

import pytest
from harness import Clock

from exporter import catalog
from exporter.history import History, Moments
from exporter.lifecycle import Lifecycle
from exporter.signals import Reading
from exporter.store import Store, gauge


class Watched:
    """A store, its history, and time that passes in steps."""

    def __init__(self) -> None:
        self.clock = Clock(0.0)
        self.store = Store(clock=self.clock, wall=self.clock)
        self.life = Lifecycle(has_page=False)
        self.history = History(self.store, self.life, self.store.gauges, clock=self.clock, tick=self._never)

    async def _never(self) -> None: ...

    def served(self, seconds: float, count: int = 1, model: str = "m") -> None:
        self.store.observe(catalog.LATENCY, (model,), seconds, count, origin="log")

    def step(self, steps: int = 1) -> "Watched":
        for _ in range(steps):
            self.clock.pass_(15)
            self.history.look()
        return self

    @property
    def moments(self) -> Moments:
        return self.history.moments(self.store.gauges())

    def count(self, seconds: float) -> int:
        return self.moments.spread(catalog.LATENCY, "m", seconds, self.clock.now).count


def test_a_window_holds_what_came_in_it_up_to_this_moment() -> None:
    watched = Watched()
    watched.served(1.0, 3)
    watched.step()
    watched.served(2.0, 5)
    watched.step()
    watched.served(4.0)
    watched.clock.pass_(5)
    assert [watched.count(seconds) for seconds in (4, 6, 20, 21, 35, 36)] == [1, 6, 6, 9, 9, 9]
    spread = watched.moments.spread(catalog.LATENCY, None, 60, watched.clock.now)
    assert (spread.sum, spread.mean) == (pytest.approx(17.0), pytest.approx(17 / 9))
    assert spread.quantile(0.99) == pytest.approx(4.0, rel=0.15)
    assert watched.moments.spread(catalog.LATENCY, "n", 60, watched.clock.now).quantile(0.99) is None
    watched.step(122)
    assert [watched.count(seconds) for seconds in (1800, 4000)] == [0, 0]
    assert len(watched.moments.all) == 122


def test_counters_tell_their_increase_and_a_series_born_again_all_of_it() -> None:
    watched = Watched()
    watched.store.count(catalog.ERRORS, ("cuda",), 2, origin="log")
    watched.served(1.0, 7)
    watched.step()
    watched.store.keep_models([])
    assert watched.moments.spread(catalog.LATENCY, "m", 60, watched.clock.now).count == 7
    watched.served(1.0, 2)
    watched.store.count(catalog.ERRORS, ("cuda",), origin="log")
    watched.store.count(catalog.ERRORS, ("timeout",), origin="log")
    watched.step()
    now = watched.clock.now
    assert [watched.moments.increase(catalog.ERRORS, seconds, now) for seconds in (15, 30)] == [2, 4]
    assert watched.moments.increase(catalog.ERRORS, 30, now, kind="cuda") == 3
    assert [watched.count(seconds) for seconds in (15, 30)] == [2, 9]


def test_gauges_are_those_of_the_moment_and_none_where_nobody_tells() -> None:
    watched = Watched()
    watched.step()
    watched.life.worked()
    samples = (
        gauge(catalog.RUNNING, 3, "m", "0"),
        gauge(catalog.RUNNING, 4, "m", "1"),
        gauge(catalog.WAITING, 2, "m", "0"),
    )
    watched.store.publish(Reading("metrics", "metrics", ok=True, at=0.0, samples=samples))
    watched.step()
    told = [(m.up, m.phase, m.running, m.waiting, m.in_engine, m.kv_usage) for m in watched.moments.all]
    assert told == [
        (False, "starting", None, None, None, None),
        (True, "serving", 7, 2, 9, None),
        (True, "serving", 7, 2, 9, None),
    ]


def test_a_late_look_is_one_step_and_an_early_one_none() -> None:
    watched = Watched()
    watched.clock.pass_(14)
    watched.history.look()
    watched.clock.pass_(40)
    watched.history.look()
    assert [moment.at for moment in watched.moments.all] == [54, 54]


def test_more_models_than_eight_are_taken_together() -> None:
    watched = Watched()
    for n in range(12):
        watched.served(1.0, model=f"m{n:02}")
    watched.step()
    kept = [f"m{n:02}" for n in range(8)]
    assert watched.moments.models(catalog.LATENCY) == [*kept, "other"]
    assert watched.moments.spread(catalog.LATENCY, "other", 60, watched.clock.now).count == 4


def test_a_model_that_is_gone_makes_room_for_another() -> None:
    watched = Watched()
    for n in range(8):
        watched.served(1.0, model=f"m{n}")
    watched.step()
    watched.store.keep_models(["m0"])
    watched.step()
    watched.served(1.0, model="new")
    watched.step(121)
    assert watched.moments.models(catalog.LATENCY) == ["new"]


def test_half_an_hour_of_a_busy_server_takes_less_than_a_megabyte() -> None:
    watched = Watched()
    watched.step()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(150):
        for n in range(60):  # as spread as requests and steps are
            watched.served(0.5 * 1.08**n)
            watched.store.observe(catalog.QUEUE_WAIT, ("m",), 0.002 * 1.13**n, origin="log")
            watched.store.observe(catalog.STEP_LATENCY, ("m", "decode"), 0.02 * 1.03**n, origin="log")
        watched.step()
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 10_000 < taken < 400_000

"""Who asks for what, and when."""

from random import Random
from statistics import mean, median

import pytest

from exporter.simulator import (
    Bursts,
    ClosedLoop,
    Engine,
    EngineConfig,
    Observer,
    OpenLoop,
    Poisson,
    RequestRecord,
    Segment,
)
from exporter.simulator.load import CHAT, fixed, lognormal, mixture, requests, uniform

SHORT = requests(fixed(10), fixed(5))


class Arrivals(Observer):
    def __init__(self, engine: Engine) -> None:
        self.times: list[float] = []
        self.records: list[RequestRecord] = []
        engine.attach(self)

    def on_arrival(self, record: RequestRecord) -> None:
        self.times.append(record.arrival)
        self.records.append(record)

    def between(self, start: float, end: float) -> int:
        return sum(start <= moment < end for moment in self.times)


def engine_with(load, **changes) -> tuple[Engine, Arrivals]:
    engine = Engine(EngineConfig.tiny(**changes))
    arrivals = Arrivals(engine)
    load.start(engine)
    return engine, arrivals


def test_poisson_has_its_rate_and_the_spread_of_independent_arrivals() -> None:
    engine, arrivals = engine_with(Poisson(10.0, mix=SHORT, seed=1))
    engine.advance(1000)
    gaps = [after - before for before, after in zip(arrivals.times, arrivals.times[1:], strict=False)]
    assert mean(gaps) == pytest.approx(0.1, rel=0.03)
    assert median(gaps) == pytest.approx(0.0693, rel=0.05)


def test_open_loop_follows_its_segments_and_ends() -> None:
    load = OpenLoop(Segment(100, 2.0), Segment(100, 0.0), Segment(100, 2.0, 20.0), mix=SHORT, seed=1)
    engine, arrivals = engine_with(load)
    engine.advance(1000)
    assert arrivals.between(0, 100) == pytest.approx(200, rel=0.2)
    assert arrivals.between(100, 200) == 0
    assert arrivals.between(200, 250) == pytest.approx(50 * 6.5, rel=0.2)
    assert arrivals.between(250, 300) == pytest.approx(50 * 15.5, rel=0.2)
    assert arrivals.between(300, 1000) == 0


def test_no_rate_no_requests() -> None:
    engine, arrivals = engine_with(Poisson(0.0))
    engine.advance(100)
    assert arrivals.times == []


def test_closed_loop_keeps_its_number_in_flight_and_can_be_resized() -> None:
    load = ClosedLoop(5, mix=SHORT)
    engine, _ = engine_with(load)
    for concurrency in (5, 12, 3):
        load.resize(concurrency)
        engine.advance(engine.now + 5)
        assert engine.in_flight == concurrency
    load.stop()
    engine.advance(engine.now + 5)
    assert engine.in_flight == 0


def test_closed_loop_thinks_between_requests() -> None:
    engine, arrivals = engine_with(ClosedLoop(1, think_seconds=2.0, mix=SHORT))
    engine.advance(20)
    assert len(arrivals.times) == 10


def test_closed_loop_outlives_refusal_and_restart() -> None:
    load = ClosedLoop(4, mix=SHORT)
    engine, arrivals = engine_with(load, max_running_requests=1, max_queued_requests=1)
    engine.advance(30)
    before = len(arrivals.times)
    engine.fail("cuda")
    engine.advance(60)
    assert len(arrivals.times) == before
    engine.restart()
    engine.advance(90)
    assert len(arrivals.times) > before + 10


def test_bursts_come_all_at_once() -> None:
    load = Bursts(20, every=5.0, mix=SHORT)
    engine, arrivals = engine_with(load)
    engine.advance(12)
    assert arrivals.times == [0.0] * 20 + [5.0] * 20 + [10.0] * 20
    load.stop()
    engine.advance(30)
    assert len(arrivals.times) == 60


@pytest.mark.parametrize("load", [Poisson(5.0), OpenLoop(Segment(100, 5.0))], ids=["poisson", "open"])
def test_stopped_load_asks_no_more(load) -> None:
    engine, arrivals = engine_with(load)
    engine.advance(10)
    load.stop()
    before = len(arrivals.times)
    engine.advance(50)
    assert len(arrivals.times) == before > 0


def test_lengths() -> None:
    random = Random(1)
    assert {fixed(7)(random) for _ in range(10)} == {7}
    assert {uniform(1, 3)(random) for _ in range(100)} == {1, 2, 3}
    drawn = [lognormal(100, 1.0, most=500)(random) for _ in range(2000)]
    assert median(drawn) == pytest.approx(100, rel=0.1)
    assert max(drawn) == 500
    assert min(drawn) >= 1


def test_mixes() -> None:
    random = Random(1)
    mix = mixture((0.9, requests(fixed(10), fixed(5))), (0.1, requests(fixed(1000), fixed(5), ignore_eos=True)))
    drawn = [mix(random) for _ in range(1000)]
    long = [request for request in drawn if request.prompt_tokens == 1000]
    assert len(long) == pytest.approx(100, rel=0.3)
    assert {request.max_tokens for request in long} == {5}
    hanging_up = [requests(fixed(1), fixed(1), aborted=0.5)(random).abort_after for _ in range(1000)]
    assert sum(moment is not None for moment in hanging_up) == pytest.approx(500, rel=0.1)


def test_same_seed_same_load() -> None:
    def times(seed: int) -> list[float]:
        engine, arrivals = engine_with(Poisson(5.0, mix=CHAT, seed=seed))
        engine.advance(20)
        return arrivals.times

    assert times(1) == times(1)
    assert times(1) != times(2)

"""The level a request belongs to, the warm-up that belongs to none, and what an overload leaves behind."""

import math
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
from harness import Clock
from hypothesis import given
from hypothesis import strategies as st

from exporter import catalog
from exporter.concurrency import WARM_UP_REQUESTS, WARM_UP_SECONDS, Levels, Moments, level
from exporter.engines import profile as profiles
from exporter.lifecycle import Lifecycle
from exporter.quantile import quantile
from exporter.signals import Reading
from exporter.simulator import Engine as Simulated
from exporter.simulator import EngineConfig
from exporter.simulator.load import OpenLoop, Segment, requests, uniform
from exporter.simulator.truth import exact_quantile
from exporter.simulator.virtual import EPOCH, simulate
from exporter.sources.scrape import ScrapeSource
from exporter.store import Store, gauge


class Engine:
    """A store that is told by hand what an engine does."""

    def __init__(self, *, serving: bool = True) -> None:
        self.clock = Clock()
        self.lifecycle = Lifecycle(has_page=True)
        self.lifecycle.engine = "vllm"
        self.store = Store(clock=self.clock, wall=self.clock, levels=Levels(self.lifecycle, self.clock))
        if serving:
            self.lifecycle.answered(healthy=True, moved=False, started_at=None)

    def hold(self, running: float, waiting: float = 0.0) -> "Engine":
        """The page says so now."""
        samples = (gauge(catalog.RUNNING, running, "m", "0"), gauge(catalog.WAITING, waiting, "m", "0"))
        self.store.publish(Reading("metrics", "metrics", ok=True, at=self.clock.now, samples=samples))
        return self

    def finish(self, seconds: float, count: int = 1, *, origin="metrics", ago: float | None = 0.0) -> "Engine":
        self.store.observe(catalog.LATENCY, ("m",), seconds, count, origin=origin, ago=ago)
        return self

    def pass_(self, seconds: float, *, running: float | None = None) -> "Engine":
        """Time goes by, with a page a second if *running* is told, else with nothing but the log's ticks."""
        for _ in range(round(seconds)):
            self.clock.pass_(1.0)
            if running is None:
                self.store.publish(Reading("log", "log", ok=True, at=self.clock.now))
            else:
                self.hold(running)
        return self

    def warmed(self) -> "Engine":
        """It has been serving for a while, one request at a time."""
        self.hold(0)
        return self.finish(0.5, 20).pass_(61, running=0)

    @property
    def requests(self) -> dict[str, int]:
        """By level."""
        series = self.store.histograms[catalog.LATENCY_BY_CONCURRENCY]
        counts = Counter({labels[2]: buckets.cumulative()[-1] for labels, buckets in series.items()})
        return {at: n for at, n in counts.items() if n}

    def by_level(self, family: catalog.Family) -> dict[str, float]:
        return {labels[2]: value for labels, value in self.store.counters[family].items() if value}


@pytest.mark.parametrize(
    ("held", "expected"),
    [(0, "1"), (0.4, "1"), (1.05, "1"), (1.5, "2"), (2, "2"), (3, "4"), (4.2, "4"), (1024, "1024"), (1200, "inf")],
)
def test_a_level_is_the_next_power_of_two(held: float, expected: str) -> None:
    assert level(held) == expected


def test_a_request_belongs_to_the_mean_over_its_whole_life() -> None:
    engine = Engine().warmed()
    engine.pass_(10, running=8).finish(10.0).hold(8).pass_(1, running=8)
    assert engine.requests == {"8": 1}


def test_the_last_requests_of_an_overload_do_not_belong_to_a_calm_engine() -> None:
    """They end when hardly another is left; by the moment of their end they would poison the baseline."""
    engine = Engine().warmed().pass_(60, running=64)
    for left in range(32, 0, -8):
        engine.pass_(1, running=left).finish(60.0)
    engine.pass_(1, running=0).finish(60.0).pass_(1, running=0)
    assert engine.requests == {"64": 5}


def test_nothing_belongs_to_a_level_before_its_end_was_passed() -> None:
    engine = Engine().warmed()
    engine.clock.pass_(0.5)
    engine.finish(0.4)
    assert engine.requests == {}
    engine.clock.pass_(0.5)
    assert engine.hold(2).requests == {"1": 1}


def test_a_span_that_comes_late_belongs_to_the_time_of_its_request() -> None:
    engine = Engine().warmed().pass_(5, running=16).pass_(5, running=1)
    engine.finish(4.0, origin="trace", ago=6.0).pass_(1, running=1)
    assert engine.requests == {"16": 1}


def test_the_warm_up_belongs_to_no_level() -> None:
    engine = Engine().hold(1)
    engine.pass_(30, running=1).finish(0.5, 19).pass_(40, running=1).finish(0.5).pass_(1, running=1)
    assert engine.requests == {}  # the twentieth has just come
    assert engine.finish(0.5).pass_(1, running=1).requests == {"1": 1}


def test_many_requests_at_once_do_not_end_the_warm_up_before_its_time() -> None:
    engine = Engine().hold(1).finish(0.5, 1000).pass_(59, running=1).finish(0.5).pass_(1, running=1)
    assert engine.requests == {}


def test_the_warm_up_begins_when_the_engine_serves() -> None:
    engine = Engine(serving=False)
    engine.hold(0).finish(0.5, 30).pass_(300, running=0).finish(0.5).pass_(1, running=0)
    assert engine.requests == {}


def test_a_restart_of_the_engine_is_a_new_warm_up() -> None:
    engine = Engine().warmed()
    engine.lifecycle.begin(None)
    engine.lifecycle.answered(healthy=True, moved=False, started_at=None)
    engine.finish(0.5).pass_(5, running=1)
    assert engine.requests == {}
    assert engine.warmed().finish(0.5).pass_(1, running=1).requests == {"1": 1}


def test_what_happened_while_the_page_could_not_be_read_belongs_to_no_level() -> None:
    engine = Engine().warmed()
    engine.clock.pass_(61)
    engine.finish(2.0, 100).hold(1).pass_(1, running=1)
    assert engine.requests == {}


def test_a_poll_that_failed_costs_nothing() -> None:
    engine = Engine().warmed().pass_(5, running=4)
    engine.store.publish(Reading("metrics", "metrics", ok=False, at=0.0, reason="timeout"))
    engine.clock.pass_(3.0)
    assert engine.finish(6.0).hold(4).requests == {"4": 1}


def test_throughput_of_a_level_is_its_tokens_over_its_seconds() -> None:
    engine = Engine().warmed().hold(4)
    for _ in range(10):
        engine.store.count(catalog.TOKENS, ("m", "generation"), 200, origin="metrics")
        engine.store.count(catalog.TOKENS, ("m", "prompt"), 5000, origin="metrics")
        engine.pass_(1, running=4)
    tokens, seconds = engine.by_level(catalog.TOKENS_BY_CONCURRENCY), engine.by_level(catalog.SECONDS_BY_CONCURRENCY)
    assert (tokens["4"], seconds["4"]) == (1800.0, pytest.approx(9.0))  # the first second led from 0 to 4
    assert tokens["2"] == 200.0


def test_an_idle_engine_adds_nothing_to_the_time_of_level_1() -> None:
    engine = Engine().warmed()
    before = engine.by_level(catalog.SECONDS_BY_CONCURRENCY)
    assert engine.pass_(100, running=0).by_level(catalog.SECONDS_BY_CONCURRENCY) == before


def test_a_level_is_there_at_0_before_its_first_request_has_ended() -> None:
    series = Engine().warmed().pass_(2, running=3).store.histograms[catalog.LATENCY_BY_CONCURRENCY]
    assert {labels[2]: b.cumulative()[-1] for labels, b in series.items()} == {"1": 0, "2": 0, "4": 0}


def test_the_config_of_an_entry_is_that_of_the_engine() -> None:
    engine = Engine().warmed().finish(1.0).pass_(1, running=1)
    (labels,) = engine.store.histograms[catalog.LATENCY_BY_CONCURRENCY]
    assert labels == ("m", engine.lifecycle.config(engine.store.gauges()), "1")


# a server that only logs its requests


def lived(lives: list[tuple[float, float]]) -> dict[str, int]:
    """The levels of requests that a log tells, each by its end and its length, after a warm-up."""
    engine = Engine().finish(0.1, 20, origin="log")
    engine.clock.pass_(100.0)
    began = engine.clock.now
    for end, length in sorted(lives):
        engine.clock.now = began + end
        engine.store.publish(Reading("log", "log", ok=True, at=began + end))
        engine.finish(length, origin="log")
    engine.clock.pass_(1000.0)
    engine.store.publish(Reading("log", "log", ok=True, at=engine.clock.now))
    return engine.requests


def means_of(lives: list[tuple[float, float]]) -> list[float]:
    """How many there were on average in each life, by looking at every pair."""

    def overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
        return max(0.0, min(one[0], other[0]) - max(one[0] - one[1], other[0] - other[1]))

    return [sum(overlap(life, other) for other in lives) / life[1] for life in lives]


def test_without_gauges_the_lives_themselves_tell_how_many_there_were() -> None:
    assert lived([(100.0 + 2 * n, 1.9) for n in range(10)]) == {"1": 10}
    assert lived([(100.0 + n / 2, 2.0) for n in range(40)]) == {"4": 40}


def test_without_gauges_an_overload_does_not_count_as_calm_either() -> None:
    """Everybody waits ever longer, and nobody is judged before those beside have ended."""
    queue = [(float(n), n * 0.9) for n in range(1, 200)]
    levels = lived(queue)
    assert levels == Counter(map(level, means_of(queue)))
    assert levels.keys().isdisjoint({"1", "2"})


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(0.01, 10)), min_size=1, max_size=60))
def test_without_gauges_the_mean_is_exact_whatever_overlaps(lives: list[tuple[float, float]]) -> None:
    means = means_of(lives)
    off = [math.log2(mean / 1.1) for mean in means]
    on_the_line = sum(abs(n - round(n)) < 1e-6 for n in off)
    told, expected = Counter(lived(lives)), Counter(level(mean) for mean in means)
    assert (told - expected).total() <= on_the_line
    assert told.total() == len(lives)


@given(st.lists(st.tuples(st.floats(0.2, 30), st.floats(0, 100)), min_size=2, max_size=40), st.data())
def test_a_mean_lies_between_what_was_told(told: list[tuple[float, float]], data: st.DataObject) -> None:
    moments, at = Moments(), 0.0
    for gap, value in told:
        at += gap
        moments.add(at, value)
    first = told[0][0]
    begin = data.draw(st.floats(first, at))
    end = data.draw(st.floats(begin, at))
    mean = moments.mean(begin, end)
    assert mean is not None
    assert min(v for _, v in told) - 1e-6 <= mean <= max(v for _, v in told) + 1e-6
    assert moments.mean(first - 1, end) is None
    assert moments.mean(begin, at + 1) is None


# the simulator knows better


def test_levels_told_by_polls_are_those_of_the_requests() -> None:
    """A tide of requests, from hardly any to a queue and back: what one poll a second makes of it, and the truth."""
    clock, lifecycle = Clock(0.0), Lifecycle(has_page=True)
    lifecycle.engine = "vllm"
    store = Store(clock=clock, wall=lambda: EPOCH + clock.now, levels=Levels(lifecycle, clock))
    server = SimpleNamespace(url="http://engine", page="")

    async def get(path: str) -> tuple[str, bool]:
        return "" if path == "/health" else server.page, False

    server.get = get
    source = ScrapeSource(server, profiles.bundled("vllm"), store, lifecycle, tick=None, clock=clock)

    def poll(moment: float, page: str) -> None:
        clock.now, server.page = moment, page
        with pytest.raises(StopIteration):  # it never has to wait
            source.once().send(None)

    mix = requests(uniform(50, 100), uniform(350, 400))
    tide = OpenLoop(Segment(300, 0.1, 4.5), Segment(300, 4.5, 0.1), mix=mix, seed=1)
    config = EngineConfig.tiny(kv_blocks=400, kv_bytes_per_token=2**19)
    truth = simulate(Simulated(config, seed=1), tide, 600, on_poll=poll)
    expected: dict[str, list[float]] = defaultdict(list)
    for record in truth.requests[WARM_UP_REQUESTS:]:
        if record.latency and record.finished > WARM_UP_SECONDS:
            expected[level(truth.concurrency(record))].append(record.latency)
    told = {labels[2]: buckets for labels, buckets in store.histograms[catalog.LATENCY_BY_CONCURRENCY].items()}
    assert set(told) == set(expected)
    assert len(told) >= 4
    for at, latencies in expected.items():
        cumulative = told[at].cumulative()
        assert cumulative[-1] == pytest.approx(len(latencies), rel=0.2, abs=12)
        if len(latencies) >= 100:
            p99 = quantile(told[at].bounds, cumulative, 0.99)
            assert p99 == pytest.approx(exact_quantile(latencies, 0.99), rel=0.3), at


def test_a_span_of_nobody_knows_when_belongs_to_no_level() -> None:
    engine = Engine().warmed()
    assert engine.finish(20.0, ago=None).pass_(2, running=0).requests == {}


def test_without_gauges_who_was_there_before_belongs_to_no_level() -> None:
    """With them others may have been that nobody saw."""
    engine = Engine().finish(0.1, 20, origin="log").pass_(100)
    engine.finish(150.0, 3, origin="log").pass_(1000)
    assert engine.requests == {}


def test_a_line_that_stands_for_many_requests_costs_no_more_than_others() -> None:
    engine = Engine().finish(0.1, 20, origin="log").pass_(100)
    engine.finish(2.0, 1_000_000, origin="log").pass_(1000)
    assert engine.requests == {"inf": 1_000_000}

"""The baseline that the sidecar learns by itself: from calm, an hour late, and not from an incident."""

import pytest
from harness import Clock

from exporter import catalog
from exporter.concurrency import Levels
from exporter.history import History
from exporter.learned import Learned
from exporter.lifecycle import Lifecycle
from exporter.signals import Reading
from exporter.store import Store, gauge


class Server:
    """An engine that answers one request after the other, each in *seconds*, with so many of them in it."""

    def __init__(self) -> None:
        self.clock = Clock(0.0)
        self.life = Lifecycle(has_page=False)
        levels = Levels(self.life, self.clock)
        self.store = Store(clock=self.clock, wall=self.clock, levels=levels)
        self.history = History(self.store, self.life, self.store.gauges, clock=self.clock, tick=self._never)
        self.learned = Learned(self.store, self.life)
        self.history.noted.append(self.learned.note)
        self.life.engine = "vllm"
        self.life.worked()

    async def _never(self) -> None: ...

    def answers(self, minutes: float, seconds: float, held: float = 1.0, each: float = 5.0) -> "Server":
        for _ in range(round(minutes * 60 / each)):
            self.clock.pass_(each)
            reading = Reading("m", "metrics", ok=True, at=0.0, samples=(gauge(catalog.RUNNING, held, "m", "0"),))
            self.store.publish(reading)
            self.store.observe(catalog.LATENCY, ("m",), seconds, origin="metrics")
            self.store.count(catalog.REQUESTS, ("m", "ok"), origin="metrics")
            self.store.count(catalog.TOKENS, ("m", "generation"), 50, origin="metrics")
            self.store.observe(catalog.STEP_LATENCY, ("m", "decode"), seconds / 50, origin="metrics")
            self.history.look()
        return self

    @property
    def baseline(self):
        return self.learned.baseline("m", self.life.config(self.store.gauges()))

    @property
    def told(self) -> tuple[str, float] | None:
        return None if self.baseline is None else (self.baseline.source, self.baseline.seconds)


def test_two_hundred_calm_requests_stand_in_until_an_hour_is_over() -> None:
    server = Server().answers(15, 1.0)
    assert server.told is None
    server.answers(10, 1.0)
    assert server.told == ("provisional", pytest.approx(1.0, rel=0.25))
    server.answers(50, 3.0)  # a regression moves neither what stands in, nor what is an hour old
    assert server.told == ("provisional", pytest.approx(1.0, rel=0.25))
    server.answers(10, 3.0)
    assert server.told == ("learned", pytest.approx(1.0, rel=0.25))
    assert server.baseline.tokens == {"prompt": 0.0, "generation": pytest.approx(50)}
    assert server.baseline.step_mean == pytest.approx(0.02, rel=0.05)


def test_an_incident_of_an_hour_does_not_become_the_baseline() -> None:
    server = Server().answers(300, 1.0)
    before = server.told
    server.answers(60, 3.0).answers(120, 1.0)
    assert before == server.told == ("learned", pytest.approx(1.0, rel=0.25))


def test_requests_of_a_busy_server_are_not_learned_from() -> None:
    assert Server().answers(90, 1.0, held=20.0).told is None


def test_another_configuration_begins_without_one() -> None:
    server = Server().answers(90, 1.0)
    assert server.told == ("learned", pytest.approx(1.0, rel=0.25))
    server.life.info["quantization"] = "fp8"
    assert server.told is None

"""A regex that would run for hours is given up, rests, and holds up nothing else."""

import re
import signal
import threading
import time

import pytest
from harness import Clock, Reader

from exporter import catalog
from exporter.engines.profile import Pattern, Signal
from exporter.sources.bounded import Bounded, TooSlow

ENDLESS = re.compile(r"cost=(?P<ms>\d+) (a+)+$")
WORST = "cost=5 " + "a" * 60 + "b"


def test_what_backtracks_without_end_is_given_up_and_tried_again_after_a_rest() -> None:
    clock = Clock()
    bounded = Bounded(clock)
    began = time.monotonic()
    with pytest.raises(TooSlow):
        bounded.match(ENDLESS, WORST)
    assert time.monotonic() - began < 5
    with pytest.raises(TooSlow):
        bounded.match(ENDLESS, "cost=5 a")
    assert bounded.match(re.compile("cost"), "cost=5")
    clock.pass_(10.0)
    assert bounded.match(ENDLESS, "cost=5 a")


def test_timer_and_handler_are_as_before() -> None:
    before = signal.getsignal(signal.SIGVTALRM)
    bounded = Bounded(Clock())
    with pytest.raises(TooSlow):
        bounded.match(ENDLESS, WORST)
    assert bounded.match(re.compile("cost"), "cost=5")
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_in_another_thread_it_matches_without_a_bound() -> None:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(Bounded(Clock()).match(ENDLESS, "cost=5 a")))
    thread.start()
    thread.join()
    assert found[0]


def test_a_pattern_of_the_users_that_backtracks_costs_its_own_lines_only(caplog: pytest.LogCaptureFixture) -> None:
    own = Pattern("own", ENDLESS, signals=(Signal("request_queue_wait_seconds", value="ms", unit="ms"),))
    reader = Reader("generic", patterns=[own])
    reader.feed("cost=5 aaa\n" + f"{WORST}\n" * 500 + "step_latency_ms=7")
    assert reader.store.counters[catalog.LOG_UNPARSED] == {("log",): 500}
    (waits,) = reader.store.histograms[catalog.QUEUE_WAIT].values()
    (steps,) = reader.store.histograms[catalog.STEP_LATENCY].values()
    assert (waits.cumulative()[-1], steps.cumulative()[-1]) == (1, 1)
    assert caplog.text.count("a line took too long to match") == 1
    assert "pattern=own" in caplog.text
    assert "aaa" not in caplog.text
    reader.clock.pass_(10.0)
    reader.feed("cost=5 aaa")
    assert waits.cumulative()[-1] == 2


def test_a_long_line_is_bounded_for_patterns_that_ship_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Bounded, "match", lambda self, regex, text: asked.append(len(text)))
    line = "INFO 11-30 07:26:13 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'"
    reader = Reader("vllm").feed(line)
    assert asked == []
    reader.feed(line + ", " * 2000)
    assert asked
    assert min(asked) > 4000

"""Requests as one row of numbers."""

import math

import pytest
from measured import CLIENT, engine, requests

from exporter.load.level import Pass, steady, summary
from exporter.load.result import Client, Level, Quantiles, Request


def test_a_level_of_three_answers() -> None:
    seen = [
        Request(10.0, 1.0, 0.25, 0.125, 7, 16),
        Request(10.5, 2.0, 0.5, 0.25, 7, 16),
        Request(11.0, 3.0, 0.75, 0.375, 7, 16),
    ]
    assert summary([Pass(2, seen, client=CLIENT)]) == Level(
        concurrency=2,
        requests=3,
        passes=1,
        seconds=4.0,
        latency=Quantiles(2.0, 3.0, 3.0, 2.0, 2.0, math.inf),
        first_token=Quantiles(0.5, 0.75, 0.75, 0.5, 0.5, math.inf),
        inter_token=Quantiles(0.25, 0.375, 0.375, 0.25, 0.25, math.inf),
        requests_per_second=0.75,
        tokens_per_second=12.0,
        client=CLIENT,
        latencies=[1.0, 2.0, 3.0],
    )


def test_failed_requests_are_infinite_in_the_quantiles_and_not_in_the_throughput() -> None:
    found = summary([Pass(1, requests([1.0] * 97 + [math.inf] * 3, errors="rejected"))])
    assert (found.latency.p50, found.latency.p95, found.latency.p99) == (1.0, 1.0, math.inf)
    assert found.latency.mean == 1.0
    assert found.first_token.p99 == math.inf
    assert found.errors == {"rejected": 3}
    assert found.requests_per_second == pytest.approx(0.97)
    assert found.tokens_per_second == pytest.approx(9.7)


def test_the_throughput_counts_whoever_was_answered_in_the_time_of_the_measured() -> None:
    measured = [Request(10.0, 2.0, generated_tokens=10), Request(11.0, 3.0, generated_tokens=10)]
    before, after = Request(9.0, 2.0, generated_tokens=10), Request(12.0, 3.0, generated_tokens=10)
    found = summary([Pass(2, measured, [before, after])])
    assert (found.seconds, found.requests_per_second, found.tokens_per_second) == (4.0, 0.75, 7.5)
    assert found.requests == 2


def test_passes_are_taken_together() -> None:
    passes = [
        Pass(4, requests([1.0, 2.0]), engine=engine(), client=Client(0.1, 0.002, False)),
        Pass(4, requests([3.0, 4.0]), engine=engine(step=0.03), client=Client(0.5, 0.001, True), complete=False),
    ]
    found = summary(passes)
    assert (found.passes, found.requests, found.latency.p50, found.complete) == (2, 4, 2.5, False)
    assert found.client == Client(0.5, 0.002, True)
    assert found.engine == passes[1].engine
    assert found.seconds == 10.0


def test_without_tokens_and_first_tokens_there_are_none() -> None:
    found = summary([Pass(1, [Request(0.0, 1.0), Request(1.0, 1.0)])])
    assert (found.tokens_per_second, found.first_token, found.inter_token) == (None, Quantiles(), Quantiles())
    assert found.requests_per_second == 1.0
    assert summary([Pass(1, [])]).requests_per_second is None


def test_the_steady_pass_is_the_one_in_the_middle() -> None:
    passes = [Pass(1, requests([latency] * 60)) for latency in (3.0, 1.0, 1.2)]
    assert (steady(passes).latency.p99, steady(passes).passes, steady(passes).requests) == (1.2, 3, 60)
    assert steady(passes[:2]).latency.p99 == 1.0
    passes.append(Pass(1, requests([1.0] * 60 + [math.inf], errors="timeout")))
    assert (steady(passes).requests, steady(passes).errors) == (241, {"timeout": 1})

"""What the truth says about a run."""

import io
import json
import math

import pytest

from exporter.simulator import Engine, EngineConfig, Poisson, Request, Truth, exact_quantile, simulate


def test_exact_quantile_is_a_value_that_occurred() -> None:
    values = [3.0, 1.0, 2.0, 4.0]
    assert [exact_quantile(values, q) for q in (0.0, 0.25, 0.5, 0.51, 0.99, 1.0)] == [1, 1, 2, 3, 4, 4]
    assert math.isnan(exact_quantile([], 0.5))


def test_concurrency_is_the_average_over_the_life_of_the_request() -> None:
    engine = Engine(EngineConfig.tiny(step_noise_ratio=0.0))
    truth = Truth(engine)
    first = engine.submit(Request(prompt_tokens=10, output_tokens=100, abort_after=0.4))
    engine.advance(0.3)
    second = engine.submit(Request(prompt_tokens=10, output_tokens=100, abort_after=0.3))
    engine.advance(1)
    assert truth.concurrency(first) == pytest.approx((0.3 * 1 + 0.1 * 2) / 0.4)
    assert truth.concurrency(second) == pytest.approx((0.1 * 2 + 0.2 * 1) / 0.3)


def test_json_lines_hold_every_request_and_step() -> None:
    engine = Engine(EngineConfig.tiny(), seed=1)
    truth = simulate(engine, Poisson(5.0), 10)
    file = io.StringIO()
    truth.write(file)
    rows = [json.loads(line) for line in file.getvalue().splitlines()]
    requests = [row for row in rows if row["type"] == "request"]
    assert len(requests) == len(truth.requests) > 10
    assert [row["arrival"] for row in requests] == sorted(row["arrival"] for row in requests)
    completed = [row for row in requests if row["finish_reason"] == "stop"]
    for row in completed:
        assert row["queue_wait"] == row["scheduled"] - row["queued"]
        assert row["latency"] == row["finished"] - row["arrival"]
        assert row["concurrency"] >= 1
    steps = [row for row in rows if row["type"] == "step"]
    assert [row["index"] for row in steps] == list(range(engine.steps))
    assert {row["phase"] for row in steps} == {"prefill", "decode", "mixed"}


def test_polls_come_at_the_start_and_every_so_often() -> None:
    moments: list[float] = []
    engine = Engine(EngineConfig.tiny())
    simulate(engine, Poisson(1.0), 3, every=0.5, on_poll=lambda now, page: moments.append(now))
    assert moments == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]
    assert engine.now == 3

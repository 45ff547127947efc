"""Incidents on the simulator, through the real sidecar and Prometheus' own rules: who is paged, when, and why."""

from pathlib import Path

import pytest
from incidents import LEARNED, SHORT, SHORTER, judge, poisson
from replay import Answer, Replica, evaluate
from rules import generate
from scenarios import SCENARIOS

from exporter.simulator import ClosedLoop, Engine, EngineConfig, OpenLoop, Poisson, Segment, simulate
from exporter.simulator.load import CHAT, Mix, fixed, lognormal, requests, uniform

FEW = (
    *(
        "healthy",
        "blip-of-half-a-minute",
        "overload",
        "slow-step",
        "cache-full",
        "killed-unsaid",
        "hang",
        "planned-restart",
    ),
    *("overload-sidecar-restart", "batches", "blip-and-quiet"),
)
BASELINE = "stopline:request_latency_seconds:p99_baseline"


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rules") / "fast.yaml"
    path.write_text(generate("--form", "rules", "--shorten", f"{SHORTER:g}"))
    return path


def test_incidents_page_for_the_right_cause_and_nothing_else_does(fast: Path) -> None:
    played = [scenario.play() for scenario in SCENARIOS if scenario.name in FEW]
    assert len(played) == len(FEW)
    verdicts = judge(played, [fast])
    assert {v.name: (set(v.paged), v.found if v.cause else "") for v in verdicts} == {
        v.name: (set(v.pages), v.cause) for v in verdicts
    }


# the baseline is what a careful operator would say


def _replica(name: str, **changes: object) -> Replica:
    config = {"model": name, "max_running_requests": 8} | changes
    replica = Replica(name, EngineConfig.hy3_h20(**config), every=3.0, iterations=False)
    replica.set_load(poisson(1.0))
    return replica


def _truth(mix: Mix, rate: float = 1.0, seconds: float = 3000.0, **changes: object) -> float:
    """P99 of the same server with the same calm load, exactly."""
    engine = Engine(EngineConfig.hy3_h20(max_running_requests=8, **changes), seed=5)
    return simulate(engine, Poisson(rate, mix=mix, seed=8), seconds, every=1e6).quantile("latency", 0.99)


def _baselines(replica: Replica, fast: Path, *moments: float) -> list[Answer]:
    """promtool evaluates all groups at one interval: that of the increases, or they would be counted several times."""
    answers = evaluate([replica], [fast], {BASELINE: moments}, interval="30s")
    return [answers[BASELINE, moment] for moment in moments]


def _last(replica: Replica) -> float:
    """A moment just before the end, on the grid of the evaluation."""
    return replica.now // 6 * 6 - 6


def cold_start(replica: Replica) -> None:
    replica.engine.slow(8)
    replica.run(50)
    replica.engine.slow(1)
    replica.run(LEARNED)


def lasting_regression(replica: Replica) -> None:
    replica.run(LEARNED + 200)
    replica.engine.slow(2.5)
    replica.run(900)


def overload_for_hours(replica: Replica) -> None:
    replica.run(LEARNED)
    replica.set_load(poisson(12.0))
    replica.run(720)


def engine_restart(replica: Replica) -> None:
    replica.run(LEARNED)
    replica.set_load(None)
    replica.engine.restart()
    replica.engine.slow(6)
    replica.set_load(poisson(1.0, seed=4))
    replica.run(50)
    replica.engine.slow(1)
    replica.run(450)


def sidecar_restart_in_an_incident(replica: Replica) -> None:
    replica.run(LEARNED)
    replica.set_load(poisson(12.0))
    replica.run(100)
    replica.restart_sidecar()
    replica.run(400)


def no_traffic(replica: Replica) -> None:
    replica.run(LEARNED)
    replica.set_load(None)
    replica.run(1200)


@pytest.mark.parametrize(
    "lives",
    [cold_start, lasting_regression, overload_for_hours, engine_restart, sidecar_restart_in_an_incident, no_traffic],
    ids=lambda lives: lives.__name__,
)
def test_the_baseline_is_that_of_the_calm_server(lives, fast: Path) -> None:
    replica = _replica(lives.__name__)
    lives(replica)
    ((((labels, learned),)),) = _baselines(replica, fast, _last(replica))
    assert labels["model"] == lives.__name__
    assert learned == pytest.approx(_truth(SHORT), rel=0.15)


@pytest.mark.parametrize(
    "change", [{"tensor_parallel": 4}, {"model": "another"}], ids=lambda change: next(iter(change))
)
def test_another_configuration_begins_without_a_baseline(change: dict[str, object], fast: Path) -> None:
    replica = _replica("changed")
    replica.run(LEARNED)
    small = {"model": "changed", "max_running_requests": 8, "weights_bytes": 60_000_000_000} | change
    slower = {"step_base_seconds": 0.045}  # so that its own baseline can be told from the old one
    replica.replace_engine(EngineConfig.hy3_h20(**(small | slower)), poisson(1.0, seed=4))
    replica.run(LEARNED + 100)
    before, early, late = _baselines(replica, fast, LEARNED // 6 * 6 - 6, LEARNED // 6 * 6 + 120, _last(replica))
    assert len(before) == len(early) == 1
    ours = [(labels, value) for labels, value in late if labels["config"] != before[0][0]["config"]]
    assert len(ours) == 1
    assert ours[0][1] == pytest.approx(_truth(SHORT, **slower), rel=0.15)


def test_too_few_requests_are_no_baseline(fast: Path) -> None:
    replica = _replica("few")
    replica.set_load(poisson(0.15))
    replica.run(1100)  # some 150 requests
    assert _baselines(replica, fast, _last(replica)) == [[]]


# the capacity curve


@pytest.mark.parametrize(
    "mix",
    [
        pytest.param(CHAT, id="chat"),
        pytest.param(requests(fixed(300), fixed(100)), id="equal"),
        pytest.param(requests(lognormal(300, 0.5, most=2000), uniform(50, 250)), id="mixed"),
    ],
)
def test_the_limit_of_concurrency_is_the_true_level_or_its_neighbour(mix: Mix) -> None:
    """From an hour that is like a day: calm, rising, over the top, and back. The rules are those that ship."""
    alone = _closed_loop(1, mix)
    true = max(level for level in (1, 2, 4, 8, 16, 32, 64, 128) if _closed_loop(level, mix) < 2 * alone)
    replica = Replica("day", EngineConfig.hy3_h20(), poll=2.0, iterations=False)
    day = (900, 0.05, 0.15), (900, 0.2, 2.0), (600, 2.0, 4.5), (300, 4.5, 6.0), (500, 3.0, 1.0), (400, 0.5, 0.1)
    replica.set_load(OpenLoop(*(Segment(*part) for part in day), mix=mix, seed=1))
    replica.run(3600)
    answers = evaluate([replica], ["replicas", "baseline"], {"stopline:concurrency_limit": [3600]}, interval="5m")
    ((_, limit),) = answers["stopline:concurrency_limit", 3600]
    assert limit in (true / 2, true, true * 2)


def _closed_loop(clients: int, mix: Mix) -> float:
    seconds = 900.0 if clients < 4 else 300.0
    engine = Engine(EngineConfig.hy3_h20(), seed=9)
    return simulate(engine, ClosedLoop(clients, mix=mix, seed=5), seconds, every=1e6).quantile("latency", 0.99)

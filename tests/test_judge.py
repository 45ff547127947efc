"""The live page judges as Prometheus' rules do: the same incidents, the same moments, the same lines."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
from agreement import LINES, Watched, compare, watch
from scenarios import SCENARIOS

from exporter import catalog
from exporter.config import Thresholds
from exporter.history import Moment, Moments, Tally
from exporter.judge import Evidence, judge
from exporter.learned import Baseline
from exporter.signals import Origin, Reading
from exporter.store import Buckets

CALM = {line: ["ok"] for line in LINES}
STATES = {  # of each line from the incident on, each once until it changes
    "blip-of-half-a-minute": CALM | {"latency": ["ok", "rising", "tripped", "rising", "ok"]},
    "slow-step-learned": CALM | {"latency": ["ok", "rising", "tripped"]},
    "batches": CALM | {"latency": ["ok", "tripped"]},
    "blip-and-quiet": CALM | {"latency": ["ok", "rising", "tripped", "rising", "ok"]},
    "cache-full": CALM | {"latency": ["ok", "tripped"], "memory": ["ok", "rising", "tripped"]},
    "out-of-memory": {"latency": ["ok", "unknown"], "errors": ["ok", "tripped"], "memory": ["ok", "unknown"]},
    "killed-unsaid": {
        "latency": ["ok", "unknown"],
        "errors": ["ok", "unknown", "tripped"],
        "memory": ["ok", "unknown"],
    },
    "hang": CALM | {"errors": ["ok", "tripped"]},
    "hang-idle": CALM | {"errors": ["ok", "tripped"]},
    "planned-restart": {line: ["ok", "unknown", "ok"] for line in LINES},
    "one-error": CALM | {"errors": ["ok", "tripped", "rising"]},
    "leak": CALM | {"memory": ["ok", "tripped"]},
}
"""Prometheus has the same lines over, and the same ones unjudged, in the same places."""


@pytest.fixture(scope="module")
def watched() -> dict[str, Watched]:
    return {scenario.name: watch(scenario) for scenario in SCENARIOS if scenario.name in STATES}


def test_the_page_and_prometheus_have_the_same_lines_over_or_unjudged_at_the_same_moments(
    watched: dict[str, Watched], tmp_path: Path
) -> None:
    apart, over = compare(list(watched.values()), tmp_path)
    assert over == set(LINES)
    assert apart == []


def test_each_incident_shows_as_these_states_one_after_the_other(watched: dict[str, Watched]) -> None:
    assert {name: {line: each.states(line) for line in LINES} for name, each in watched.items()} == STATES


def test_the_cause_is_that_of_the_rules(watched: dict[str, Watched]) -> None:
    """The rules' own causes are compared with these names in test_replay."""
    causes = {
        (name, verdict.line): verdict.cause
        for name, each in watched.items()
        for verdict in list(each.said.values())[-1]
        if verdict.state == "tripped"
    }
    assert causes == {
        ("slow-step-learned", "latency"): "step",
        ("batches", "latency"): "queue",
        ("cache-full", "latency"): "kv_cache",
        ("cache-full", "memory"): "kv_cache",
        ("out-of-memory", "errors"): "out_of_memory",
        ("killed-unsaid", "errors"): "phase_dead",
        ("hang", "errors"): "stalled",
        ("hang-idle", "errors"): "stalled",
        ("leak", "memory"): "growth",
    }


# what cannot be judged says why


def evidence(
    spread: dict[str, tuple[float, int]] | None = None, was: Moment | None = None, **known: object
) -> Evidence:
    """Of an engine that is up and answered these requests (seconds and how many, by model) just now; or that *was* so."""
    bounds = catalog.geometric(0.001, 600, 1.15)
    timed = {}
    for model, (seconds, count) in (spread or {}).items():
        buckets = Buckets(bounds)
        buckets.observe(seconds, count)
        timed[catalog.LATENCY, model] = Tally.of(buckets.counts(), buckets.sum)
    told = Moments([was or Moment(1000.0, True, "serving", timed)], lambda _: bounds)
    options = {"gauges": {}, "thresholds": Thresholds(), "wall": 5000.0, "baselines": {}} | known
    return Evidence(told, now=1000.0, **options)  # type: ignore[arg-type]


def reading(source: str, origin: Origin, reason: str = "") -> dict[str, Reading]:
    return {source: Reading(source, origin, ok=not reason, at=0.0, reason=reason)}


PAGE, LOG = reading("metrics", "metrics"), reading("/var/log/x", "log")
TWO_SECONDS = {"m": Baseline(2.0, "learned")}


@pytest.mark.parametrize(
    ("given", "state", "says", "remedy"),
    [
        pytest.param(
            evidence(),
            "unknown",
            "No request has ended within the last half hour.",
            "Nothing to do if nobody asks; else see the sources below.",
            id="idle",
        ),
        pytest.param(
            evidence(spread={"m": (3.0, 50)}, calm={"m": 17}),
            "unknown",
            "There is no baseline yet: 17 of 200 requests at low concurrency were seen.",
            "Wait, or pin one: baseline.pins. Prometheus may know one of the days before.",
            id="no-baseline",
        ),
        pytest.param(
            evidence(spread={"m": (3.0, 19)}, baselines=TWO_SECONDS),
            "unknown",
            "Too few requests: 19 within half an hour, 20 are needed.",
            "Nothing to do: it is judged as soon as there are enough.",
            id="few",
        ),
        pytest.param(
            evidence(spread={"m": (2.0, 20)}, baselines=TWO_SECONDS),
            "ok",
            "P99 is 1.1 times its baseline.",
            "",
            id="calm",
        ),
        pytest.param(
            evidence(spread={"m": (3.4, 20)}, baselines=TWO_SECONDS),
            "rising",
            "P99 is 1.9 times its baseline and rises.",
            "",
            id="rising",
        ),
        pytest.param(
            evidence(spread={"m": (5.0, 20)}, baselines=TWO_SECONDS),
            "tripped",
            "P99 is 2.6 times its baseline; the line is at 2.",
            "",
            id="over",
        ),
        pytest.param(
            evidence(
                spread={"m": (5.0, 20)},
                baselines=TWO_SECONDS,
                thresholds=Thresholds(latency_ratio=4, latency_warning_ratio=3),
            ),
            "ok",
            "P99 is 2.6 times its baseline.",
            "",
            id="another-threshold",
        ),
        pytest.param(
            evidence(spread={"m": (0.02, 20)}, baselines={"m": Baseline(0.005, "pinned")}),
            "ok",
            "P99 is 4.4 times its baseline.",
            "",
            id="below-the-floor",
        ),
        pytest.param(
            evidence(spread={"m": (2.0, 20), "n": (5.0, 20)}, baselines=TWO_SECONDS | {"n": Baseline(2.0, "pinned")}),
            "tripped",
            "P99 is 2.6 times its baseline; the line is at 2.",
            "",
            id="the-worst-model",
        ),
    ],
)
def test_the_latency_line(given: Evidence, state: str, says: str, remedy: str) -> None:
    verdict = judge(given)[0]
    assert (verdict.state, verdict.says, verdict.remedy) == (state, says, remedy)


def down(phase: str) -> Evidence:
    moment = Moment(1000.0, False, phase)
    return Evidence(
        Moments([moment], lambda _: ()),
        {},
        Thresholds(),
        1000.0,
        5000.0,
        readings=reading("metrics", "metrics", "refused") | LOG,
    )


def test_of_an_engine_that_is_gone_no_number_stays_and_memory_is_not_calm() -> None:
    was = Moment(960.0, True, "serving", kv_usage=0.1)
    moments = Moments([was, *(Moment(at, False, "dead") for at in (975.0, 990.0, 1005.0))], lambda _: ())
    told = Evidence(moments, {}, Thresholds(), 1005.0, 5000.0, readings=reading("metrics", "metrics", "refused") | LOG)
    latency, _, memory = judge(told)
    assert (latency.state, latency.value, memory.state, memory.value) == ("unknown", None, "unknown", None)


def test_what_rose_before_the_engine_died_cannot_be_judged_any_more() -> None:
    risen = evidence(spread={"m": (3.4, 20)}, baselines=TWO_SECONDS)
    (was,) = risen.moments.all
    gone = Moments([replace(was, up=False, phase="dead")], lambda _: catalog.geometric(0.001, 600, 1.15))
    assert [judge(each)[0].state for each in (risen, replace(risen, moments=gone))] == ["rising", "unknown"]


def test_memory_that_a_dead_engine_left_free_is_no_calm() -> None:
    given = evidence(**gpu(90), was=Moment(1000.0, False, "dead"))
    memory = judge(given)[2]
    assert (memory.state, memory.value, memory.says) == ("unknown", None, "The engine is not up (phase: dead).")
    full = judge(evidence(**gpu(0.5), was=Moment(1000.0, False, "dead")))[2]
    assert (full.state, full.reasons) == ("tripped", ("headroom",))


def test_a_cache_that_was_full_when_its_engine_died_is_not_over_its_line() -> None:
    def memory(phase: str, *, up: bool) -> tuple[str, tuple[str, ...]]:
        full = [Moment(at, True, "serving", running=8, waiting=5, kv_usage=1.0) for at in (960.0, 975.0, 990.0)]
        moments = Moments([*full, Moment(1000.0, up, phase)], lambda _: ())
        verdict = judge(Evidence(moments, {}, Thresholds(), 1000.0, 5000.0))[2]
        return verdict.state, verdict.reasons

    assert memory("dead", up=False) == ("unknown", ())
    assert memory("serving", up=False) == ("tripped", ("kv_cache",))  # one missed answer is no death


def test_where_no_gpu_was_ever_read_the_cache_is_the_measure_and_the_page_says_so() -> None:
    blind = PAGE | reading("gpu", "gpu", "library_not_found")
    now = Moment(1000.0, True, "serving", kv_usage=0.4)
    memory = judge(evidence(readings=blind, was=now))[2]
    says = "The KV cache is 40% in use; it is the measure, for no GPU is read: no NVIDIA driver library in sight."
    assert (memory.state, memory.unit, memory.value, memory.says) == ("ok", "ratio", 0.4, says)
    lost = judge(evidence(readings=blind, was=now, last_success={"gpu": 4000.0}))[2]
    says = "The GPUs cannot be read any more: no NVIDIA driver library in sight."
    assert (lost.state, lost.says) == ("unknown", says)


def test_an_engine_that_is_not_there_is_not_calm() -> None:
    says = "The engine is not up (phase: loading). Nothing listens at engine.url."
    verdicts = judge(down("loading"))
    assert [verdict.state for verdict in verdicts] == ["unknown", "unknown", "unknown"]
    assert [verdict.says for verdict in verdicts] == [
        says,
        "Errors are not seen in full: metrics: nothing listens at engine.url.",
        says,
    ]
    assert {verdict.remedy for verdict in verdicts} == {
        "Normal while the server loads; else compare host and port.",
    }


@pytest.mark.parametrize(
    ("readings", "last_error", "state", "says"),
    [
        ({}, {}, "unknown", "Neither a log nor a page has been read yet."),
        (PAGE | LOG, {}, "ok", "None within an hour."),
        (PAGE, {}, "ok", "None within an hour, by the page alone: no log is read."),
        (PAGE | LOG, {"cuda": 3200.0}, "rising", "None within five minutes; the last one was 30 minutes ago."),
        (PAGE | LOG, {"cuda": 1300.0}, "ok", "None within an hour."),
        (
            PAGE | reading("/var/log/x", "log", "permission"),
            {},
            "unknown",
            "Errors are not seen in full: /var/log/x: the file, or with kube:// the pod's log, may not be read.",
        ),
    ],
)
def test_the_errors_line_without_errors(readings, last_error, state: str, says: str) -> None:
    verdict = judge(evidence(readings=readings, last_error=last_error))[1]
    assert (verdict.state, verdict.says) == (state, says)


def test_requests_that_failed_and_of_which_no_error_tells_yet_are_no_number_beside_a_calm_line() -> None:
    ended = {(catalog.REQUESTS, ("m", "ok")): 800.0, (catalog.REQUESTS, ("m", "error")): 8.0}
    was = Moment(1000.0, True, "serving", counted=ended)
    errors = judge(evidence(readings=PAGE | LOG, was=was))[1]
    assert (errors.state, errors.value, errors.says) == ("ok", 0.0, "None within an hour.")
    told = Moment(1000.0, True, "serving", counted=ended | {(catalog.ERRORS, ("other", "metrics")): 8.0})
    errors = judge(evidence(readings=PAGE | LOG, was=told))[1]
    assert (errors.state, errors.value, errors.says) == ("tripped", 8.0, "Within five minutes: 8 × other.")


MANY_GAVE_UP = {(catalog.LONG_ANSWERS, ("m",)): 5.0}


@pytest.mark.parametrize(
    ("also", "state", "says"),
    [
        (
            {},
            "tripped",
            "5 requests ended without an answer within five minutes, and nothing came out of the engine.",
        ),
        ({(catalog.TOKENS, ("m", "generation")): 1.0}, "ok", "None within an hour."),
        ({(catalog.REQUESTS, ("m", "ok")): 1.0}, "ok", "None within an hour."),
        ({(catalog.REQUESTS, ("m", "rejected")): 3.0}, "ok", "None within an hour."),
        ({(catalog.REQUESTS, ("m", "aborted")): 5.0}, "tripped", ANY),
    ],
)
def test_requests_that_end_while_nothing_comes_out_of_the_engine(also, state: str, says: str) -> None:
    was = Moment(1000.0, True, "serving", counted=MANY_GAVE_UP | also, running=0, waiting=0)
    errors = judge(evidence(readings=PAGE | LOG, was=was))[1]
    assert (errors.state, errors.says) == (state, says)


def test_an_engine_that_renamed_its_metrics_does_not_stand_still() -> None:
    was = Moment(1000.0, True, "serving", counted=MANY_GAVE_UP, running=0, waiting=0)
    missing = {catalog.METRIC_MISSING: {("vllm:generation_tokens",): 1.0}}
    errors = judge(evidence(readings=PAGE | LOG, was=was, gauges=missing))[1]
    assert errors.state == "ok"


@pytest.mark.parametrize(
    ("watched", "errors", "requests"),
    [
        (12.0, "since Stopline started less than a minute ago", "since Stopline started less than a minute ago"),
        (60.0, "since Stopline started 1 minute ago", "since Stopline started 1 minute ago"),
        (1799.0, "since Stopline started 29 minutes ago", "since Stopline started 29 minutes ago"),
        (3599.0, "since Stopline started 59 minutes ago", "within the last half hour"),
        (3600.0, "within an hour", "within the last half hour"),
    ],
)
def test_nothing_is_said_of_the_time_before_it_looked(watched: float, errors: str, requests: str) -> None:
    latency, found, _ = judge(evidence(readings=PAGE | LOG, watched=watched))
    assert (found.state, found.says) == ("ok", f"None {errors}.")
    assert (latency.state, latency.says) == ("unknown", f"No request has ended {requests}.")
    few = judge(evidence(spread={"m": (3.0, 19)}, baselines=TWO_SECONDS, watched=watched))[0]
    assert few.says == f"Too few requests: 19 {requests.replace('the last half', 'half an')}, 20 are needed."


def test_a_source_that_misses_one_poll_is_still_read() -> None:
    missed = reading("metrics", "metrics", "timeout")
    assert judge(evidence(readings=missed, last_success={"metrics": 4990.0}))[1].state == "ok"
    assert judge(evidence(readings=missed, last_success={"metrics": 4980.0}))[1].state == "unknown"


GIB = float(1 << 30)


def gpu(
    free: float, *, used: float = 80.0, peak: float | None = None, plateau: float | None = None
) -> dict[str, object]:
    """What a GPU of 96 GiB tells, all in GiB."""
    told = {
        catalog.GPU_TOTAL: 96.0,
        catalog.GPU_USED: used,
        catalog.GPU_HEADROOM: free,
        catalog.GPU_PEAK: peak,
        catalog.GPU_PLATEAU: plateau,
    }
    return {"gpus": {family: {("0", "u"): value * GIB} for family, value in told.items() if value is not None}}


RESERVES = {catalog.ENGINE_PREALLOCATES: {(): 1.0}}
TAKES_AS_IT_GOES = {catalog.ENGINE_PREALLOCATES: {(): 0.0}}


@pytest.mark.parametrize(
    ("known", "state", "reasons"),
    [
        (gpu(8), "ok", ()),
        (gpu(1.4), "rising", ()),
        (gpu(0.9), "tripped", ("headroom",)),
        (gpu(8, peak=87.5), "tripped", ("headroom",)),
        (gpu(8, used=88, plateau=87.3), "ok", ()),
        (gpu(8, used=88, plateau=87.2), "rising", ()),
        (gpu(8, used=88, plateau=86.9), "tripped", ("growth",)),
        (gpu(8, used=88) | {"gauges": RESERVES}, "ok", ()),
        (gpu(8, used=88) | {"gauges": TAKES_AS_IT_GOES}, "tripped", ("used_ratio",)),
        (gpu(8, used=83) | {"gauges": TAKES_AS_IT_GOES}, "rising", ()),
        (gpu(8, used=88, plateau=80) | {"gauges": TAKES_AS_IT_GOES}, "tripped", ("used_ratio",)),
        (gpu(8) | {"gauges": {catalog.GPU_UP: {("0", "u"): 1.0, ("1", "v"): 0.0}}}, "unknown", ()),
        ({"readings": PAGE | reading("gpu", "gpu", "library_not_found")}, "unknown", ()),
        ({}, "unknown", ()),
    ],
)
def test_the_memory_line(known, state: str, reasons: tuple[str, ...]) -> None:
    verdict = judge(evidence(**known))[2]
    assert (verdict.state, verdict.reasons) == (state, reasons)
    assert (verdict.remedy != "") == (state == "unknown")

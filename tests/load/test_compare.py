"""Runs beside each other: the four rules, what is refused, and the table."""

import json
import math
from typing import Any

import pytest
from measured import engine, level
from msgspec.structs import replace

from exporter.load import compare, report, result, table
from exporter.load.compare import Rules, Stop
from exporter.load.result import File, Level, Memory, Run
from exporter.strictyaml import ConfigError

CARD = 80e9


def run(
    value: str, latency: float, *, used: float = 0.95, talk: float | None = 0.1, **conditions: Any
) -> tuple[str, Run]:
    """One level of 32 clients: throughput is their number over the latency; the GPU needs so much of its memory."""
    gpu = Memory(CARD, CARD * used, CARD * used, None, 0.9)
    one = level(32, [latency] * 400, engine=engine(gpu=gpu, communication_share=talk))
    return f"tp{value}.json", Run({"model": "hy3", "seed": 1, "parallelism": f"TP {value} / PP 1"} | conditions, [one])


def judged(*runs: tuple[str, Run], **rules: float) -> compare.Comparison:
    return compare.compare(runs, Rules(**rules))


def test_where_every_step_pays_it_goes_on() -> None:
    found = judged(run("4", 0.3), run("1", 1.0), run("2", 0.55))
    assert [step.value for step in found.steps] == ["TP 1 / PP 1", "TP 2 / PP 1", "TP 4 / PP 1"]
    assert [step.gain for step in found.steps] == [
        None,
        pytest.approx(0.818, abs=0.001),
        pytest.approx(0.833, abs=0.001),
    ]
    assert (found.stay, found.stops) == (None, ())
    assert found.verdict == "go on: no rule stops before parallelism TP 4 / PP 1"
    assert found.conditions == {"model": "hy3", "seed": 1, "concurrency": 32}


def test_the_memory_rule() -> None:
    """The first card has room: it holds the concurrency as it is."""
    found = judged(run("1", 1.0, used=0.6), run("2", 0.55))
    assert found.stay == "TP 1 / PP 1"
    assert found.stops == (
        Stop(
            "memory",
            "memory per GPU",
            "60% of the fullest GPU is needed at parallelism TP 1 / PP 1, under 90%: it holds this concurrency as it is",
        ),
    )
    assert judged(run("1", 1.0, used=0.6), run("2", 0.55), memory=0.5).stay is None


def test_the_gain_rule() -> None:
    found = judged(run("1", 1.0), run("2", 0.5), run("4", 0.46))
    assert found.stay == "TP 2 / PP 1"
    assert found.stops == (Stop("gain", "ΔT", "+8.7% throughput, under 20%"),)
    assert found.verdict == "stay at parallelism TP 2 / PP 1, because of column ΔT: +8.7% throughput, under 20%"
    assert judged(run("1", 1.0), run("2", 0.5), run("4", 0.46), gain=0.05).stay is None


def test_a_step_that_brings_no_throughput_but_a_much_shorter_p99_pays() -> None:
    (_, slow), (_, quick) = run("1", 1.0), run("2", 1.0)
    tail = level(32, [1.0] * 380 + [4.0] * 20, engine=slow.levels[0].engine)
    runs = [("a", Run(slow.conditions, [tail])), ("b", quick)]
    assert compare.compare(runs, Rules(gain=0.3)).stay is None


def test_the_tail_rule() -> None:
    """The throughput grows by 30 %, P99 by 60 %: that is stability paid for throughput."""
    (_, before), (_, after) = run("1", 1.0), run("2", 0.7)
    worse = level(32, [0.7] * 390 + [1.6] * 10, engine=after.levels[0].engine)
    found = compare.compare([("a", before), ("b", Run(after.conditions, [worse]))], Rules())
    assert found.stops == (Stop("tail", "ΔP99", "P99 +60.0%, above 10% and more than the throughput (+38.4%)"),)
    loose = compare.compare([("a", before), ("b", Run(after.conditions, [worse]))], Rules(tail=0.7))
    assert loose.stay is None


def test_the_communication_rule() -> None:
    found = judged(run("1", 1.0, talk=0.2), run("2", 0.6, talk=0.6))
    assert found.stops == (Stop("communication", "communication", "60% of a step, up from 20%, above 50%"),)
    assert judged(run("1", 1.0, talk=0.7), run("2", 0.6, talk=0.6)).stay is None  # it falls
    assert judged(run("1", 1.0, talk=None), run("2", 0.6, talk=0.4)).stay is None
    assert judged(run("1", 1.0, talk=0.2), run("2", 0.6, talk=0.6), communication=0.7).stay is None


def test_several_rules_are_told_together() -> None:
    found = judged(run("1", 1.0, used=0.5, talk=0.1), run("2", 1.2, talk=0.6))
    assert [stop.rule for stop in found.stops] == ["memory", "gain", "tail", "communication"]


def test_errors_stop_whatever_the_throughput() -> None:
    (_, before), (_, after) = run("1", 1.0), run("2", 0.5)
    failing = level(32, [0.5] * 399 + [math.inf], engine=after.levels[0].engine)
    found = compare.compare([("a", before), ("b", Run(after.conditions, [failing]))], Rules())
    assert found.stops == (Stop("errors", "errors", "1 requests failed at parallelism TP 2 / PP 1"),)


def test_what_failed_is_nothing_to_compare_with() -> None:
    (_, before), after = run("1", 1.0), run("2", 0.5)
    failing = level(32, [0.5] * 399 + [math.inf])
    with pytest.raises(ConfigError) as refused:
        compare.compare([("a", Run(before.conditions, [failing])), after], Rules())
    assert refused.value.problems == (
        "parallelism TP 1 / PP 1: 1 requests failed, so nothing can be compared with it; make it anew",
    )


def test_a_step_of_which_nothing_is_known_is_not_judged() -> None:
    (_, before), (_, after) = run("1", 1.0, used=0.95), run("2", 0.5)
    untold = replace(
        after.levels[0],
        tokens_per_second=None,
        requests_per_second=None,
        latency=replace(after.levels[0].latency, p99=None),
    )
    with pytest.raises(ConfigError) as refused:
        compare.compare([("a", before), ("b", Run(after.conditions, [untold]))], Rules())
    assert refused.value.problems == (
        "parallelism TP 2 / PP 1: neither throughput nor P99 can be compared with the step before",
    )


def test_a_level_that_was_cut_short_is_not_compared_unless_it_failed() -> None:
    (small,), (large,) = levels(8), levels(16)
    other = ("b", Run({"batch": 2}, [small, large]))
    cut = ("a", Run({"batch": 1}, [small, replace(large, complete=False)]))
    assert compare.compare([cut, other], Rules()).steps[0].level.concurrency == 8
    with pytest.raises(ConfigError) as refused:
        compare.compare([cut, other], Rules(), concurrency=16)
    assert refused.value.problems == ("a: concurrency 16 was cut short; make it anew, or give another",)
    failed = ("b", Run({"batch": 2}, [small, replace(large, complete=False, errors={"timeout": 10})]))
    whole = ("a", Run({"batch": 1}, [small, large]))
    found = compare.compare([whole, failed], Rules())
    assert (found.steps[0].level.concurrency, found.stops[0].rule) == (16, "errors")


def test_a_larger_batch_must_stay_under_the_memory_line() -> None:
    runs = [run("1", 1.0 / n, used=0.5 + n / 10, batch=n) for n in (1, 2, 4)]
    found = compare.compare(runs, Rules())
    assert (found.variable, found.stay) == ("batch", "2")
    assert found.stops == (Stop("memory", "memory per GPU", "90% of the fullest GPU, the line is 90%"),)


def test_runs_that_differ_in_two_variables_are_refused_by_name() -> None:
    runs = [run("1", 1.0, dtype="float16"), run("2", 0.5, dtype="int8")]
    with pytest.raises(ConfigError) as error:
        compare.compare(runs, Rules())
    assert error.value.problems == (
        "the runs differ in 2 variables, and only one may: parallelism, dtype",
        "parallelism: tp1.json has TP 1 / PP 1, tp2.json has TP 2 / PP 1",
        "dtype: tp1.json has float16, tp2.json has int8",
        "make the runs anew with all but one alike, or name what makes no difference with --ignore",
    )
    assert compare.compare(runs, Rules(), ignore=("dtype",)).variable == "parallelism"


@pytest.mark.parametrize("key", ["model", "dtype", "input_tokens", "output_tokens", "seed", "max_running_requests"])
def test_each_fixed_condition_is_watched(key: str) -> None:
    with pytest.raises(ConfigError, match=f"only one may: .*{key}"):
        compare.compare([run("1", 1.0, **{key: 1024}), run("2", 0.5, **{key: 2048})], Rules())


def test_a_number_is_the_same_however_it_is_written() -> None:
    assert judged(run("1", 1.0, max_model_len=512), run("2", 0.5, max_model_len=512.0)).variable == "parallelism"


@pytest.mark.parametrize(
    ("latencies", "certain"),
    [
        ([2.0] * 60, True),
        ([0.5] * 60, True),
        ([1.0] * 59 + [9.0], False),
        ([1.0] * 56 + [9.0] * 4, True),
        ([1.0] * 58 + [math.inf] * 2, True),
    ],
)
def test_a_p99_of_few_requests_may_be_noise(latencies: list[float], certain: bool) -> None:
    runs = [(str(n), Run({"batch": n}, [level(2, values)])) for n, values in enumerate(([1.0] * 60, latencies))]
    assert compare.compare(runs, Rules()).steps[1].certain is certain


def test_what_only_one_run_tells_is_named() -> None:
    assert judged(run("1", 1.0, gpu="H20"), run("2", 0.5)).untold == ("gpu",)


def levels(*concurrency: int) -> list[Level]:
    return [level(n, [1.0] * 100) for n in concurrency]


def test_the_highest_common_level_is_compared_or_the_one_asked_for() -> None:
    runs = [("a", Run({"batch": 1}, levels(1, 8, 16))), ("b", Run({"batch": 2}, levels(1, 8, 32)))]
    assert compare.compare(runs, Rules()).steps[0].level.concurrency == 8
    assert compare.compare(runs, Rules(), concurrency=1).steps[0].level.concurrency == 1
    with pytest.raises(ConfigError, match="b: has no level of concurrency 16"):
        compare.compare(runs, Rules(), concurrency=16)
    runs = [("a", Run({}, levels(1, 8))), ("b", Run({}, levels(2, 4)))]
    with pytest.raises(ConfigError, match="no concurrency is whole in all results: a has 1, 8, b has 2, 4"):
        compare.compare(runs, Rules())


def test_runs_of_one_level_each_may_vary_the_concurrency() -> None:
    runs = [(str(n), Run({"batch": 4}, levels(n))) for n in (8, 2, 4)]
    found = compare.compare(runs, Rules())
    assert (found.variable, [step.value for step in found.steps]) == ("concurrency", ["2", "4", "8"])


def test_alike_runs_are_compared_in_the_order_given() -> None:
    runs = [("new.json", Run({"model": "m"}, levels(4))), ("old.json", Run({"model": "m"}, levels(4)))]
    found = compare.compare(runs, Rules())
    assert (found.variable, [step.value for step in found.steps]) == ("run", ["new.json", "old.json"])
    with pytest.raises(ConfigError, match="give two results or more"):
        compare.compare(runs[:1], Rules())
    with pytest.raises(ConfigError, match=r"old.json: holds no level"):
        compare.compare([runs[0], ("old.json", Run({}, []))], Rules())


def test_the_table_and_the_record_of_each_pair(golden) -> None:
    found = judged(run("1", 1.0), run("2", 0.5), run("4", 0.46, talk=0.3), run("8", 0.5, talk=0.6))
    golden("compare.txt", "\n".join(report.comparison(found, table.text)) + "\n")
    golden("compare.md", "\n".join(report.comparison(found, table.markdown)) + "\n")
    told = json.loads(result.encode(compare.as_json(found)))
    assert [told[key] for key in ("variable", "stay", "verdict")] == ["parallelism", "TP 2 / PP 1", found.verdict]
    assert told["stops"] == [{"rule": "gain", "column": "ΔT", "why": "+8.7% throughput, under 20%"}]
    assert [step["value"] for step in told["steps"]] == [f"TP {n} / PP 1" for n in (1, 2, 4, 8)]


def test_a_sweep_has_a_table_for_each_variable() -> None:
    runs = [Run({"batch": n}, levels(2), varied="batch") for n in (1, 2)]
    runs += [Run({"batch": 4}, levels(n), varied="concurrency") for n in (1, 8)]
    lines = list(report.sweep(File(1, runs, ["batch", "concurrency"]), table.text))
    assert [line.split()[:3] for line in lines if line] == [
        ["step", "batch", "concurrency"],
        ["baseline", "1", "2"],
        ["2", "2", "2"],
        ["step", "concurrency", "T"],
        ["baseline", "1", "10.0"],
        ["2", "8", "10.0"],
    ]

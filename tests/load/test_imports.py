"""What other load generators wrote; the fixtures were made for real (fixtures/load/CAPTURED.md)."""

import json
import math
from pathlib import Path

import pytest
from measured import level

from exporter.load import imports, result
from exporter.load.result import Level, Quantiles, Run
from exporter.strictyaml import ConfigError

FIXTURES = Path(__file__).parent.parent / "fixtures" / "load"


def only(name: str, end: str = "") -> Run:
    ((_, run),) = imports.read(f"{FIXTURES / name}{end}")
    assert len(run.levels) == 1
    return run


def rounded(quantiles: Quantiles) -> tuple[float | None, ...]:
    """P50, P95, P99 and the mean, in ms."""
    told = (quantiles.p50, quantiles.p95, quantiles.p99, quantiles.mean)
    return tuple(None if value is None else round(value * 1000, 2) for value in told)


def test_the_text_of_hey() -> None:
    run = only("hey.txt", "@concurrency=4,parallelism=2")
    assert run.conditions == {"tool": "hey", "parallelism": 2}
    assert run.levels[0] == Level(
        concurrency=4,
        requests=100,
        passes=1,
        seconds=2.2452,
        latency=Quantiles(0.0818, 0.0992, 0.2354, 0.0896),
        first_token=Quantiles(),
        inter_token=Quantiles(),
        requests_per_second=pytest.approx(44.539, abs=0.001),
        tokens_per_second=None,
    )


def test_the_csv_of_hey() -> None:
    one = only("hey.csv", "@concurrency=4").levels[0]
    assert (one.requests, len(one.latencies), one.errors) == (100, 100, {})
    assert rounded(one.latency) == (81.7, 90.5, 97.35, 82.96)
    assert one.latency.p99_high == math.inf
    assert one.requests_per_second == pytest.approx(47.92, abs=0.01)


def test_failures_of_hey(tmp_path: Path) -> None:
    """Constructed from the two lists that a real run of it prints, one of refused connections and one of HTTP 404."""
    path = tmp_path / "hey.txt"
    path.write_text(
        (FIXTURES / "hey.txt").read_text().replace("[200]\t100 responses", "[200]\t90 responses\n  [503]\t4 responses")
        + 'Error distribution:\n  [5]\tPost "http://h/": context deadline exceeded (Client.Timeout exceeded)\n'
        + '  [1]\tPost "http://h/": dial tcp 127.0.0.1:9: connect: connection refused\n'
    )
    ((_, run),) = imports.read(f"{path}@concurrency=4")
    assert run.levels[0].errors == {"http_503": 4, "timeout": 5, "connection": 1}
    assert run.levels[0].requests == 100
    assert run.levels[0].requests_per_second == pytest.approx(90 / 2.2452)
    path.write_text(f"{(FIXTURES / 'hey.csv').read_text()}9.0,0,0,0,0,0,500,0.5\n")
    ((_, run),) = imports.read(f"{path}@concurrency=4")
    assert (run.levels[0].errors, run.levels[0].latency.p99) == ({"http_500": 1}, pytest.approx(math.inf))


def test_vllm_bench_serve() -> None:
    run = only("vllm-0.32.0.json")
    assert run.conditions == {"tool": "vllm bench serve", "model": "tiny", "input_tokens": 4}
    one = run.levels[0]
    assert (one.concurrency, one.requests, len(one.latencies), one.errors) == (8, 80, 80, {})
    assert rounded(one.latency) == (191.55, 205.68, 206.1, 193.49)
    assert rounded(one.first_token) == (18.34, 29.99, 30.43, 19.6)
    assert rounded(one.inter_token) == (5.62, 5.81, 5.96, 5.61)
    assert (round(one.requests_per_second or 0, 2), round(one.tokens_per_second or 0, 1)) == (40.79, 1305.2)


def test_an_older_vllm_tells_quantiles_alone_and_failures_count(tmp_path: Path) -> None:
    """Constructed: the same without its list of latencies, P99 only, and with failures."""
    document = json.loads((FIXTURES / "vllm-0.32.0.json").read_text())
    for key in ("latencies", "p50_e2el_ms", "p95_e2el_ms"):
        del document[key]
    path = tmp_path / "vllm.json"
    path.write_text(json.dumps(document | {"failed": 2, "num_prompts": 82, "request_rate": 3.0}))
    ((_, run),) = imports.read(str(path))
    assert rounded(run.levels[0].latency) == (191.55, None, 205.98, 193.49)
    assert run.levels[0].errors == {"failed": 2}
    assert run.conditions["request_rate"] == 3.0
    document = json.loads((FIXTURES / "vllm-0.32.0.json").read_text())
    path.write_text(json.dumps(document | {"failed": 2, "num_prompts": 82}))
    ((_, run),) = imports.read(str(path))
    assert (len(run.levels[0].latencies), run.levels[0].latency.p99) == (82, math.inf)


def test_guidellm() -> None:
    run = only("guidellm-0.8.1.json")
    assert run.conditions == {"tool": "GuideLLM", "model": "tiny", "input_tokens": 8}
    one = run.levels[0]
    assert (one.concurrency, one.requests, one.errors) == (4, 60, {})
    assert rounded(one.latency) == (82.67, 88.37, 96.01, 83.74)
    assert rounded(one.first_token) == (11.39, 17.59, 21.79, 11.83)
    assert rounded(one.inter_token) == (4.75, 4.87, 5.05, 4.75)
    assert (round(one.requests_per_second or 0, 2), round(one.tokens_per_second or 0, 1)) == (43.41, 694.6)


def test_guidellm_with_several_rates_of_an_open_loop(tmp_path: Path) -> None:
    """Constructed from the real report: two benchmarks of other strategies."""
    document = json.loads((FIXTURES / "guidellm-0.8.1.json").read_text())
    one, other = (json.loads(json.dumps(document["benchmarks"][0])) for _ in range(2))
    one["config"]["strategy"] = {"type_": "synchronous"}
    other["config"]["strategy"] = {"type_": "constant", "rate": 40}
    document["benchmarks"] = [one, other]
    path = tmp_path / "report.json"
    path.write_text(json.dumps(document))
    (first, _), (second, last) = imports.read(str(path))
    assert (first, second) == ("report.json #1", "report.json #2")
    assert last.levels[0].concurrency == 4  # on average


def test_aiperf() -> None:
    run = only("aiperf-0.13.0.json")
    assert run.conditions == {"tool": "AIPerf", "model": "tiny", "input_tokens": 16}
    one = run.levels[0]
    assert (one.concurrency, one.requests, one.errors) == (4, 60, {})
    assert rounded(one.latency) == (83.13, 92.2, 101.22, 84.34)
    assert rounded(one.first_token) == (12.4, 20.59, 25.98, 13.39)
    assert (round(one.requests_per_second or 0, 2), round(one.tokens_per_second or 0, 1)) == (
        41.7,
        2001.6,
    )  # by a tokenizer of its own


def test_an_older_aiperf(tmp_path: Path) -> None:
    """Constructed: the settings as version 0.3 has them, and failed requests."""
    document = json.loads((FIXTURES / "aiperf-0.13.0.json").read_text())
    document["input_config"] = {"endpoint": {"model_names": ["m"]}, "loadgen": {"concurrency": 16}}
    document["error_request_count"] = {"unit": "requests", "avg": 3}
    path = tmp_path / "profile_export_aiperf.json"
    path.write_text(json.dumps(document))
    ((_, run),) = imports.read(str(path))
    assert (run.conditions["model"], run.levels[0].concurrency, run.levels[0].errors) == ("m", 16, {"failed": 3})
    assert run.levels[0].requests == 63


def test_our_own(tmp_path: Path) -> None:
    path = tmp_path / "a@b=c.json"
    run = Run({"model": "m"}, [level(2, [1.0] * 60)])
    result.write(path, result.File(1, [run]))
    assert imports.read(str(path)) == [("a@b=c.json", run)]
    assert imports.read(f"{path}@model=n")[0][1].conditions == {"model": "n"}


@pytest.mark.parametrize(
    ("text", "end", "problem"),
    [
        (
            "hello",
            "",
            "{}: not a result of stopline ramp, hey (text or CSV), vllm bench serve, GuideLLM or AIPerf",
        ),
        ('{"a": 1}', "", "{}: not a result of stopline ramp, hey (text or CSV), vllm bench serve, GuideLLM or AIPerf"),
        ("{", "", "{}: not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (
            '{"request_throughput": 1}',
            "",
            "{}: looks like a result of vllm bench serve or AIPerf, but lacks 'num_prompts'",
        ),
        ('{"benchmarks": [{}]}', "", "{}: looks like a report of GuideLLM, but lacks 'metrics'"),
        (
            "response-time,x\n",
            "",
            "{0}: hey does not tell how many clients it had: write {0}@concurrency=N",
        ),
        ("hello", "@a=", "{}@a=: behind @ must stand key=value,…, got 'a='"),
    ],
)
def test_what_is_no_result(text: str, end: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        imports.read(f"{path}{end}")
    assert error.value.problems == (problem.format(path),)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        imports.read(str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        imports.read(str(tmp_path))
    with pytest.raises(ConfigError, match="is of another concurrency than 9"):
        imports.read(f"{FIXTURES / 'vllm-0.32.0.json'}@concurrency=9")

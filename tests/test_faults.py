"""Each fault of FAULTS.md has tests, and they exist; and those faults that have no better place."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import Reader
from incidents import judge
from replay import evaluate
from rules import generate
from scenarios import SCENARIOS

from exporter import catalog
from exporter.refine import Window, values

HERE = Path(__file__).parent
ROWS = re.findall(r"(?m)^\| (F\d\d) \| .+? \| (.+) \|$", (HERE / "FAULTS.md").read_text())
VLLM_WAITS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0)


def test_every_fault_is_in_the_table_once_and_in_order() -> None:
    assert [fault for fault, _ in ROWS] == [f"F{n:02}" for n in range(1, 52)]


@pytest.mark.parametrize(("fault", "tests"), ROWS, ids=[fault for fault, _ in ROWS])
def test_the_tests_of_a_fault_exist(fault: str, tests: str) -> None:
    named = re.findall(r"`([^`]+)`", tests)
    assert named
    missing = [name for name in named if not _exists(name)]
    assert not missing


def _exists(name: str) -> bool:
    path, _, what = name.partition("::")
    if path == "scenarios.py":
        return what in {scenario.name for scenario in SCENARIOS}
    if path.startswith("deploy/rules/"):
        return (HERE.parent / path).is_file()
    return what in _functions(HERE / path)


@cache
def _functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, _FUNCTIONS)}


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def test_f03_five_times_as_slow_within_one_coarse_bucket_is_five_times_as_slow() -> None:
    """The engine's own buckets show 0.297 s for both."""
    means = []
    for seconds in (0.05, 0.25):
        placed = values(Window(VLLM_WAITS, (100, *[0] * len(VLLM_WAITS)), 100 * seconds))
        assert placed is not None
        means.append(max(value for value, _ in placed))
    assert means[1] / means[0] == pytest.approx(5.0, rel=0.15)


def test_f35_among_a_flood_of_probes_the_one_answer_with_500_counts() -> None:
    probe = 'INFO:     127.0.0.1:40000 - "GET /{} HTTP/1.1" 200 OK\n'
    flood = "".join(probe.format(path) for path in ("metrics", "health", "v1/models") * 1000)
    failed = 'INFO:     10.0.0.1:40000 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error\n'
    assert Reader("vllm").feed(flood + failed + flood).settle().errors == {"server_error": 1}


def test_f38_no_family_has_a_label_that_is_the_targets() -> None:
    ours = {label for family in catalog.FAMILIES for label in family.labels}
    assert not ours & {"pod", "namespace", "node", "instance", "job", "container", "host"}


def test_f41_scraped_once_a_minute_the_same_pages_come(tmp_path: Path) -> None:
    """As long as in production, and judged once a minute."""
    wanted = ("healthy", "overload", "hang-calm", "engine-dead")
    scenarios = [scenario for scenario in SCENARIOS if scenario.name in wanted]
    assert len(scenarios) == len(wanted)
    played = [scenario.played_at(6.0).play(10.0) for scenario in scenarios]
    rules = tmp_path / "rules.yaml"
    rules.write_text(generate("--form", "rules"))
    assert {v.name: set(v.paged) for v in judge(played, [rules])} == {s.name: set(s.pages) for s in scenarios}


def test_f43_a_mean_over_replicas_is_that_of_the_requests() -> None:
    """One replica answers 1000 requests in 0.1 s, another one 20 in 10 s: 2 % of all are slow, so P99 is 10 s."""
    series: dict[tuple[str, tuple[tuple[str, str], ...]], list[float | None]] = defaultdict(list)
    for pod, per_scrape, fast in (("a", 50.0, True), ("b", 1.0, False)):
        own = (("instance", pod), ("job", "stopline"), ("pod", pod))
        for n in range(41):
            series["stopline_engine_info", (*own, ("config", "c"), ("model", "m"))].append(1.0)
            for le in ("0.1", "9.9", "10.0", "+Inf"):
                told = n * per_scrape if fast or le in ("10.0", "+Inf") else 0.0
                series["stopline_request_latency_seconds_bucket", (*own, ("le", le), ("model", "m"))].append(told)
    replica = SimpleNamespace(series=series, every=15.0, samples=41)
    query = "stopline:request_latency_seconds:p99_5m_by_config"
    answers = evaluate([replica], ["replicas", "latency"], {query: [540.0]})  # type: ignore[list-item]
    ((_, value),) = answers[query, 540.0]
    assert 9.9 <= value <= 10.0

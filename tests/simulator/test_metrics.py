"""The page against the truth, and against the page of a real vLLM."""

import re
from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from exporter.simulator import Engine, EngineConfig, Page, Poisson, Request, RequestRecord, Truth
from exporter.simulator.load import Load, mixture, requests, uniform
from exporter.simulator.metrics import token_bounds

CAPTURE = Path(__file__).parents[1] / "fixtures/vllm/0.32.0-hy3/metrics-queueing.txt"

MIX = mixture(
    (0.5, requests(uniform(1, 200), uniform(1, 150), aborted=0.2)),
    (0.5, requests(uniform(1, 400), uniform(1, 200), ignore_eos=True)),
)


def sample(page: str, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(page):
        for found in family.samples:
            if found.name == name and labels.items() <= found.labels.items():
                return found.value
    raise AssertionError(f"{name} {labels} is not on the page")


def buckets(page: str, name: str) -> dict[float, float]:
    """Cumulative counts by bound."""
    return {
        float(found.labels["le"]): found.value
        for family in text_string_to_metric_families(page)
        for found in family.samples
        if found.name == f"{name}_bucket"
    }


def put_into(bounds: list[float], values: list[float]) -> dict[float, float]:
    counts = Counter(bisect_left(bounds, value) for value in values)
    return dict(zip(bounds, accumulate(counts[index] for index in range(len(bounds))), strict=True))


class Run:
    """A busy server with preemptions, aborts and refusals, at its end."""

    def __init__(self) -> None:
        self.engine = Engine(EngineConfig.tiny(max_queued_requests=12), seed=3)
        self.truth, page = Truth(self.engine), Page(self.engine)
        load: Load = Poisson(9.0, mix=MIX, seed=3)
        load.start(self.engine)
        self.engine.advance(200)
        load.stop()
        self.engine.advance(300)
        self.page = page.render()

    @property
    def completed(self) -> list[RequestRecord]:
        return [record for record in self.truth.requests if record.completed]


@pytest.fixture(scope="module")
def run() -> Run:
    return Run()


def test_the_run_has_everything(run: Run) -> None:
    reasons = Counter(record.finish_reason for record in run.truth.requests)
    assert set(reasons) == {"stop", "length", "abort", "queue_full", "too_long"}
    assert sum(record.preemptions for record in run.truth.requests) > 0


def test_counters_equal_the_truth(run: Run) -> None:
    records, page = run.truth.requests, run.page
    reasons = Counter(record.finish_reason for record in records)
    for reason in ("stop", "length"):
        assert sample(page, "vllm:request_success_total", finished_reason=reason) == reasons[reason]
    for reason in ("abort", "error", "repetition"):
        assert sample(page, "vllm:request_success_total", finished_reason=reason) == 0
    assert sample(page, "vllm:generation_tokens_total") == sum(r.generated_tokens for r in records)
    began = [record for record in records if record.first_token is not None]
    assert sample(page, "vllm:prompt_tokens_total") == sum(record.prompt_tokens for record in began)
    assert sample(page, "vllm:num_preemptions_total") == sum(record.preemptions for record in records)
    rejected = sample(page, "vllm:admission_rejections_total", reason="max_num_queued_reqs")
    assert rejected == reasons["queue_full"]
    statuses = Counter(f"{record.http_status // 100}xx" for record in records)
    for status, count in statuses.items():
        path = "/v1/completions"
        assert sample(page, "http_requests_total", handler=path, method="POST", status=status) == count
    longer = sum(record.finished - record.arrival > 1.0 for record in records)
    family, labels = "http_request_duration_seconds", {"handler": "/v1/completions", "method": "POST"}
    quick = sample(page, f"{family}_bucket", le="1.0", **labels)
    assert 0 < longer == sample(page, f"{family}_count", **labels) - quick < len(records)


@pytest.mark.parametrize(
    ("family", "value"),
    [
        ("vllm:e2e_request_latency_seconds", lambda r: r.latency),
        ("vllm:request_queue_time_seconds", lambda r: r.queue_wait),
        ("vllm:request_prefill_time_seconds", lambda r: r.first_token - r.scheduled),
        ("vllm:request_decode_time_seconds", lambda r: r.finished - r.first_token),
        ("vllm:request_inference_time_seconds", lambda r: r.finished - r.scheduled),
        ("vllm:request_prompt_tokens", lambda r: r.prompt_tokens),
        ("vllm:request_generation_tokens", lambda r: r.generated_tokens),
        ("vllm:request_num_preemptions", lambda r: r.preemptions),
        ("vllm:request_params_max_tokens", lambda r: r.max_tokens),
    ],
)
def test_request_histograms_are_the_truth_put_into_their_bounds(run: Run, family: str, value) -> None:
    values = [value(record) for record in run.completed]
    found = buckets(run.page, family)
    assert found == put_into(list(found), values)
    assert sample(run.page, f"{family}_count") == len(values)
    assert sample(run.page, f"{family}_sum") == pytest.approx(sum(values))


def test_first_token_histogram_includes_the_aborted(run: Run) -> None:
    values = run.truth.values("time_to_first_token")
    assert len(values) > len(run.completed)
    found = buckets(run.page, "vllm:time_to_first_token_seconds")
    assert found == put_into(list(found), values)


def test_token_gaps_add_up_to_the_decode_times(run: Run) -> None:
    """As recorded from a real server: with nothing in flight and no abort the two sums are equal."""
    engine = Engine(EngineConfig.tiny())
    page = Page(engine)
    for _ in range(5):
        engine.submit(Request(prompt_tokens=150, output_tokens=100))
    engine.advance(60)
    text = page.render()
    assert sample(text, "vllm:num_preemptions_total") > 0
    gaps = sample(text, "vllm:inter_token_latency_seconds_sum")
    assert gaps == pytest.approx(sample(text, "vllm:request_decode_time_seconds_sum"))
    assert sample(text, "vllm:inter_token_latency_seconds_count") == 5 * 99
    generated = sample(run.page, "vllm:generation_tokens_total")
    first = sample(run.page, "vllm:time_to_first_token_seconds_count")
    assert sample(run.page, "vllm:inter_token_latency_seconds_count") == generated - first


def test_iteration_tokens_hold_every_token_once(run: Run) -> None:
    total = sample(run.page, "vllm:prompt_tokens_total") + sample(run.page, "vllm:generation_tokens_total")
    assert sample(run.page, "vllm:iteration_tokens_total_sum") == total
    assert sample(run.page, "vllm:iteration_tokens_total_count") <= run.engine.steps


def test_gauges_freeze_when_the_engine_dies() -> None:
    engine = Engine(EngineConfig.tiny())
    page = Page(engine)
    for _ in range(12):
        engine.submit(Request(prompt_tokens=40, output_tokens=64))
    engine.advance(0.1)
    engine.fail("engine_dead")
    engine.advance(100)
    text = page.render()
    assert sample(text, "vllm:num_requests_running") == 8
    assert sample(text, "vllm:num_requests_waiting") == 4
    assert sample(text, "vllm:num_requests_waiting_by_reason", reason="capacity") == 4
    assert 0.2 < sample(text, "vllm:kv_cache_usage_perc") < 1
    assert sample(text, "vllm:e2e_request_latency_seconds_count") == 0


def test_restart_begins_at_zero_with_a_later_start_time() -> None:
    engine = Engine(EngineConfig.tiny())
    page = Page(engine, epoch=1_796_000_000)
    engine.submit(Request(prompt_tokens=40, output_tokens=64))
    engine.advance(10)
    assert sample(page.render(), "vllm:generation_tokens_total") == 64
    engine.restart()
    text = page.render()
    assert sample(text, "vllm:generation_tokens_total") == 0
    assert sample(text, "process_start_time_seconds") == 1_796_000_010


def test_everything_known_beforehand_is_there_at_zero_and_http_is_not() -> None:
    text = Page(Engine(EngineConfig.tiny())).render()
    assert "http_requests_total{" not in text
    assert "http_requests_created" not in text
    assert sample(text, "vllm:request_success_total", finished_reason="stop") == 0
    assert sample(text, "vllm:cache_config_info", num_gpu_blocks="65", block_size="16") == 1


def types(page: str) -> dict[str, str]:
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", page, re.MULTILINE))


def series(page: str) -> set[str]:
    """Names with their label names, and the bounds, without the values of this server's labels."""
    names = re.findall(r"^(vllm:[^ ]+) ", page, re.MULTILINE)
    return {re.sub(r'model_name="[^"]*"', "model_name", name) for name in names}


def test_page_has_the_families_of_a_real_server_in_its_order() -> None:
    real, ours = types(CAPTURE.read_text()), types(Run().page)
    assert ours.items() <= real.items()
    assert [name for name in real if name in ours] == list(ours)
    assert {name for name in real if name.startswith("vllm:")} <= ours.keys()


def test_page_has_the_series_of_a_real_server() -> None:
    """The recorded one was started with --max-model-len 512, as tiny is."""
    real = {name for name in series(CAPTURE.read_text()) if "cache_config_info" not in name}
    ours = {name for name in series(Run().page) if "cache_config_info" not in name}
    assert ours == real


def test_token_bounds() -> None:
    assert token_bounds(512) == (1, 2, 5, 10, 20, 50, 100, 200, 500)
    assert token_bounds(32_768)[-3:] == (5000, 10_000, 20_000)

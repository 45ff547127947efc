"""vLLM itself, serving Tencent's Hy3 architecture with tiny random weights on the CPU, with the sidecar beside it.

Run by ``make test-engine``.
"""

import asyncio
import os
import signal
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import pytest
from load import Seen, closed_loop, p50
from load import drive as drive_elsewhere
from pager import Pager
from realengine import VLLM_SLOTS, Page, Server, Watcher, free_port, traced_watcher, until, vllm, with_traces

pytestmark = pytest.mark.engine

TOKENS = 32
LEVELS = ((1, 16), (4, 40), (16, 80), (32, 96))
ATTEMPTS = 4  # one of them in a quiet moment: on two shared cores the client is starved at times


@pytest.fixture(scope="module")
def otlp_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(tmp_path_factory, otlp_port: int):
    traces, environment = with_traces(otlp_port)
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    try:
        server = vllm(log, "--enable-logging-iteration-details", "--enable-log-requests", *traces, **environment)
    except subprocess.CalledProcessError as error:
        pytest.fail(f"vLLM cannot be installed here: {error}")
    with server:
        yield server


@pytest.fixture(scope="module")
def pins(server: Server) -> Path:
    path = server.log.with_name("baseline.yaml")
    path.write_text("pins: []\n")
    return path


@pytest.fixture(scope="module")
def watcher(server: Server, pins: Path):
    arguments = ("--engine-url", server.url, "--log", str(server.log), "--gpus", "none", "--pin", str(pins))
    with Watcher(*arguments) as watcher:
        yield watcher


@pytest.fixture(scope="module")
def pager(watcher: Watcher, tmp_path_factory):
    """Started with the first test that is about pages."""
    with Pager(watcher.port, tmp_path_factory.mktemp("pager")) as pager:
        yield pager


@pytest.fixture(scope="module")
def page_only(server: Server):
    """A second sidecar that has the metrics endpoint alone: its steps are the time between tokens."""
    with Watcher("--engine-url", server.url, "--gpus", "none") as watcher:
        yield watcher


@pytest.fixture(scope="module")
def traced(server: Server, otlp_port: int, tmp_path_factory):
    """A third one, to which the server sends its spans."""
    with traced_watcher(server, otlp_port, tmp_path_factory.mktemp("traced")) as watcher:
        yield watcher


def drive(watcher: Watcher, server: Server, concurrency: int, requests: int):
    return watcher.drive(server.url, "hy3", concurrency=concurrency, requests=requests, words=10, tokens=TOKENS)


def test_1_it_is_down_while_the_engine_loads_and_knows_it_afterwards(
    server: Server, watcher: Watcher, traced: Watcher
) -> None:
    page = watcher.page()
    assert page("engine_up") == 0
    assert page.all("engine_info") == {}
    server.start(180)
    until(lambda: watcher.page()("engine_up") == 1, 20, "engine up")
    page = watcher.settled()
    assert page("engine_info", engine="vllm", version="0.32.0", model="hy3", dtype="float32") == 1
    assert page("engine_phase", state="serving") == 1
    assert page("engine_limit", name="max_running_requests") == VLLM_SLOTS
    assert page("engine_limit", name="max_model_len") == 512
    assert page("parallelism", dimension="tensor") == 1
    assert page("kv_cache_capacity_tokens") > 50_000
    assert page.all("upstream_metric_missing") == {}
    assert page("requests_total", outcome="ok") == 0
    assert page.errors() == {}


def test_2_the_page_agrees_with_what_the_client_saw(
    server: Server, watcher: Watcher, page_only: Watcher, traced: Watcher
) -> None:
    drive(watcher, server, 4, 16)  # the first steps of a process are slow
    until(lambda: traced.page().all("request_latency_seconds_count", source="trace"), 20, "spans come")
    for concurrency, requests in LEVELS:
        for _ in range(ATTEMPTS):
            before, other_before, traced_before = watcher.settled(), page_only.settled(), quiet(traced)
            seen, most = drive(watcher, server, concurrency, requests)
            page, other = watcher.settled(), page_only.settled()
            gap = other.mean("step_latency_seconds", other_before, phase="decode", source="metrics")
            check_counts(seen, before, page)
            wrong = disagreements(concurrency, seen, most, before, page, gap)
            wrong += off_the_traces(concurrency, len(seen), (other_before, other), (traced_before, traced))
            if not wrong:
                break
        assert not wrong, f"c={concurrency}, {ATTEMPTS} times: {wrong}"
    assert watcher.page().errors() == {}


def quiet(traced: Watcher) -> Page:
    """The page once no more spans come: they are sent twice a second."""
    page = traced.page()
    while True:
        time.sleep(1.5)
        if (now := traced.page())("request_latency_seconds_count") == page("request_latency_seconds_count"):
            return now
        page = now


def off_the_traces(
    concurrency: int, requests: int, refined: tuple[Page, Page], traced: tuple[Page, Watcher]
) -> list[str]:
    """Where the quantiles that come of buckets and sums are not those of the requests' own times."""
    until(
        lambda: (
            traced[1].page()("request_latency_seconds_count", source="trace")
            == traced[0]("request_latency_seconds_count", source="trace") + requests
        ),
        20,
        "a span of each request",
    )
    page, off = traced[1].page(), []
    for name in ("request_latency_seconds", "request_time_to_first_token_seconds", "request_queue_wait_seconds"):
        for q in (0.5, 0.99):
            exact = page.quantile(q, name, traced[0], source="trace")
            told = refined[1].quantile(q, name, refined[0], source="metrics")
            print(f"c={concurrency:2}: P{100 * q:.0f} {name} {exact:.4f} s by traces, {told:.4f} s from buckets")
            if exact > 0.01 and not 0.8 < told / exact < 1.2:
                off.append(f"P{100 * q:.0f} {name}")
    return off


def check_counts(seen: list[Seen], before: Page, page: Page) -> None:
    assert {s.status for s in seen} == {200}

    def grew(name: str, **labels: str) -> float:
        return page(name, **labels) - before(name, **labels)

    assert grew("requests_total", outcome="ok") == grew("request_latency_seconds_count") == len(seen)
    assert grew("request_time_to_first_token_seconds_count") == grew("request_queue_wait_seconds_count") == len(seen)
    assert grew("tokens_total", kind="prompt") == sum(s.prompt_tokens for s in seen)
    assert grew("tokens_total", kind="generation") == sum(s.generated_tokens for s in seen)


def disagreements(
    concurrency: int, seen: list[Seen], most: dict[str, float], before: Page, page: Page, gap: float
) -> list[str]:
    """Which gauges and times cannot be, beside what the client saw; how exact they are, the traces tell.

    At times the server holds a whole answer back and sends its chunks at once: what the client saw is never earlier
    than what the engine did, and may be later by any amount.
    """

    def median(name: str, **labels: str) -> float:
        return page.quantile(0.5, name, before, **labels)

    latencies, firsts = [s.latency for s in seen], [s.first_token for s in seen]
    latency, first = median("request_latency_seconds"), median("request_time_to_first_token_seconds")
    step, queue = median("step_latency_seconds", phase="decode", source="log"), median("request_queue_wait_seconds")
    client_gap = p50([s.between_tokens for s in seen])
    print(
        f"c={concurrency:2}: P50 latency {latency:.3f} s (client {p50(latencies):.3f}), first token {first * 1000:.1f} ms "
        f"({p50(firsts) * 1000:.1f}), between tokens {gap * 1000:.1f} ms ({client_gap * 1000:.1f}), "
        f"decode step {step * 1000:.1f} ms, queue wait {queue * 1000:.1f} ms"
    )
    told = {
        "running": most["requests_running"] == min(concurrency, VLLM_SLOTS),
        "waiting": most["requests_waiting"] == pytest.approx(max(0, concurrency - VLLM_SLOTS), abs=1),
        "KV cache": 0 < most["kv_cache_usage_ratio"] < 0.1,
        "latency": 0.4 * p50(latencies) < latency < 1.1 * statistics.quantiles(latencies, n=20)[10],
        "mean latency": page.mean("request_latency_seconds", before) < 1.1 * statistics.fmean(latencies),
        "first token": first < 1.1 * statistics.quantiles(firsts, n=20)[10] + 0.02,
        "between tokens": 0.9 * step < gap < 1.3 * latency / (TOKENS - 1),
        "step": 0.3 * gap < step < 1.1 * gap,  # without prefills and scheduling between
        "queue": 0.4 * first < queue < first if concurrency > VLLM_SLOTS else queue < 0.1,
    }
    return [what for what, right in told.items() if not right]


async def leave(url: str, requests: int) -> None:
    """Ask for long answers and hang up after the first chunk."""
    body = {"model": "hy3", "prompt": "step queue token", "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with aiohttp.ClientSession() as session:
        for _ in range(requests):
            async with session.post(f"{url}/v1/completions", json=body) as response:
                await response.content.readline()
                response.close()


async def ask_too_much(url: str) -> int:
    body = {"model": "hy3", "prompt": "step " * 900, "max_tokens": 10}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        return response.status


def test_3_who_hangs_up_is_aborted_and_who_asks_too_much_is_rejected(server: Server, watcher: Watcher) -> None:
    before = watcher.settled()
    asyncio.run(leave(server.url, 3))
    assert asyncio.run(ask_too_much(server.url)) == 400
    until(lambda: watcher.page()("requests_running") == 0, 20, "nothing runs")
    page = watcher.settled()
    for outcome, count in (("ok", 0), ("aborted", 3), ("rejected", 1), ("error", 0)):
        assert page("requests_total", outcome=outcome) - before("requests_total", outcome=outcome) == count
    assert page.errors() == {}


def test_4_load_doubles_the_latency_and_a_page_goes_out(server: Server, pager: Pager, pins: Path) -> None:
    """Short answers, so that ten seconds of a calm server are enough requests to judge."""

    def load(concurrency: int, seconds: float) -> None:
        options = {"concurrency": concurrency, "requests": 1, "seconds": seconds, "tokens": 8}
        asyncio.run(drive_elsewhere(server.url, "hy3", **options))

    p99, baseline = "stopline:request_latency_seconds:p99_5m", "stopline:request_latency_seconds:p99_baseline"
    with ThreadPoolExecutor() as pool:
        calm = pool.submit(load, 2, 22.0)
        time.sleep(12.0)
        before = until(lambda: pager.value(p99), 20, "requests are judged")
        pins.write_text(f"pins:\n- {{signal: request, quantile: 0.99, seconds: {before:.3f}s}}\n")
        until(lambda: pager.value(baseline), 20, "the baseline is pinned")
        calm.result()
        assert pager.told() == set()

        overload = pool.submit(load, 40, 25.0)  # so many that a baseline twice what it should be does not matter
        page = pager.wait("StoplineLatencyDoubled", 60)
        print(page["annotations"]["description"])
        assert page["labels"] | {"severity": "critical", "line": "latency", "model": "hy3"} == page["labels"]
        assert page["annotations"]["description"].endswith("Cause: queue.")
        assert page["annotations"]["runbook_url"].endswith("/StoplineLatencyDoubled.md")
        overload.result()
        calm = pool.submit(load, 2, 25.0)
        pager.wait("StoplineLatencyDoubled", 60, status="resolved")
        calm.result()
        assert pager.told() == {"StoplineLatencyDoubled"}


async def drive_and_kill(server: Server) -> list[Seen]:
    load = asyncio.create_task(closed_loop(server.url, "hy3", concurrency=6, requests=6, tokens=400))
    await asyncio.sleep(1.0)
    core = [pid for pid, command in server.children().items() if "EngineCore" in command]
    assert len(core) == 1, server.children()
    os.kill(core[0], signal.SIGKILL)
    return await load


def test_5_a_killed_core_is_exactly_one_failure_and_a_page(server: Server, watcher: Watcher, pager: Pager) -> None:
    asyncio.run(drive_and_kill(server))
    until(lambda: watcher.page()("engine_up") == 0, 20, "engine down")
    until(lambda: watcher.page().errors() == {"engine_dead": 1.0}, 10, "one failure")
    page = watcher.page()
    assert page.all("requests_running") == page.all("requests_waiting") == page.all("kv_cache_usage_ratio") == {}
    assert page("engine_phase", state="dead") == 1
    assert "Kind: engine_dead." in pager.wait("StoplineEngineFailed", 30)["annotations"]["description"]
    until(lambda: watcher.page()("source_up", source="metrics") == 0, 10, "page gone")


def test_6_after_a_restart_counters_go_on_and_a_planned_stop_is_no_failure(server: Server, watcher: Watcher) -> None:
    server.stop(signal.SIGKILL)
    before = watcher.page()
    server.start(180)
    until(lambda: watcher.page()("engine_up") == 1, 20, "engine up again")
    seen, _ = drive(watcher, server, 4, 12)
    page = watcher.settled()
    assert page("requests_total", outcome="ok") == before("requests_total", outcome="ok") + len(seen)
    backwards = [
        key
        for key, value in before.samples.items()
        if key[0].endswith(("_total", "_bucket", "_count")) and page.samples.get(key, -1) < value
    ]
    assert backwards == []
    server.stop(signal.SIGTERM)
    until(lambda: watcher.page()("source_up", source="metrics") == 0, 20, "page gone")
    page = watcher.page()
    assert page.errors() == {"engine_dead": 1.0}
    assert (page("engine_phase", state="stopping"), page("engine_up")) == (1, 0)

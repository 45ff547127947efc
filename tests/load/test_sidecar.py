"""What the sidecar's pages say of a level."""

from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from exporter.load import sidecar
from exporter.load.result import Engine, Memory, Quantiles, Step
from exporter.load.sidecar import Page, Sidecar, Watch
from exporter.load.verdict import Limits
from exporter.sources.fetch import Unreadable

GPU = 'gpu="0",uuid="GPU-1"'


def page(**changes: float) -> Page:
    """A page with these numbers in place of zero."""
    return Page(text(**changes))


def text(**changes: float) -> str:
    at = {"n": 0.0, "running": 0.0, "waiting": 0.0, "kv": 0.1, "used": 70e9, "peak": 71e9, "cuda": 0.0, "gone": 0.0}
    at |= changes
    n = at["n"]
    return f"""\
# TYPE stopline_request_queue_wait_seconds histogram
stopline_request_queue_wait_seconds_bucket{{model="m",source="metrics",le="0.1"}} {n / 2}
stopline_request_queue_wait_seconds_bucket{{model="m",source="metrics",le="0.2"}} {n}
stopline_request_queue_wait_seconds_bucket{{model="m",source="metrics",le="+Inf"}} {n}
stopline_request_queue_wait_seconds_count{{model="m",source="metrics"}} {n}
stopline_request_queue_wait_seconds_sum{{model="m",source="metrics"}} {n * 0.1}
# TYPE stopline_step_latency_seconds histogram
stopline_step_latency_seconds_bucket{{model="m",phase="decode",source="metrics",le="0.02"}} {n}
stopline_step_latency_seconds_bucket{{model="m",phase="decode",source="metrics",le="+Inf"}} {n}
stopline_step_latency_seconds_count{{model="m",phase="decode",source="metrics"}} {n}
stopline_step_latency_seconds_sum{{model="m",phase="decode",source="metrics"}} {n * 0.01}
stopline_step_latency_seconds_bucket{{model="m",phase="prefill",source="metrics",le="0.02"}} 0
stopline_step_latency_seconds_bucket{{model="m",phase="prefill",source="metrics",le="+Inf"}} 0
stopline_step_latency_seconds_count{{model="m",phase="prefill",source="metrics"}} 0
stopline_step_latency_seconds_sum{{model="m",phase="prefill",source="metrics"}} 0
# TYPE stopline_errors_total counter
stopline_errors_total{{kind="cuda",source="log"}} {at["cuda"]}
stopline_errors_total{{kind="hang",source="log"}} 1
# TYPE stopline_preemptions_total counter
stopline_preemptions_total{{model="m"}} {at["gone"]}
# TYPE stopline_communication_seconds_total counter
stopline_communication_seconds_total{{model="m",op="all_reduce"}} {n * 0.3}
# TYPE stopline_step_seconds_total counter
stopline_step_seconds_total{{model="m",phase="decode"}} {n * 0.9}
stopline_step_seconds_total{{model="m",phase="prefill"}} {n * 0.3}
stopline_requests_running{{model="m",rank="0"}} {at["running"]}
stopline_requests_waiting{{model="m",rank="0"}} {at["waiting"]}
stopline_kv_cache_usage_ratio{{model="m",rank="0"}} {at["kv"]}
stopline_gpu_memory_total_bytes{{{GPU}}} 80e9
stopline_gpu_memory_used_bytes{{{GPU}}} {at["used"]}
stopline_gpu_memory_used_peak_bytes{{{GPU}}} {at["peak"]}
stopline_gpu_memory_effective_headroom_bytes{{{GPU}}} {90e9 - at["used"]}
stopline_gpu_memory_plateau_bytes{{{GPU}}} 69e9
stopline_gpu_utilization_ratio{{{GPU}}} 0.5
stopline_engine_preallocates_memory 1
stopline_engine_info{{engine="vllm",version="0.32.0",model="m",config="abc",dtype="bfloat16",quantization=""}} 1
stopline_parallelism{{dimension="tensor"}} 4
stopline_parallelism{{dimension="expert"}} 4
stopline_engine_limit{{name="max_running_requests"}} 64
stopline_gpu_info{{{GPU},name="H20",driver="1",mig=""}} 1
stopline_threshold{{line="latency_ratio"}} 3
stopline_threshold{{line="memory_used_ratio"}} 0.8
stopline_threshold{{line="min_errors"}} 5
"""


def test_what_happened_between_two_pages() -> None:
    before, after = page(n=100.0), page(n=300.0, cuda=2.0, gone=3.0)
    watch = Watch(Limits())
    watch.see(before)
    watch.see(after)
    assert sidecar.engine(before, after, watch) == Engine(
        queue_wait=Quantiles(0.1, pytest.approx(0.19), pytest.approx(0.198), pytest.approx(0.1)),
        steps={"decode": Step(200.0, pytest.approx(0.01), pytest.approx(0.01), pytest.approx(0.0198))},
        errors={"cuda": 2.0},
        preemptions=3.0,
        kv_cache_usage=0.1,
        communication_share=pytest.approx(0.25),
        memory={"0": Memory(80e9, 70e9, 60e9, 69e9, 0.5)},
        preallocates=True,
    )


def test_a_sidecar_that_restarted_counts_from_nothing() -> None:
    watch = Watch(Limits())
    found = sidecar.engine(page(n=100.0, cuda=5.0), page(n=60.0, cuda=1.0), watch)
    assert found.steps["decode"].count == 60.0
    assert found.errors == {"cuda": 1.0}


def test_where_nothing_happened_there_is_nothing() -> None:
    assert sidecar.engine(page(n=5.0), page(n=5.0), Watch(Limits())) == Engine()


def test_a_peak_between_two_looks_is_seen_but_not_one_from_before_the_level() -> None:
    watch = Watch(Limits())
    watch.see(page(used=70e9, peak=75e9))
    watch.see(page(used=70e9, peak=75e9))
    assert watch.gpus["0"].peak == 70e9
    watch.see(page(used=71e9, peak=76e9))
    assert watch.gpus["0"].peak == 76e9
    late = Watch(Limits())
    late.see(page(peak=75e9))
    late.see(page(peak=75e9), minute=True)
    assert late.gpus["0"].peak == 75e9


def test_a_full_cache_trips_only_with_a_queue_or_preemptions() -> None:
    for changes, full in (
        ({"kv": 0.97}, False),
        ({"kv": 0.97, "waiting": 1.0}, True),
        ({"kv": 0.5, "waiting": 9.0}, False),
    ):
        watch = Watch(Limits())
        watch.see(page(**changes))
        assert watch.kv_full is full
    watch = Watch(Limits())
    watch.see(page(kv=0.97, gone=1.0))
    watch.see(page(kv=0.97, gone=2.0))
    assert watch.kv_full


def test_what_the_server_is() -> None:
    assert sidecar.conditions(page()) == {
        "engine": "vllm", "version": "0.32.0", "model": "m", "dtype": "bfloat16",
        "parallelism": "TP 4 / PP 1 / EP 4", "max_running_requests": 64.0, "gpu": "H20",
    }  # fmt: skip
    assert sidecar.identity(page()) == {"model": "m", "config": "abc"}
    assert sidecar.conditions(Page("")) == sidecar.identity(Page("")) == {}


def test_the_thresholds_are_the_sidecars_but_where_the_user_chose() -> None:
    assert sidecar.limits(page(), {"memory_used_ratio": 0.9}) == Limits(latency_ratio=3.0, memory_used_ratio=0.9)
    assert sidecar.limits(Page(""), {}) == Limits()


@pytest.fixture
async def pages() -> AsyncIterator[tuple[list[str], str]]:
    """A sidecar that answers with these pages in turn, the last one for ever, and its address."""
    texts: list[str] = []

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=texts.pop(0) if len(texts) > 1 else texts[0])

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server:
        yield texts, str(server.make_url("/metrics"))


async def test_it_waits_until_the_queue_is_empty_and_no_longer_than_it_may(pages) -> None:
    texts, url = pages
    texts += [text(running=1.0), text(waiting=1.0), text()]
    async with aiohttp.ClientSession() as session:
        assert await Sidecar(url, session).idle(60)
        assert len(texts) == 1
        texts[:] = [text(running=1.0)]
        assert not await Sidecar(url, session).idle(0.1)


async def test_it_waits_for_two_further_polls(pages) -> None:
    texts, url = pages
    texts += [f'stopline_source_last_success_timestamp_seconds{{source="metrics"}} {n}\n' for n in (1, 1, 2, 3)]
    async with aiohttp.ClientSession() as session:
        await Sidecar(url, session).settled()
    assert len(texts) == 1


async def test_what_does_not_answer_or_is_no_page(pages) -> None:
    texts, url = pages
    texts.append("no exposition {\n")
    async with aiohttp.ClientSession() as session:
        with pytest.raises(Unreadable, match="broken"):
            await Sidecar(url, session).page()
        with pytest.raises(Unreadable, match="refused"):
            await Sidecar("http://127.0.0.1:9", session).page()

"""TensorRT-LLM's iteration statistics, over a real socket: read once, and everything that can be wrong with them."""

import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from harness import Clock, Reader

from exporter import catalog
from exporter.config import load
from exporter.engines import profile as profiles
from exporter.sidecar import Sidecar
from exporter.sources.fetch import Access, Server
from exporter.sources.iterations import IterationSource

RECORDS = json.loads((Path(__file__).parent.parent / "fixtures/trtllm/constructed/iterations.json").read_text())


async def never() -> None:
    raise AssertionError("once() does not wait")


class Engine:
    """Serves *answer* at /metrics, and forgets what was read."""

    def __init__(self) -> None:
        self.answer: str | list = RECORDS
        self.status = 200
        app = web.Application()
        app.router.add_get("/metrics", self._drain)
        self.server = TestServer(app)

    async def _drain(self, _: web.Request) -> web.Response:
        answer, self.answer = self.answer, []
        return web.Response(text=answer if isinstance(answer, str) else json.dumps(answer), status=self.status)


@pytest.fixture
async def engine():
    engine = Engine()
    await engine.server.start_server()
    yield engine
    await engine.server.close()


async def read(engine: Engine, times: int = 1, profile: str | None = "trtllm") -> Reader:
    reader = Reader(profile or "trtllm")
    async with aiohttp.ClientSession() as session:
        server = Server(str(engine.server.make_url("")).rstrip("/"), session, Access(timeout=5.0))
        found = profiles.bundled(profile) if profile else None
        source = IterationSource(server, lambda: found, reader.lines, reader.store, tick=never, clock=Clock())
        for _ in range(times):
            await source.once()
    return reader


async def test_each_record_is_a_step_of_its_phase_and_the_last_tells_what_is_going_on(engine: Engine) -> None:
    reader = await read(engine, times=2)
    assert reader.told() == pytest.approx(
        {
            "requests_running{model=,rank=0}": 2.0,
            "requests_waiting{model=,rank=0}": 1.0,
            "kv_cache_usage_ratio{model=,rank=0}": 0.25,
            "step_latency_seconds{model=,phase=prefill}": 0.048,
            "step_latency_seconds{model=,phase=mixed}": 0.052,
            "step_latency_seconds{model=,phase=decode}": 0.0125 + 0.0130,
            "step_seconds_total{model=,phase=prefill}": 0.048,
            "step_seconds_total{model=,phase=mixed}": 0.052,
            "step_seconds_total{model=,phase=decode}": 0.0255,
        }
    )
    decode = reader.store.histograms[catalog.STEP_LATENCY]["", "decode", "log"]
    assert decode.cumulative()[-1] == 2
    assert reader.store.readings["iterations"].ok


@pytest.mark.parametrize(
    ("answer", "status", "profile", "reason"),
    [
        ("# TYPE trtllm_x gauge\n", 200, "trtllm", "not_iterations"),
        ('{"iter": 1}', 200, "trtllm", "not_iterations"),
        ("[1, 2]", 200, "trtllm", "not_iterations"),
        ("", 200, "trtllm", "not_iterations"),
        ('[{"a":' + "[" * 5000, 200, "trtllm", "not_iterations"),
        ('[{"a":' + "[" * 5000 + "]" * 5000 + "}]", 200, "trtllm", "not_iterations"),
        ("[]", 404, "trtllm", "http_404"),
        ("[]", 200, "vllm", "no_iterations"),
        ("[]", 200, None, "no_iterations"),
    ],
)
async def test_what_goes_wrong_has_a_reason(engine: Engine, answer, status, profile, reason) -> None:
    engine.answer, engine.status = answer, status
    reader = await read(engine, profile=profile)
    reading = reader.store.readings["iterations"]
    assert (reading.ok, reading.reason, reading.samples) == (False, reason, ())


@pytest.mark.parametrize(
    "records", [[{}], [{"iterLatencyMS": "9"}], [{"numActiveRequests": -1, "numQueuedRequests": 0}]]
)
async def test_records_that_say_nothing_count_as_nothing(engine: Engine, records: list) -> None:
    engine.answer = records
    assert (await read(engine)).told() == {}


@pytest.mark.parametrize("asked", [True, False])
async def test_the_sidecar_reads_them_only_if_asked(engine: Engine, asked: bool) -> None:
    url = str(engine.server.make_url("")).rstrip("/")
    settings = {"engine": {"url": url, "name": "trtllm"}, "scrape": {"iterations": asked}, "gpus": {"devices": "none"}}
    async with aiohttp.ClientSession() as session:
        sources = Sidecar(load(None, settings)).build(session)
    assert ("iterations" in sources) == asked

"""Debian's Prometheus scrapes a real sidecar over both formats, compressed; every series arrives, in time."""

import asyncio
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client.parser import text_string_to_metric_families
from realengine import free_port

from exporter.config import Config, EngineConfig, GpuConfig, LogConfig, WebConfig
from exporter.sidecar import Sidecar

FIXTURES = Path(__file__).parent / "fixtures"
CAPTURE = FIXTURES / "vllm/0.32.0"
SETTINGS = """\
global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}
scrape_configs:
- job_name: openmetrics
  static_configs: [{{targets: ['127.0.0.1:{direct}']}}]
- job_name: text
  static_configs: [{{targets: ['127.0.0.1:{through}']}}]
"""


def text_only(target: str, asked: list[tuple[str, str]]) -> web.Application:
    """Passes a scrape on as a Prometheus does that speaks the text format alone; notes what was answered."""

    async def metrics(request: web.Request) -> web.Response:
        headers = {"Accept": "text/plain;version=0.0.4", "Accept-Encoding": request.headers["Accept-Encoding"]}
        async with (
            aiohttp.ClientSession(auto_decompress=False) as session,
            session.get(target, headers=headers) as answer,
        ):
            kept = {name: answer.headers[name] for name in ("Content-Type", "Content-Encoding")}
            asked.append((kept["Content-Type"], kept["Content-Encoding"]))
            return web.Response(body=await answer.read(), headers=kept)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    return app


def query(port: int, expression: str) -> list[dict]:
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    return json.loads(urllib.request.urlopen(url, timeout=10).read())["data"]["result"]


async def eventually(condition, seconds: float = 30.0):
    """What *condition*, run in a thread, gives once it is true."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                if found := await asyncio.to_thread(condition):
                    return found
            except OSError:
                pass
            await asyncio.sleep(0.1)


@pytest.fixture
async def sidecar(tmp_path: Path):
    """A sidecar with an hour's worth of vLLM behind it: every histogram, counter and gauge of page and log."""
    page = {"text": (CAPTURE / "metrics-idle.txt").read_text()}

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=page["text"])

    engine = web.Application()
    engine.router.add_get("/metrics", metrics)
    log = tmp_path / "server.log"
    log.touch()
    async with TestServer(engine) as server:
        config = Config(
            engine=EngineConfig(url=str(server.make_url("/"))),
            log=LogConfig(paths=(str(log),)),
            gpus=GpuConfig(devices="none"),
            web=WebConfig(listen_address="127.0.0.1:0"),
        )
        sidecar, stop = Sidecar(config), asyncio.Event()
        task = asyncio.create_task(sidecar.run(stop))
        while sidecar.address is None or sidecar.waiting_for():
            await asyncio.sleep(0.01)
        page["text"] = (CAPTURE / "metrics-end.txt").read_text()
        log.write_bytes(
            (CAPTURE / "startup-moe.log").read_bytes() + (CAPTURE / "serving-moe-preempting.log").read_bytes()
        )
        await asyncio.sleep(2.0)  # two polls of the engine
        yield sidecar
        stop.set()
        await task


async def test_every_series_arrives_in_both_formats_and_no_scrape_is_slow(sidecar: Sidecar, tmp_path: Path) -> None:
    binary = shutil.which("prometheus")
    assert binary, "prometheus is missing: apt-get install prometheus"
    target = f"http://127.0.0.1:{sidecar.address[1]}/metrics"
    port, asked = free_port(), []
    async with TestServer(text_only(target, asked)) as through:
        (tmp_path / "prometheus.yml").write_text(SETTINGS.format(direct=sidecar.address[1], through=through.port))
        process = subprocess.Popen(
            [
                binary,
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ]
        )
        try:
            await eventually(lambda: len(query(port, "count_over_time(up[1m]) >= 10")) == 2)
            async with aiohttp.ClientSession() as session, session.get(target) as answer:
                page = await answer.text()
            for job in ("openmetrics", "text"):
                arrived = await asyncio.to_thread(query, port, f'{{job="{job}",__name__=~"stopline_.+|process_.+"}}')
                assert {series(s["metric"]) for s in arrived} == exposed(page), job
                assert await asyncio.to_thread(query, port, f'min_over_time(up{{job="{job}"}}[1m]) == 1')
            slowest = await asyncio.to_thread(query, port, "max(max_over_time(scrape_duration_seconds[1m]))")
        finally:
            process.terminate()
            process.wait(20)
    assert set(asked) == {("text/plain; version=0.0.4; charset=utf-8", "gzip")}
    print(f"{len(exposed(page))} series, slowest scrape {float(slowest[0]['value'][1]) * 1000:.1f} ms")


def series(labels: dict[str, str]) -> frozenset:
    return frozenset((k, v) for k, v in labels.items() if k not in ("job", "instance"))


def exposed(page: str) -> set[frozenset]:
    return {
        frozenset({("__name__", s.name), *((k, v) for k, v in s.labels.items() if v)})
        for family in text_string_to_metric_families(page)
        for s in family.samples
    }

"""Every capture through the real sidecar; the whole exposition against a golden file that promtool accepts."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from harness import Clock
from prometheus_client import generate_latest

from exporter.config import Config, EngineConfig, GpuConfig, LogConfig
from exporter.engines import profile as profiles
from exporter.sidecar import Sidecar

FIXTURES = Path(__file__).parent / "fixtures"
GOLDEN = Path(__file__).parent / "golden"
LOGS = sorted(FIXTURES.glob("*/*/**/*.log"))
PAGES = sorted(p for p in FIXTURES.glob("*/*/*metrics*.txt"))
TIMELINES = sorted(FIXTURES.glob("*/*/sweep-timeline.jsonl"))
OTHERS = sorted(FIXTURES.glob("*/*/*.json"))
_WRITTEN = {"ramp.prom"}
"""Pages that a command writes into a file."""
_UNSTABLE = re.compile(r"^(?:# (?:HELP|TYPE) )?(?:process_|stopline_build_info)")  # this process, this version


class Engine:
    """A server that answers at *path* with the page it was given; its last page stays until the next."""

    def __init__(self) -> None:
        self.page = ""
        self.path = "/metrics"
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self.server = TestServer(app)

    async def _answer(self, request: web.Request) -> web.Response:
        known = {self.path: self.page, "/health": ""}
        return web.Response(text=known[request.path]) if request.path in known else web.Response(status=404)


@pytest.fixture
async def engine():
    server = Engine()
    await server.server.start_server()
    yield server
    await server.server.close()


class Run:
    """A sidecar whose sources are turned by hand, on clocks that stand still until told."""

    def __init__(self, session: aiohttp.ClientSession, engine_name: str, **sections) -> None:
        self.clock = Clock()
        config = Config(gpus=GpuConfig(devices="none"), **sections)
        self.sidecar = Sidecar(config, clock=self.clock, wall=lambda: 1_796_100_000.0 + self.clock.now)
        self.sources = self.sidecar.build(session)

    async def turn(self, seconds: float = 1.0) -> None:
        for source in self.sources.values():
            await source.once()
        self.clock.pass_(seconds)

    def exposition(self) -> str:
        text = generate_latest(self.sidecar.registry).decode()
        lines = [line for line in text.splitlines(keepends=True) if not _UNSTABLE.match(line)]
        return "".join(lines)


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as session:
        yield session


def _name(path: Path) -> str:
    return "__".join(path.relative_to(FIXTURES).parts) + ".prom"


def _cases(paths: list[Path]) -> list:
    return [pytest.param(path, id=str(path.relative_to(FIXTURES))) for path in paths]


def _engine(path: Path) -> str:
    return path.relative_to(FIXTURES).parts[0]


@pytest.mark.parametrize("capture", _cases(LOGS))
async def test_a_captured_log_gives_its_golden_page(capture: Path, tmp_path: Path, session, golden) -> None:
    log = tmp_path / "server.log"
    log.touch()
    run = Run(session, "", engine=EngineConfig(name=_engine(capture)), log=LogConfig(paths=(str(log),)))
    await run.turn()
    log.write_bytes(capture.read_bytes())
    await run.turn(5.0)
    await run.turn()
    golden(_name(capture), run.exposition().replace(str(tmp_path), "/var/log"))


@pytest.mark.parametrize("capture", _cases(PAGES))
async def test_a_captured_page_gives_its_golden_page(capture: Path, engine: Engine, session, golden) -> None:
    """The idle page of the same server comes first, so that what grew since is counted.

    The engine is found out by its page, wherever that is.
    """
    engine.path = profiles.bundled(_engine(capture)).metrics_path
    run = Run(session, "", engine=EngineConfig(url=str(engine.server.make_url("/"))))
    idle = capture.with_name("metrics-idle.txt").read_text()
    text = capture.read_text()
    start = re.search(r"^process_start_time_seconds .*$", text, re.MULTILINE)
    engine.page = re.sub(r"(?m)^process_start_time_seconds .*$", start[0] if start else "", idle)
    await run.turn()
    engine.page = text
    await run.turn()
    await run.turn()  # who went away is believed gone when a second page says so
    golden(_name(capture), run.exposition())


@pytest.mark.parametrize("capture", _cases(TIMELINES))
async def test_a_captured_sweep_gives_its_golden_page(capture: Path, engine: Engine, session, golden) -> None:
    """A page a second while concurrency rose from 1 to 32; the client saw the counts told in sweep-client.jsonl."""
    run = Run(session, "", engine=EngineConfig(url=str(engine.server.make_url("/"))))
    series: dict[str, float] = {}
    for line in capture.read_text().splitlines():
        step = json.loads(line)
        series |= step.get("v", {})
        engine.page = "".join(f"{name} {value}\n" for name, value in series.items())
        await run.turn()
    golden(_name(capture), run.exposition())


@pytest.mark.parametrize("capture", _cases(OTHERS))
async def test_what_is_no_page_is_said_to_be_none(capture: Path, engine: Engine, session) -> None:
    run = Run(session, "", engine=EngineConfig(url=str(engine.server.make_url("/"))))
    engine.page = capture.read_text()
    await run.turn()
    assert 'stopline_source_error{reason="not_metrics",source="metrics"} 1.0' in run.exposition()


def test_promtool_accepts_every_golden_file() -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: apt-get install prometheus"
    goldens = sorted(GOLDEN.glob("*.prom"))
    assert len(goldens) == len(LOGS) + len(PAGES) + len(TIMELINES) + len(_WRITTEN)
    assert {path.name for path in goldens} >= _WRITTEN
    for path in goldens:
        with path.open() as page:
            result = subprocess.run(
                [promtool, "check", "metrics"], stdin=page, capture_output=True, text=True, check=False
            )
        assert (result.returncode, result.stderr) == (0, ""), path.name

"""Ramps over HTTP against the simulated server: each way in which one can end."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from exporter.load.bench import Bench, Plan
from exporter.load.client import Progress, Target
from exporter.load.mix import Lengths, Mix
from exporter.load.ramp import ramp
from exporter.load.result import Level, Run
from exporter.load.sweep import Variable, _values, applied, sweep
from exporter.load.verdict import Search
from exporter.simulator import EngineConfig, Simulation, serve
from exporter.strictyaml import ConfigError

TINY = EngineConfig.tiny(kv_blocks=8192, kv_bytes_per_token=2**15)
MIX = Mix(input_tokens=Lengths(4, 4), output_tokens=Lengths(6, 6))


class Told:
    """Keeps what a ramp says; *at_level* is called before each pass is told."""

    def __init__(self, at_level: Callable[[Level], None] = lambda _: None) -> None:
        self.lines: list[str] = []
        self._at_level = at_level

    def say(self, text: str) -> None:
        self.lines.append(text)

    def progress(self, concurrency: int, progress: Progress, seconds: float) -> None:
        pass

    def level(self, level: Level, baseline: Level) -> None:
        self._at_level(level)


def plan(url: str, **changes: Any) -> Plan:
    """Without a latency line, which a busy machine may cross at any level."""
    given = {"target": Target(f"{url}/v1/completions"), "mix": MIX, "requests": 60, "warm_up": 2, "pause": 0.0}
    return Plan(**(given | {"limits": {"latency_ratio": 1000.0}} | changes))


@asynccontextmanager
async def simulated(**changes: Any) -> AsyncIterator[tuple[Simulation, str]]:
    simulation = Simulation(EngineConfig.tiny(**({"kv_blocks": 8192, "kv_bytes_per_token": 2**15} | changes)), seed=1)
    async with serve(simulation) as url:
        yield simulation, url


async def climb(
    planned: Plan, *levels: int, told: Told | None = None, stop: asyncio.Event | None = None, **options: Any
) -> Run:
    async with Bench(planned, told or Told(), stop or asyncio.Event()) as bench:
        return await ramp(bench, Search(levels, **options))


async def test_latency_ends_a_ramp() -> None:
    """With two places, 32 clients wait fifteen times as long as they are served: however busy the machine is."""
    async with simulated(max_running_requests=2) as (_, url):
        run = await climb(plan(url, limits={}), 1, 32, 64, refine=False)
    assert run.verdict is not None
    assert run.verdict.tripped is not None
    assert (run.verdict.tripped.line, run.verdict.tripped.concurrency, run.verdict.good) == ("latency", 32, 1)
    assert [(level.concurrency, level.passes) for level in run.levels] == [(1, 1), (32, 2)]
    assert run.levels[1].cause.startswith("queue grows")
    assert run.conditions == {
        "tool": "stopline ramp", "model": "tiny", "max_model_len": 512, "api": "completions", "stream": True,
        "requests": "generated", "input_tokens": "4", "output_tokens": "6", "seed": 0,
    }  # fmt: skip
    assert [level.requests for level in run.levels] == [60, 2 * 4 * 32]
    for level in run.levels:
        assert (level.errors, level.complete) == ({}, True)
        assert level.tokens_per_second == pytest.approx(6 * (level.requests_per_second or 0), rel=0.01)


async def test_a_refused_request_ends_a_ramp() -> None:
    async with simulated(max_running_requests=2, max_queued_requests=1) as (_, url):
        run = await climb(plan(url), 1, 8, refine=False)
    assert run.verdict is not None
    assert run.verdict.tripped is not None
    assert (run.verdict.tripped.line, run.verdict.good) == ("errors", 1)
    assert run.levels[1].errors.keys() == {"rejected"}
    assert run.levels[1].latency.p99 == float("inf")
    assert run.levels[1].requests < 60  # a server that fails is not asked on and on


async def test_an_engine_that_dies_gives_a_verdict() -> None:
    async with simulated() as (simulation, url):
        told = Told(lambda level: simulation.engine.fail("out_of_memory") if level.concurrency == 2 else None)
        run = await climb(plan(url), 1, 2, 4, 8, told=told)
    assert run.verdict is not None
    assert run.verdict.tripped is not None
    assert (run.verdict.tripped.line, run.verdict.tripped.concurrency, run.verdict.good) == ("errors", 4, 2)
    assert any(note.startswith("the engine does not answer any more (HTTP 500:") for note in run.verdict.notes)


async def test_whoever_stops_it_gets_what_there_is() -> None:
    stop = asyncio.Event()
    async with simulated() as (_, url):
        run = await climb(plan(url), 1, 2, 4, told=Told(lambda _: stop.set()), stop=stop)
    assert run.verdict is not None
    assert (run.verdict.good, run.verdict.finished, run.verdict.tripped) == (1, False, None)
    assert run.verdict.notes[0] == "interrupted"


async def test_what_a_failed_request_was_told_is_a_note() -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(text="<html>\n\n try later")

    async def health(_: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/completions", refuse)
    app.router.add_get("/health", health)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        run = await climb(plan(url, mix=replace(MIX, model="m"), warm_up=0), 1, 2)
    assert run.verdict is not None
    assert run.verdict.tripped is not None
    assert (run.verdict.tripped.line, run.verdict.tripped.why) == ("errors", "10 incomplete")
    said = "not JSON: <html> try later"
    assert run.verdict.notes[0] == f"incomplete at concurrency 1, the first of them: {said}"


async def test_time_and_requests_are_bounded() -> None:
    async with simulated() as (_, url):
        timed = await climb(plan(url, requests=10_000, max_seconds=2.0), 1, 2)
        counted = await climb(plan(url, max_requests=70), 1, 2, 4)
    assert timed.verdict is not None
    assert counted.verdict is not None
    assert (timed.verdict.finished, timed.verdict.notes[0]) == (False, "--max-seconds 2 are over")
    assert not timed.levels[0].complete
    assert (counted.verdict.finished, counted.verdict.notes[0]) == (False, "--max-requests 70 are made")
    assert sum(level.requests for level in counted.levels) <= 70
    assert [level.complete for level in counted.levels] == [True, False]
    assert counted.verdict.good == 1, "a level of a few requests was not judged, so it is not good"


async def test_each_client_has_several_requests() -> None:
    async with simulated() as (_, url):
        run = await climb(plan(url, requests=8), 1, 4)
    assert [level.requests for level in run.levels] == [8, 16]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"mix": replace(MIX, model="other")}, "the server refuses the request: HTTP 404"),
        (
            {"target": Target("http://127.0.0.1:9/v1/completions")},
            "/v1/models does not tell a model; is the server up?",
        ),
        (
            {"target": Target("http://127.0.0.1:9/v1/completions"), "mix": replace(MIX, model="m")},
            "is the server up, and is this its address?",
        ),
        ({"sidecar": "http://127.0.0.1:9"}, "--sidecar http://127.0.0.1:9: refused"),
        ({"reset": "echo it is broken >&2; exit 3"}, "ended with 3: it is broken"),
    ],
)
async def test_what_no_level_would_mend_is_told_at_once(change: dict[str, Any], problem: str) -> None:
    async with simulated() as (_, url):
        with pytest.raises(ConfigError, match=problem):
            await climb(plan(url, **change), 1)


async def test_the_server_that_does_not_come_back_after_a_command() -> None:
    async with simulated() as (simulation, url):
        simulation.engine.stop()
        with pytest.raises(ConfigError, match=r"no answer 0.01 s after 'true'"):
            await climb(plan(url, reset="true", ready_seconds=0.01), 1)


async def test_the_reset_runs_before_each_level(tmp_path: Path) -> None:
    log = tmp_path / "resets"
    async with simulated() as (_, url):
        told = Told()
        await climb(plan(url, requests=10, reset=f"echo x >> {log}"), 1, 2, 4, told=told)
    assert log.read_text() == "x\n" * 3
    assert told.lines == [f"running: echo x >> {log}", "warm-up: 2 requests or more, not measured"] * 3


async def test_the_warm_up_goes_on_while_it_helps() -> None:
    """Each batch of two is twice as fast as the one before, but for the fourth."""
    served = itertools.count()
    seconds = (0.4, 0.1, 0.02, 0.4)

    async def handle(_: web.Request) -> web.Response:
        await asyncio.sleep(seconds[next(served) // 2])
        return web.json_response({"choices": [{"text": "a"}]})

    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    async with TestServer(app) as server:
        planned = plan("", target=Target(str(server.make_url("/v1/completions"))), mix=replace(MIX, model="m"))
        async with Bench(planned, Told(), asyncio.Event()) as bench:
            await bench.prepare()
            assert bench.made == 8


async def test_a_sweep_varies_one_variable_at_a_time(tmp_path: Path) -> None:
    log = tmp_path / "applied"
    async with simulated() as (_, url), Bench(plan(url, requests=10), Told(), asyncio.Event()) as bench:
        runs = await sweep(
            bench,
            [Variable("batch", (1, 2)), Variable("concurrency", (1, 3))],
            command=f"echo {{value}} >> {log}",
            concurrency=2,
            fixed={"batch": 4, "concurrency": 2},
        )
    assert log.read_text() == "1\n2\n4\n"
    told = [(run.varied, run.conditions["batch"], run.levels[0].concurrency) for run in runs]
    assert told == [("batch", 1, 2), ("batch", 2, 2), ("concurrency", 4, 1), ("concurrency", 4, 3)]
    assert runs[1].levels[0].cause


async def test_what_was_measured_before_a_command_failed_is_kept(tmp_path: Path) -> None:
    async with simulated() as (_, url):
        async with Bench(plan(url, requests=10), Told(), asyncio.Event()) as bench:
            runs = await sweep(bench, [Variable("batch", (1, 2))], command="test {value} = 1", concurrency=2, fixed={})
            notes = list(bench.notes)
        once = tmp_path / "once"
        reset = f"if [ -e {once} ]; then false; else touch {once}; fi"
        run = await climb(plan(url, requests=10, reset=reset), 1, 2)
    assert [run.conditions["batch"] for run in runs] == [1]
    assert notes == ["batch: the command 'test 2 = 1' ended with 1: it printed nothing"]
    assert run.verdict is not None
    assert (run.verdict.good, run.verdict.finished) == (1, False)
    assert run.verdict.notes[0].endswith("ended with 1: it printed nothing")


async def test_a_sweep_that_is_stopped_keeps_whole_levels_only() -> None:
    stop = asyncio.Event()
    async with simulated() as (_, url), Bench(plan(url, requests=10), Told(), stop) as bench:
        runs = []
        async for run in _values(bench, Variable("concurrency", (1, 2)), None, 1, {}):
            runs.append(run)
            stop.set()
        notes = bench.notes
    assert [run.levels[0].concurrency for run in runs] == [1]
    assert notes == ["interrupted: concurrency was not measured from 2 on"]


def test_a_value_is_quoted_for_the_shell() -> None:
    assert applied("serve --batch {value}", "4; rm -rf x") == "serve --batch '4; rm -rf x'"


@pytest.mark.parametrize(
    "text", ["batch", "=1,2", "batch=", "batch=1,,2", "batch=1,1", "concurrency=a", "concurrency=0"]
)
def test_variables_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be|names a value twice"):
        Variable.parse(text)


async def test_bodies_of_a_file_need_no_model(tmp_path: Path) -> None:
    body = tmp_path / "request.json"
    body.write_text(json.dumps({"model": "tiny", "prompt": "a b c", "max_tokens": 3, "ignore_eos": True}))
    from exporter.load import mix

    async with simulated() as (_, url):
        run = await climb(plan(url, mix=Mix(stream=False, **mix.from_file(body))), 1)
    assert run.levels[0].first_token.p99 is None
    assert run.levels[0].tokens_per_second == pytest.approx(3 * (run.levels[0].requests_per_second or 0))

"""The server over real sockets, sped up so that nothing waits."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from exporter.simulator import EngineConfig, LogOptions, Simulation, build_app, serve

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ASK = {"prompt": "one two three", "max_tokens": 5, "ignore_eos": True}
LONG = {"prompt": "word", "max_tokens": 400, "ignore_eos": True}


@asynccontextmanager
async def running(config: EngineConfig | None = None, speed: float = 200.0, **options) -> AsyncIterator:
    """A simulation and a session whose base is its server."""
    simulation = Simulation(config or EngineConfig.tiny(), speed=speed, **options)
    async with serve(simulation) as url, aiohttp.ClientSession(url) as session:
        yield simulation, session


async def events(response: aiohttp.ClientResponse) -> list[str]:
    text = (await response.read()).decode()
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


def on_page(simulation: Simulation, name: str, **labels: str) -> float:
    for family in text_string_to_metric_families(simulation.page.render()):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    raise AssertionError(name)


async def until(condition) -> None:
    """Let the loop turn until *condition* holds; the simulation makes it hold."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


async def test_completion() -> None:
    async with running() as (simulation, session):
        async with session.post(COMPLETIONS, json=ASK) as response:
            assert response.status == 200
            body = await response.json()
        assert body["choices"][0]["text"].split() == ["word"] * 5
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
        assert on_page(simulation, "vllm:generation_tokens_total") == 5


async def test_stream_has_one_event_a_token() -> None:
    async with running() as (_, session):
        asked = ASK | {"stream": True, "stream_options": {"include_usage": True}}
        async with session.post(COMPLETIONS, json=asked) as response:
            assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
            *chunks, last = await events(response)
    assert last == "[DONE]"
    *tokens, end, usage = [json.loads(chunk) for chunk in chunks]
    assert [token["choices"][0]["text"] for token in tokens] == [" word"] * 5
    assert end["choices"][0] == {"index": 0, "logprobs": None, "finish_reason": "length", "text": ""}
    assert usage["usage"]["completion_tokens"] == 5


async def test_chat() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there you"}]
    asked = {"model": "tiny", "messages": messages, "max_completion_tokens": 2, "ignore_eos": True}
    async with running() as (_, session):
        async with session.post(CHAT, json=asked) as response:
            body = await response.json()
        assert body["choices"][0]["message"] == {"role": "assistant", "content": " word word"}
        assert body["usage"]["prompt_tokens"] == 5
        assert body["id"].startswith("chatcmpl-")
        async with session.post(CHAT, json=asked | {"stream": True}) as response:
            first, *_ = await events(response)
        assert json.loads(first)["choices"][0]["delta"] == {"content": " word"}


async def test_without_ignore_eos_the_model_ends_by_itself() -> None:
    async with running(EngineConfig.tiny(max_model_len=1000)) as (_, session):
        async with session.post(COMPLETIONS, json={"prompt": [1, 2, 3]}) as response:
            body = await response.json()
        assert body["choices"][0]["finish_reason"] in ("stop", "length")
        assert body["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        (COMPLETIONS, b"{", 400, "not JSON"),
        (COMPLETIONS, b"[]", 400, "no JSON object"),
        (COMPLETIONS, b"{}", 400, "no prompt"),
        (COMPLETIONS, b'{"prompt": "a", "max_tokens": 0}', 400, "at least 1"),
        (COMPLETIONS, b'{"prompt": "a", "model": "gpt"}', 404, "does not exist"),
        (COMPLETIONS, b'{"prompt": "a", "max_tokens": 600}', 400, "maximum context length is 512"),
        (COMPLETIONS, json.dumps({"prompt": "a " * 600}).encode(), 400, "maximum context length is 512"),
        (CHAT, b'{"messages": 3}', 400, "no messages"),
        (CHAT, b'{"messages": []}', 400, "no prompt"),
    ],
)
async def test_bad_request(path: str, body: bytes, status: int, says: str) -> None:
    async with running() as (simulation, session):
        async with session.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
            assert response.status == status
            assert says in (await response.json())["error"]["message"]
        assert on_page(simulation, "http_requests_total", handler=path, status="4xx") == 1
        assert on_page(simulation, "vllm:time_to_first_token_seconds_count") == 0


async def test_full_queue_is_503() -> None:
    async with running(EngineConfig.tiny(max_queued_requests=0)) as (simulation, session):
        async with session.post(COMPLETIONS, json=ASK) as response:
            assert response.status == 503
        assert on_page(simulation, "vllm:admission_rejections_total", reason="max_num_queued_reqs") == 1
        assert on_page(simulation, "http_requests_total", status="5xx") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_client_that_hangs_up_aborts_its_request(stream: bool) -> None:
    async with running(speed=1.0) as (simulation, session):
        asking = asyncio.ensure_future(session.post(COMPLETIONS, json=LONG | {"stream": stream}))
        await until(lambda: simulation.engine.steps > 3)
        if stream:
            (await asking).close()
        else:
            asking.cancel()
        await until(lambda: simulation.engine.in_flight == 0)
        assert 0 < on_page(simulation, "vllm:generation_tokens_total") < 400
        assert on_page(simulation, "vllm:e2e_request_latency_seconds_count") == 0
        assert on_page(simulation, "vllm:request_success_total", finished_reason="abort") == 0
        assert on_page(simulation, "http_requests_total", status="2xx") == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_engine_that_dies_amid_a_request(stream: bool) -> None:
    async with running(speed=1.0) as (simulation, session):
        asking = asyncio.ensure_future(session.post(COMPLETIONS, json=LONG | {"stream": stream}))
        await until(lambda: simulation.engine.steps > 3)
        async with session.post("/sim/fail?kind=out_of_memory") as response:
            assert (await response.json())["state"] == "dead"
        async with await asking as response:
            assert response.status == (200 if stream else 500)
            error = json.loads((await events(response))[-2]) if stream else await response.json()
        assert error["error"]["code"] == 500
        async with session.post(COMPLETIONS, json=ASK | {"stream": stream}) as response:
            assert response.status == 500
        async with session.get("/health") as response:
            assert response.status == 503
        async with session.get("/metrics") as response:
            assert response.status == 200
        async with session.post("/sim/restart") as response:
            assert (await response.json())["state"] == "serving"
        async with session.get("/health") as response:
            assert response.status == 200


async def test_stop_cuts_what_is_in_flight() -> None:
    async with running(speed=1.0) as (simulation, session):
        asking = asyncio.ensure_future(session.post(COMPLETIONS, json=LONG))
        await until(lambda: simulation.engine.steps > 3)
        async with session.post("/sim/stop") as response:
            assert (await response.json())["state"] == "stopped"
        async with await asking as response:
            assert response.status == 500


async def test_metrics_page_is_as_vllm_serves_it() -> None:
    async with running() as (_, session):
        async with session.get("/metrics") as response:
            assert response.headers["Content-Type"] == "text/plain; version=1.0.0; charset=utf-8"
            text = await response.text()
        names = {family.name for family in text_string_to_metric_families(text)}
        assert "vllm:num_requests_running" in names
        assert "http_requests" in names
        assert "http_requests_total{" not in text


async def test_models() -> None:
    async with running() as (_, session), session.get("/v1/models") as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["tiny"]


async def test_load_can_be_set_changed_and_taken_away() -> None:
    async with running(EngineConfig.hy3_h20(), speed=50.0) as (simulation, session):
        async with session.post("/sim/load?concurrency=5") as response:
            assert response.status == 200
        await until(lambda: simulation.engine.running == 5)
        async with session.post("/sim/load?rate=20"):
            await until(lambda: simulation.engine.in_flight > 20)
        async with session.post("/sim/load"):
            await until(lambda: simulation.engine.in_flight == 0)
        async with session.get("/sim") as response:
            state = await response.json()
        assert state["state"] == "serving"
        assert state["gpu_memory_used_bytes"] == simulation.gpu_memory_used_bytes
        assert len(state["gpu_memory_used_bytes"]) == 8


async def test_slow_and_leak() -> None:
    async with running(speed=1.0) as (simulation, session):
        async with session.post("/sim/slow?factor=1000"), session.post("/sim/leak?bytes_per_second=1e9"):
            pass
        before = simulation.gpu_memory_used_bytes[0]
        asking = asyncio.ensure_future(session.post(COMPLETIONS, json=LONG))
        await until(lambda: simulation.engine.running == 1)
        await until(lambda: simulation.gpu_memory_used_bytes[0] > before)
        assert simulation.engine.steps == 0
        asking.cancel()


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/sim/fail?kind=boredom", "must be one of out_of_memory, "),
        ("/sim/fail", "must be one of"),
        ("/sim/slow?factor=-1", "above 0"),
        ("/sim/slow", "?factor= is missing"),
        ("/sim/load?rate=many", "could not convert"),
    ],
)
async def test_wrong_control(path: str, says: str) -> None:
    async with running() as (_, session), session.post(path) as response:
        assert response.status == 400
        assert says in (await response.json())["error"]


async def test_log_goes_to_the_file_with_every_kind_of_line(tmp_path) -> None:
    path = tmp_path / "vllm.log"
    async with running(log=path, log_options=LogOptions(requests=True, port=8123)) as (simulation, session):
        async with session.post(COMPLETIONS, json=ASK | {"stream": True}) as response:
            await response.read()
        async with session.get("/metrics"), session.get("/health"):
            pass
        async with session.post(COMPLETIONS, data=b"{"):
            pass
        simulation.engine.stop()
    text = path.read_text()
    assert "Starting vLLM server on http://127.0.0.1:8123" in text
    assert "Received request cmpl-" in text
    for answer in ('"POST /v1/completions HTTP/1.1" 200 OK', '"GET /metrics HTTP/1.1" 200 OK'):
        assert answer in text
    assert '"GET /health HTTP/1.1" 200 OK' in text
    assert '"POST /v1/completions HTTP/1.1" 400 Bad Request' in text
    assert "[shutdown] API server: shutdown triggered" in text
    assert "/sim" not in text


async def test_app_without_runner_answers_what_needs_no_time() -> None:
    simulation = Simulation(EngineConfig.tiny())
    async with TestClient(TestServer(build_app(simulation))) as client:
        response = await client.get("/health")
        assert response.status == 200


class ManualClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_clock_runs_at_its_speed_and_slips_when_held_up() -> None:
    clock = ManualClock()
    simulation = Simulation(EngineConfig.tiny(), speed=10.0, clock=clock)
    clock.now += 0.2
    simulation.catch_up()
    assert simulation.engine.now == pytest.approx(2.0)
    clock.now += 60
    simulation.catch_up()
    assert simulation.engine.now == pytest.approx(2.0 + 2.5)


async def test_crash_of_the_simulation_surfaces() -> None:
    clock = ManualClock()
    simulation = Simulation(EngineConfig.tiny(), clock=clock)
    clock.now = -1  # the engine does not go backwards
    with pytest.raises(ValueError, match="backwards"):
        async with serve(simulation):
            await asyncio.sleep(0)


async def test_taken_port_is_an_error_at_once() -> None:
    async with serve(Simulation(EngineConfig.tiny())) as url:
        with pytest.raises(OSError, match="in use"):
            async with serve(Simulation(EngineConfig.tiny()), port=int(url.rpartition(":")[2])):
                pass

"""The simulated server over HTTP: vLLM's API as far as clients and monitors use it, and /sim to break it.

| route | |
|---|---|
| POST /v1/completions, /v1/chat/completions | streaming and not; 400 too long, 503 queue full, 500 dead |
| GET /v1/models, /metrics, /health | /health is 503 when the engine is dead; /metrics stays, frozen |
| GET /sim | what it is doing, as JSON |
| POST /sim/fail?kind= | one of engine.FAULTS |
| POST /sim/slow?factor=, /sim/leak?bytes_per_second=, /sim/stop, /sim/restart | |
| POST /sim/load?rate=, ?concurrency=, or neither | replaces the load by this one, or by none |
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

from aiohttp import web

from . import openai
from .engine import FAULTS
from .load import ClosedLoop, Load, Poisson, lognormal
from .metrics import CONTENT_TYPE
from .records import Event
from .simulation import Answer, Simulation

OUTPUT_TOKENS = lognormal(200, 0.6, most=1024)  # of who does not say ignore_eos


def build_app(simulation: Simulation) -> web.Application:
    """Does not run the simulation: see `serve`.

    Serve it with handler_cancellation=True, or only streaming clients that hang up are noticed.
    """
    app = web.Application()
    app.add_routes(_Api(simulation).routes())
    app.add_routes(_Control(simulation).routes())
    return app


@contextlib.asynccontextmanager
async def serve(simulation: Simulation, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Run *simulation* and its server; gives the URL.  A crash of the simulation surfaces at the end."""
    app = build_app(simulation)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
    with contextlib.closing(simulation):
        await runner.setup()
        running = asyncio.create_task(simulation.run())
        try:
            await web.TCPSite(runner, host, port).start()
            yield f"http://{host}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


class _Api:
    """What vLLM serves."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._random = Random(0)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/completions", self.complete),
            web.post(openai.CHAT_PATH, self.complete),
            web.get("/v1/models", self.models),
            web.get("/metrics", self.metrics),
            web.get("/health", self.health),
        ]

    async def complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await _json(request)
            asked = openai.read_request(
                body,
                path=request.path,
                client=_client(request),
                model=self._simulation.engine.config.model,
                output_tokens=OUTPUT_TOKENS(self._random),
            )
        except openai.BadRequestError as refused:
            self._simulation.answered(_client(request), request.method, request.path, refused.status)
            return web.json_response(openai.error(refused.status, str(refused)), status=refused.status)
        answer = self._simulation.submit(asked)
        if not answer.record.accepted:
            return self._refuse(answer)
        try:
            if asked.stream:
                options = body.get("stream_options") or {}
                return await self._stream(request, answer, include_usage=bool(options.get("include_usage")))
            async for _ in answer.tokens():
                pass
        finally:
            self._simulation.abort(answer)  # whoever is gone by now wants nothing more
        if not answer.record.completed:
            return self._refuse(answer)
        return web.json_response(openai.answer(answer.record))

    async def _stream(self, request: web.Request, answer: Answer, *, include_usage: bool) -> web.StreamResponse:
        record = answer.record
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        with contextlib.suppress(ConnectionResetError):  # the client hung up
            await response.prepare(request)
            async for _ in answer.tokens():
                await response.write(openai.event(openai.chunk(record)))
            if record.completed:
                await response.write(openai.event(openai.chunk(record, last=True)))
                if include_usage:
                    await response.write(openai.event(openai.usage_chunk(record)))
            else:
                await response.write(openai.event(openai.error(500, self._reason(answer))))
            await response.write(openai.event("[DONE]"))
        return response

    def _refuse(self, answer: Answer) -> web.Response:
        record = answer.record
        status = 500 if record.finish_reason == "abort" else record.http_status  # cut off by a stop
        return web.json_response(openai.error(status, self._reason(answer)), status=status)

    def _reason(self, answer: Answer) -> str:
        return openai.refusal(answer.record, self._simulation.engine.config.max_model_len)

    async def models(self, request: web.Request) -> web.Response:
        self._simulation.answered(_client(request), request.method, request.path, 200)
        config = self._simulation.engine.config
        model = {"id": config.model, "object": "model", "max_model_len": config.max_model_len}
        return web.json_response({"object": "list", "data": [model]})

    async def metrics(self, request: web.Request) -> web.Response:
        self._simulation.answered(_client(request), request.method, request.path, 200, counted=False)
        body = self._simulation.page.render().encode()
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})

    async def health(self, request: web.Request) -> web.Response:
        status = 503 if self._simulation.engine.state in ("dead", "stopped") else 200
        self._simulation.answered(_client(request), request.method, request.path, status, counted=False)
        return web.Response(status=status)


class _Control:
    """What no real server has: /sim."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def routes(self) -> list[web.RouteDef]:
        engine = self._simulation.engine
        return [
            web.get("/sim", self._then(lambda request: None)),
            web.post("/sim/fail", self._then(lambda request: engine.fail(_fault(request)))),
            web.post("/sim/slow", self._then(lambda request: engine.slow(_number(request, "factor")))),
            web.post("/sim/leak", self._then(lambda request: engine.leak(_number(request, "bytes_per_second")))),
            web.post("/sim/stop", self._then(lambda request: engine.stop())),
            web.post("/sim/restart", self._then(lambda request: engine.restart())),
            web.post("/sim/load", self._then(lambda request: self._simulation.set_load(_load(request)))),
        ]

    def _then(self, act: Callable[[web.Request], None]) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Act, and tell the state; a ValueError is the caller's."""

        async def handle(request: web.Request) -> web.Response:
            self._simulation.catch_up()
            try:
                act(request)
            except ValueError as wrong:
                return web.json_response({"error": str(wrong)}, status=400)
            return web.json_response(self._state())

        return handle

    def _state(self) -> dict[str, object]:
        engine = self._simulation.engine
        return {
            "state": engine.state,
            "seconds": engine.now,
            "running": engine.running,
            "waiting": engine.waiting,
            "kv_usage": engine.kv_usage,
            "gpu_memory_used_bytes": self._simulation.gpu_memory_used_bytes,
        }


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:
        raise openai.BadRequestError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise openai.BadRequestError(400, "the body is no JSON object")
    return body


def _client(request: web.Request) -> str:
    peer = request.transport.get_extra_info("peername") if request.transport else None
    return f"{peer[0]}:{peer[1]}" if peer else "127.0.0.1:0"


def _number(request: web.Request, name: str) -> float:
    """Raises ValueError."""
    if name not in request.query:
        raise ValueError(f"?{name}= is missing")
    return float(request.query[name])


def _fault(request: web.Request) -> Event:
    for fault in FAULTS:
        if fault == request.query.get("kind"):
            return fault
    raise ValueError(f"?kind= must be one of {', '.join(FAULTS)}")


def _load(request: web.Request) -> Load | None:
    if "rate" in request.query:
        return Poisson(_number(request, "rate"))
    if "concurrency" in request.query:
        return ClosedLoop(int(_number(request, "concurrency")))
    return None

"""One request and many at once, against servers that answer well, badly or not at all."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from exporter.load.client import Cost, Progress, Target, ask, closed_loop
from exporter.load.result import Client, Request

BODY = b"{}"


@pytest.fixture
async def server() -> AsyncIterator[Callable[..., Awaitable[Target]]]:
    servers: list[TestServer] = []

    async def start(handler: Callable[[web.Request], Awaitable[web.StreamResponse]], **options: float) -> Target:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        app.router.add_post("/generate", handler)
        servers.append(TestServer(app))
        await servers[-1].start_server()
        return Target(str(servers[-1].make_url("/v1/completions")), **options)

    yield start
    for one in servers:
        await one.close()


def streaming(*events: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {event}\n\n".encode())
        return response

    return handle


def answering(status: int, body: object) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def handle(_: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=body if isinstance(body, str) else json.dumps(body))

    return handle


async def once(target: Target) -> Request:
    async with target.session() as session:
        return await ask(session, target, BODY)


def generating(target: Target) -> Target:
    """The same server by the path whose answers differ from one to the next."""
    return replace(target, url=target.url.replace("/v1/completions", "/generate"))


def token(text: str = " a") -> str:
    return json.dumps({"choices": [{"index": 0, "text": text}]})


USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})


async def test_a_stream_tells_tokens_and_times(server) -> None:
    seen = await once(await server(streaming(token(), token(), token(""), USAGE, "[DONE]")))
    assert (seen.error, seen.prompt_tokens, seen.generated_tokens) == ("", 7, 3)
    assert seen.first_token is not None
    assert 0 < seen.first_token <= seen.latency
    assert seen.inter_token is not None
    assert seen.first_token + 2 * seen.inter_token <= seen.latency + 1e-6


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({"object": "error", "message": "overloaded"}, 'not an answer: {"object": "error", "message": "overloaded"}'),
        ({"detail": "busy"}, 'not an answer: {"detail": "busy"}'),
        ({}, "not an answer: {}"),
        ({"choices": []}, "the answer holds no choice"),
    ],
)
async def test_status_200_alone_is_no_answer(server, body: dict, detail: str) -> None:
    seen = await once(await server(answering(200, body)))
    assert (seen.error, seen.detail) == ("incomplete", detail)


async def test_an_error_in_a_stream_is_no_token(server) -> None:
    seen = await once(await server(streaming('{"detail": "busy"}', "[DONE]")))
    assert (seen.error, seen.detail) == ("incomplete", 'not an answer: {"detail": "busy"}')


async def test_a_chat_begins_with_its_first_text_and_not_with_its_role(server) -> None:
    role = json.dumps({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    thought = json.dumps({"choices": [{"delta": {"reasoning_content": "hm"}}]})
    seen = await once(await server(streaming(role, thought, "[DONE]")))
    assert (seen.error, seen.generated_tokens) == ("", 1)
    seen = await once(await server(streaming(role, "[DONE]")))
    assert (seen.error, seen.detail) == ("incomplete", "the stream ended before its first token")


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"choices": [{"text": "a b"}], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}, (4, 2)),
        ({"text": "a b", "meta_info": {"prompt_tokens": 4, "completion_tokens": 2}}, (4, 2)),
        ({"generated_text": "a b", "details": {"generated_tokens": 2}}, (0, 2)),
        ({"answer": "a b"}, (0, 0)),
        ([{"generated_text": "a b"}], (0, 0)),
    ],
)
async def test_a_whole_answer_has_no_first_token(server, body: object, tokens: tuple[int, int]) -> None:
    seen = await once(generating(await server(answering(200, body))))
    assert (seen.error, seen.first_token, seen.inter_token) == ("", None, None)
    assert (seen.prompt_tokens, seen.generated_tokens) == tokens


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "client_error"), (404, "client_error"), (429, "rejected"), (503, "rejected"), (500, "server_error")],
)
async def test_an_answer_that_is_none(server, status: int, kind: str) -> None:
    seen = await once(await server(answering(status, "it says why")))
    assert (seen.error, seen.detail, seen.generated_tokens) == (kind, f"HTTP {status}: it says why", 0)


async def test_an_error_within_a_stream(server) -> None:
    seen = await once(await server(streaming(token(), json.dumps({"error": {"message": "EngineDead"}}), "[DONE]")))
    assert (seen.error, seen.detail, seen.inter_token) == ("server_error", "{'message': 'EngineDead'}", None)


async def test_what_is_not_json(server) -> None:
    seen = await once(await server(answering(200, "<html>")))
    assert (seen.error, seen.detail) == ("incomplete", "not JSON: <html>")


async def test_a_stream_that_breaks_off(server) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(f"data: {token()}\n\n".encode())
        assert request.transport is not None
        request.transport.abort()
        return response

    assert (await once(await server(handle))).error in ("incomplete", "connection")


@pytest.mark.parametrize(
    ("last", "error"),
    [
        ([], "incomplete"),
        ([json.dumps({"choices": [{"text": " a", "finish_reason": None}]})], "incomplete"),
        ([json.dumps({"choices": [{"text": " a", "finish_reason": "length"}]})], ""),
        (
            [json.dumps({"choices": [{"text": " a"}], "usage": {"completion_tokens": 2}})],
            "incomplete",
        ),  # told all along
        ([USAGE], ""),
        (["[DONE]"], ""),
    ],
)
async def test_a_stream_that_ends_early(server, last: list[str], error: str) -> None:
    assert (await once(await server(streaming(token(), token(), *last)))).error == error


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ({"token": {"text": " a"}, "generated_text": None}, ""),
        ({"text": "a", "meta_info": {"completion_tokens": 1}}, ""),
        ({"text": "a", "meta_info": {"completion_tokens": 1, "finish_reason": {"type": "length"}}}, ""),
        ({"text": "a", "meta_info": {"completion_tokens": 1, "finish_reason": None}}, "incomplete"),
    ],
)
async def test_the_end_of_a_generate_stream(server, event: object, error: str) -> None:
    assert (await once(generating(await server(streaming(json.dumps(event)))))).error == error


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "event",
    ['{"choices":7}', "[1,2]", "[]", "null", "7", '{"usage":"x"}', '{"choices":[{"text":7}]}', '{"text":7}',
     '{"choices":[{"delta":{"content":["a"]}}]}'],
)  # fmt: skip
async def test_json_that_is_no_answer(server, event: str, stream: bool) -> None:
    seen = await once(await server(streaming(token(), event, "[DONE]") if stream else answering(200, event)))
    assert seen.error == "incomplete"
    assert seen.detail.startswith("not an answer (Expected ")
    assert event in seen.detail


async def test_a_line_that_never_ends(server) -> None:
    seen = await once(await server(streaming("x" * 1_000_000)))
    assert seen.error == "incomplete"
    assert len(seen.detail) <= 300


async def test_no_answer_in_time(server) -> None:
    async def handle(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    seen = await once(await server(handle, timeout=0.2))
    assert (seen.error, seen.detail) == ("timeout", "no whole answer in 0.2 s")
    assert seen.latency >= 0.2


async def test_nobody_listens() -> None:
    seen = await once(Target("http://127.0.0.1:9/v1/completions"))
    assert seen.error == "connection"
    assert "Cannot connect to host 127.0.0.1:9" in seen.detail


async def test_connections_that_the_server_closed_meanwhile_are_no_error() -> None:
    """As every HTTP client does: only a request on a new connection says that the server hangs up."""
    connections = itertools.count()
    together = asyncio.Barrier(2)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(connections)
        await reader.readuntil(b"{}")
        if number < 2:
            await together.wait()  # so that two are kept, and both are stale for the third request
        if number < 3:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            await reader.readuntil(b"{}")  # the next request on it is read, and never answered
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        target = Target(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/")
        async with target.session() as session:
            first = await asyncio.gather(*(ask(session, target, BODY) for _ in range(2)))
            seen = [*first, await ask(session, target, BODY), await ask(session, target, BODY)]
    assert [one.error for one in seen] == ["", "", "", "connection"]
    assert next(connections) == 4


async def test_a_server_that_had_the_request_and_closed_is_not_asked_again(server) -> None:
    served = itertools.count(1)

    async def handle(request: web.Request) -> web.Response:
        if next(served) % 10 == 0:
            await asyncio.sleep(0.5)
            assert request.transport is not None
            request.transport.close()
        return web.json_response({"choices": [{"text": "a"}]})

    target = await server(handle)
    async with target.session() as session:
        seen = [await ask(session, target, BODY) for _ in range(20)]
    assert [n for n, one in enumerate(seen, 1) if one.error] == [10, 20]
    assert {one.error for one in seen} == {"", "connection"}
    assert next(served) == 21


async def test_the_loop_measures_what_it_was_asked_for(server) -> None:
    present, most = 0, 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal present, most
        present, most = present + 1, max(most, present + 1)
        await asyncio.sleep(0)
        present -= 1
        return web.json_response(
            {"choices": [{"text": "a"}], "usage": {"completion_tokens": int(await request.text())}}
        )

    bodies = (str(n).encode() for n in itertools.count(1))
    progress = Progress(20)
    target = await server(handle)
    measured, others = await closed_loop(
        target, bodies, concurrency=4, warm_up=3, progress=progress, stop=asyncio.Event()
    )
    assert sorted(r.generated_tokens for r in measured) == list(range(4, 24))
    assert {1, 2, 3} <= {r.generated_tokens for r in others} <= {1, 2, 3, *range(24, 28)}
    assert most <= 4
    assert (progress.done, progress.errors) == (measured, 0)


async def test_the_loop_ends_when_told_and_after_ten_errors(server) -> None:
    stop = asyncio.Event()

    async def handle(_: web.Request) -> web.StreamResponse:
        stop.set()
        await asyncio.Event().wait()
        raise AssertionError

    target = await server(handle)
    assert await closed_loop(target, itertools.repeat(BODY), concurrency=2, progress=Progress(50), stop=stop) == (
        [],
        [],
    )
    failing = await server(answering(500, "no"))
    progress = Progress(500)
    measured, _ = await closed_loop(
        failing, itertools.repeat(BODY), concurrency=2, progress=progress, stop=asyncio.Event()
    )
    assert 10 <= len(measured) <= 12
    assert {r.error for r in measured} == {"server_error"}


async def test_the_loop_ends_at_its_deadline(server) -> None:
    async def handle(_: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    seen = await closed_loop(
        await server(handle),
        itertools.repeat(BODY),
        concurrency=2,
        progress=Progress(50),
        stop=asyncio.Event(),
        clock=lambda: 5.0,
        deadline=5.1,
    )
    assert seen == ([], [])


async def test_the_cost_of_the_client_itself() -> None:
    async with Cost() as idle:
        await asyncio.sleep(0.05)
    told = idle.told(1000.0)
    assert 0 <= told.cpu_share < 0.9
    assert not told.limited
    busy = Cost()
    async with busy:
        await asyncio.sleep(0.02)
        sum(range(3_000_000))  # the loop is held up meanwhile
        await asyncio.sleep(0.02)
    late = busy.told(0.1)
    assert late == Client(late.cpu_share, late.lag_p99, True)
    assert late.lag_p99 > 0.02

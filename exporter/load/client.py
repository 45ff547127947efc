"""A closed-loop client: so many requests at a time, each timed from the moment it is sent.

Closed loop: a client asks again when it was answered, so a slow server is asked less often. The latency is that of
requests that were sent, never that of users who would have come meanwhile (coordinated omission).
"""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from exporter.load import stats
from exporter.load.result import Client, Request

ERRORS = ("timeout", "connection", "rejected", "server_error", "client_error", "incomplete")
"""Kinds of failures as the client sees them."""

_TICK = 0.01  # seconds between two looks at the event loop's lag
_LAG = 0.05  # of the median latency: what a client may be late
_BUSY = 0.9  # of a core
_ENOUGH_ERRORS = 10
_STALE = 0.05  # seconds in which a connection that the server closed before is found out
_DETAIL = 300  # characters of an answer that are kept to explain a failure


class _Text(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    role: str | None = None

    @property
    def is_token(self) -> bool:
        """The first piece of a chat may only name the role."""
        return self.role is None or bool(self.content or self.reasoning_content or self.reasoning)


class _Choice(msgspec.Struct):
    delta: _Text | None = None
    text: str | None = None
    finish_reason: Any = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0


class _Meta(msgspec.Struct):
    """SGLang's /generate."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: Any = msgspec.UNSET
    """None until the last event, where it is told at all."""


class _Details(msgspec.Struct):
    """TGI's /generate."""

    generated_tokens: int = 0


class _Answer(msgspec.Struct):
    """What counts of an answer, or of one piece of a stream, whichever API it is of."""

    choices: list[_Choice] | None = None
    text: str | list[str] | None = None
    generated_text: str | None = None
    usage: _Usage | None = None
    error: Any = None
    meta_info: _Meta | None = None
    details: _Details | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing that an answer of any API has, as an error that came with status 200 does."""
        return self == _Answer()

    @property
    def is_last(self) -> bool:
        """Whether a stream may end here; one of /generate may anywhere, unless it tells its end."""
        if self.choices is None:
            return self.meta_info is None or self.meta_info.finish_reason is not None
        if not self.choices:
            return self.usage is not None  # with a choice beside it, usage is told all along
        return any(choice.finish_reason is not None for choice in self.choices)


_DECODER = msgspec.json.Decoder(_Answer)
_LIST = msgspec.json.Decoder(tuple[_Answer])


@dataclass(slots=True)
class _Watch:
    """What came so far of one answer."""

    known: bool = False
    """Of an API whose answers are known; /generate differs from server to server."""
    first: float | None = None
    last: float | None = None
    pieces: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    ended: bool = False
    """Nothing is missing."""
    error: str = ""
    detail: str = ""

    def take(self, data: bytes, now: float) -> None:
        """One piece: a whole answer, or an event of a stream."""
        try:
            in_list = data.startswith(b"[")  # as TGI answers
            answer = _LIST.decode(data)[0] if in_list else _DECODER.decode(data)
        except msgspec.ValidationError as error:
            shown = data[:_DETAIL].decode("utf-8", "replace")
            self.error, self.detail = "incomplete", f"not an answer ({error}): {shown}"[:_DETAIL]
            return
        except msgspec.DecodeError:
            self.error, self.detail = "incomplete", f"not JSON: {data[:_DETAIL].decode('utf-8', 'replace')}"
            return
        if answer.error is not None:
            self.error, self.detail = "server_error", str(answer.error)[:_DETAIL]
            return
        if self.known and answer.is_empty:
            shown = data[:_DETAIL].decode("utf-8", "replace")
            self.error, self.detail = "incomplete", f"not an answer: {shown}"[:_DETAIL]
            return
        if answer.usage is not None:
            self.prompt_tokens = answer.usage.prompt_tokens or 0
            self.generated_tokens = answer.usage.completion_tokens or 0
        if answer.meta_info is not None:
            self.prompt_tokens, self.generated_tokens = (
                answer.meta_info.prompt_tokens,
                answer.meta_info.completion_tokens,
            )
        if answer.details is not None:
            self.generated_tokens = answer.details.generated_tokens
        self.ended = self.ended or answer.is_last
        if answer.choices is None or any(c.delta is None or c.delta.is_token for c in answer.choices):
            self.first = now if self.first is None else self.first
            self.last = now
            self.pieces += 1


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go; *headers* may hold a token, *timeout* is seconds until a request is given up."""

    url: str
    headers: dict[str, str] = field(default_factory=dict)
    timeout: float = 300.0

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """A session of as many connections as it takes."""
        reused = aiohttp.TraceConfig()

        async def note(_: aiohttp.ClientSession, context: Any, __: Any) -> None:
            context.trace_request_ctx.append(time.perf_counter())

        reused.on_connection_reuseconn.append(note)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.timeout),
            headers=self.headers,
            trace_configs=[reused],
        ) as session:
            yield session


async def ask(session: aiohttp.ClientSession, target: Target, body: bytes) -> Request:
    """One request from its sending to its last byte, or to its failure; never raises for what a server does."""
    began = time.perf_counter()
    watch = _Watch(known=urlsplit(target.url).path.endswith("completions"))
    try:
        if not await _sent(session, target, body, watch):
            async with target.session() as fresh:  # which keeps no connection that could be stale too
                await _sent(fresh, target, body, watch)
    except TimeoutError:
        watch.error, watch.detail = "timeout", f"no whole answer in {target.timeout:g} s"
    except (aiohttp.ClientPayloadError, HttpProcessingError) as error:
        watch.error, watch.detail = "incomplete", str(error)[:_DETAIL]
    except (aiohttp.ClientError, OSError) as error:
        watch.error, watch.detail = "connection", str(error) or type(error).__name__
    return _seen(began, watch)


async def _sent(session: aiohttp.ClientSession, target: Target, body: bytes, watch: _Watch) -> bool:
    """Whether it reached the server: one that keeps connections may close them at any time between two requests.

    Then the close comes at once. A server that closes later has had the request, and the failure is its own.
    """
    reused: list[float] = []  # when the request was sent on a connection that was kept
    headers = {"Content-Type": "application/json"}
    try:
        async with session.post(target.url, data=body, headers=headers, trace_request_ctx=reused) as response:
            reused.clear()  # it answers
            if response.status != 200:
                detail = (await response.content.read(_DETAIL)).decode("utf-8", "replace")
                watch.error, watch.detail = _refusal(response.status), f"HTTP {response.status}: {detail}"
            elif response.content_type == "text/event-stream":
                await _stream(response, watch)
            else:
                watch.take(await response.read(), time.perf_counter())
                watch.first = None  # whole answers tell nothing of their first token
                if not watch.error and watch.pieces == 0:
                    watch.error, watch.detail = "incomplete", "the answer holds no choice"
    except (aiohttp.ServerDisconnectedError, ConnectionResetError, aiohttp.ClientOSError):
        if not reused or time.perf_counter() - reused[-1] > _STALE:
            raise
        return False
    return True


async def _stream(response: aiohttp.ClientResponse, watch: _Watch) -> None:
    """Server-sent events; the end is ``[DONE]``, or what else tells that nothing follows: a reason, the usage."""
    async for line in response.content:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                watch.ended = True
            elif data:
                watch.take(data, time.perf_counter())
    if watch.error:
        return
    if watch.pieces == 0:
        watch.error, watch.detail = "incomplete", "the stream ended before its first token"
    elif not watch.ended:
        watch.error = "incomplete"
        watch.detail = f"the stream ended after {watch.pieces} pieces, without [DONE], finish_reason or usage"


def _seen(began: float, watch: _Watch) -> Request:
    latency = time.perf_counter() - began
    generated = watch.generated_tokens or (watch.pieces if watch.first is not None else 0)
    between = None
    if watch.first is not None and watch.last is not None and generated > 1:
        between = (watch.last - watch.first) / (generated - 1)
    return Request(
        start=began,
        latency=latency,
        first_token=None if watch.first is None else watch.first - began,
        inter_token=None if watch.error else between,
        prompt_tokens=watch.prompt_tokens,
        generated_tokens=generated,
        error=watch.error,
        detail=watch.detail,
    )


def _refusal(status: int) -> str:
    if status in (429, 503):
        return "rejected"
    return "client_error" if 400 <= status < 500 else "server_error"


@dataclass(slots=True)
class Progress:
    """What a loop has seen so far, for whoever watches it."""

    wanted: int
    done: list[Request] = field(default_factory=list)
    errors: int = 0


async def closed_loop(
    target: Target,
    bodies: Iterable[bytes],
    *,
    concurrency: int,
    warm_up: int = 0,
    progress: Progress,
    stop: asyncio.Event,
    clock: Callable[[], float] = time.perf_counter,
    deadline: float = float("inf"),
) -> tuple[list[Request], list[Request]]:
    """Load by *concurrency* clients at once: what the measured requests saw, and what those before and after did.

    The first *warm_up* requests are not measured, nor are those after the wanted ones, which keep the clients busy
    until the last measured one is answered. Ends early when *stop* is set or *deadline* has come (requests that are
    under way then are dropped), or after ten errors: a server that fails is not asked hundreds of times.
    """
    others: list[Request] = []
    todo = enumerate(bodies)
    failed = asyncio.Event()

    async def client() -> None:
        for number, body in todo:
            if len(progress.done) >= progress.wanted:
                return
            seen = await ask(session, target, body)
            (progress.done if warm_up <= number < warm_up + progress.wanted else others).append(seen)
            progress.errors += bool(seen.error)
            if progress.errors >= _ENOUGH_ERRORS:
                failed.set()
                return

    async with target.session() as session:
        clients = [asyncio.create_task(client()) for _ in range(concurrency)]
        ends = [asyncio.create_task(event.wait()) for event in (stop, failed)]
        everybody = asyncio.gather(*clients)
        everything: list[asyncio.Future[Any]] = [everybody, *ends]
        try:
            await asyncio.wait(everything, timeout=_left(deadline, clock), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in everything:
                future.cancel()
            await asyncio.gather(*everything, return_exceptions=True)
        for task in clients:
            if not task.cancelled() and task.exception() is not None:
                raise task.exception() or RuntimeError(task)
    return progress.done, others


def _left(deadline: float, clock: Callable[[], float]) -> float | None:
    return None if deadline == float("inf") else max(deadline - clock(), 0.0)


class Cost:
    """What the client itself costs while it runs: its CPU time, and how late its event loop is."""

    async def __aenter__(self) -> "Cost":
        self._lags: list[float] = []
        self._began = time.perf_counter(), time.process_time()
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ended = time.perf_counter(), time.process_time()
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in itertools.count():
            due = loop.time() + _TICK
            await asyncio.sleep(_TICK)
            self._lags.append(max(loop.time() - due, 0.0))

    def told(self, latency_p50: float | None) -> Client:
        """*latency_p50* is what was measured meanwhile, in seconds."""
        wall, cpu = (end - begin for begin, end in zip(self._began, self._ended, strict=True))
        share = cpu / wall if wall else 0.0
        lag = stats.quantile(self._lags, 0.99) if self._lags else 0.0
        late = latency_p50 is not None and lag > _LAG * latency_p50
        return Client(share, lag, late or share > _BUSY)


def encoded(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()

"""The HTTP side: /metrics, health, and the live page with its JSON."""

import math
import re
import time
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from exporter.live import page
from exporter.live.state import State

_VERSION = re.compile(r"version=([^;,\s]+)")
_SPOKEN = ("", "0.0.4", "1.0.0")
_MAX_NAMES = 500
_COMPRESS_ABOVE = 1024
_SHARED_SECONDS = 0.1


def build_app(
    registry: CollectorRegistry,
    *,
    ready: Callable[[], list[str]],
    state: Callable[[], State],
    guard: Callable[..., Awaitable[web.StreamResponse]] | None = None,
) -> web.Application:
    """The application. *ready* lists what has not been tried yet; *state* is what the page at / shows.

    *guard* is a middleware that all requests pass first.
    """

    shared = _Shared()

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(_spoken(request.headers.get("Accept", "")))
        names = request.query.getall("name[]", [])[:_MAX_NAMES]
        if names:
            body = encode(registry.restricted_registry(names))
        else:
            body = shared.get(content_type, lambda: encode(registry))
        return _compressed(web.Response(body=body, headers={"Content-Type": content_type}))

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="Stopline is healthy.\n")

    async def is_ready(_: web.Request) -> web.Response:
        if waiting := ready():
            return web.Response(status=503, text=f"Not ready: waiting for {', '.join(waiting)}.\n")
        return web.Response(text="Stopline is ready.\n")

    async def index(_: web.Request) -> web.Response:
        return _compressed(web.Response(text=page.render(state()), content_type="text/html", headers=_SAFE))

    async def state_as_json(request: web.Request) -> web.Response:
        body = page.answer(state(), with_sections="sections" in request.query)
        return _compressed(web.Response(body=body, content_type="application/json", headers=_SAFE))

    app = web.Application(middlewares=[*([guard] if guard else []), _plain_errors])
    app.add_routes(
        [
            web.get("/metrics", metrics),
            web.get("/-/healthy", healthy),
            web.get("/-/ready", is_ready),
            web.get("/", index),
            web.get("/api/state", state_as_json),
        ]
    )
    return app


class _Shared:
    """Pages as they were a moment ago, by format: a thousand who ask at once cost one rendering, not a thousand."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[float, bytes]] = {}

    def get(self, kind: str, make: Callable[[], bytes]) -> bytes:
        """What *make* gives, or gave within the last tenth of a second."""
        at, body = self._made.get(kind, (-math.inf, b""))
        now = time.monotonic()
        if now - at > _SHARED_SECONDS:
            body = make()
            self._made[kind] = (time.monotonic(), body)
        return body


_SAFE = {
    "Content-Security-Policy": page.POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@web.middleware
async def _plain_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPNotFound:
        return web.Response(status=404, text="Not found; there are /metrics, /-/healthy, /-/ready, /api/state and /.\n")


def _spoken(accept: str) -> str:
    """*accept* without the formats we do not speak: the library would label our answer with any version asked for."""
    kept = []
    for choice in accept.split(","):
        version = _VERSION.search(choice)
        if (version[1] if version else "") in _SPOKEN:
            kept.append(choice)
    return ",".join(kept)


def _compressed(response: web.Response) -> web.Response:
    if response.body_length == 0 or len(response.body or b"") > _COMPRESS_ABOVE:  # type: ignore[arg-type]
        response.enable_compression()
    return response

"""The HTTP side: /metrics, health, and a plain page for a person."""

import html
import re
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from exporter import __version__

_VERSION = re.compile(r"version=([^;,\s]+)")
_SPOKEN = ("", "0.0.4", "1.0.0")
_MAX_NAMES = 500
_COMPRESS_ABOVE = 1024

Row = tuple[str, str]
"""A label and a value, both plain text."""


def build_app(
    registry: CollectorRegistry,
    *,
    ready: Callable[[], list[str]],
    rows: Callable[[], Iterable[Row]],
    guard: Callable[..., Awaitable[web.StreamResponse]] | None = None,
) -> web.Application:
    """The application. *ready* lists what has not been tried yet; *rows* is what the page at / shows.

    *guard* is a middleware that all requests pass first.
    """

    async def metrics(request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(_spoken(request.headers.get("Accept", "")))
        names = request.query.getall("name[]", [])[:_MAX_NAMES]
        chosen = registry.restricted_registry(names) if names else registry
        response = web.Response(body=encode(chosen), headers={"Content-Type": content_type})
        if response.body_length == 0 or len(response.body or b"") > _COMPRESS_ABOVE:  # type: ignore[arg-type]
            response.enable_compression()
        return response

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="Stopline is healthy.\n")

    async def is_ready(_: web.Request) -> web.Response:
        if waiting := ready():
            return web.Response(status=503, text=f"Not ready: waiting for {', '.join(waiting)}.\n")
        return web.Response(text="Stopline is ready.\n")

    async def index(_: web.Request) -> web.Response:
        return web.Response(text=_page(rows()), content_type="text/html", headers=_SAFE)

    app = web.Application(middlewares=[*([guard] if guard else []), _plain_errors])
    app.add_routes(
        [
            web.get("/metrics", metrics),
            web.get("/-/healthy", healthy),
            web.get("/-/ready", is_ready),
            web.get("/", index),
        ]
    )
    return app


_SAFE = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


@web.middleware
async def _plain_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPNotFound:
        return web.Response(status=404, text="Not found; there are /metrics, /-/healthy, /-/ready and /.\n")


def _spoken(accept: str) -> str:
    """*accept* without the formats we do not speak: the library would label our answer with any version asked for."""
    kept = []
    for choice in accept.split(","):
        version = _VERSION.search(choice)
        if (version[1] if version else "") in _SPOKEN:
            kept.append(choice)
    return ",".join(kept)


def _page(rows: Iterable[Row]) -> str:
    body = "".join(
        f"<tr><th scope=row>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>\n" for name, value in rows
    )
    return f"""<!doctype html>
<html lang=en><head><meta charset=utf-8><meta http-equiv=refresh content=2>
<meta name=viewport content="width=device-width, initial-scale=1"><title>Stopline</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 44rem; padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100% }}
th, td {{ text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #8884; font-variant-numeric: tabular-nums }}
th {{ font-weight: normal; color: color-mix(in srgb, currentColor 70%, transparent) }}
</style></head><body>
<h1>Stopline</h1>
<table>
{body}</table>
<p><a href="metrics">Metrics</a> · <a href="-/healthy">healthy</a> · <a href="-/ready">ready</a> ·
version {html.escape(__version__)}</p>
</body></html>
"""

"""The live page in a real browser: it renews itself, breaks no rule of its own policy, and works without scripts."""

import re
from collections.abc import Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from aiohttp.test_utils import TestServer
from aiohttp.typedefs import Handler
from browser import browse
from outline import Outline
from prometheus_client import CollectorRegistry
from states import incident, quiet

from exporter.live import page
from exporter.live.state import State
from exporter.web import build_app


@asynccontextmanager
async def served(states: Iterator[State]):
    app = build_app(CollectorRegistry(), ready=list, state=lambda: next(states))
    async with TestServer(app) as server:
        yield str(server.make_url("/"))


def then(first: State, rest: State) -> Iterator[State]:
    yield first
    while True:
        yield rest


async def test_the_page_renews_itself_and_its_console_is_empty(tmp_path: Path) -> None:
    async with served(then(quiet(), incident())) as url:
        dom, console = await browse(url, tmp_path)
    assert console == []
    assert "<title>Stop line: latency – Stopline</title>" in dom
    assert '<p id="live">● live</p>' in dom
    for name, section in page.sections(incident()).items():
        assert Outline(dom).holds(Outline(section)), name


async def test_without_scripts_the_last_values_are_there(tmp_path: Path) -> None:
    """The policy forbids ours here; that the console says so shows that these tests would see it."""
    headers = {"Content-Security-Policy": re.sub("script-src [^;]+", "script-src 'none'", page.POLICY)}

    async def index(_: web.Request) -> web.Response:
        return web.Response(text=page.render(incident()), content_type="text/html", headers=headers)

    async with serving(index) as url:
        dom, console = await browse(url, tmp_path)
    assert len(console) == 1
    assert "violates the following Content Security Policy directive 'script-src 'none''" in console[0]
    assert '<noscript><meta http-equiv="refresh" content="10"></noscript>' in dom
    assert '<p id="live">as of 08:00:00 UTC</p>' in dom
    assert Outline(dom).holds(Outline(page.sections(incident())["lines"]))


async def test_when_stopline_goes_away_nothing_looks_calm(tmp_path: Path) -> None:
    async def index(_: web.Request) -> web.Response:
        return web.Response(text=page.render(incident()), content_type="text/html")

    async with serving(index) as url:  # and nothing at /api/state
        dom, _ = await browse(url, tmp_path)
    assert '<body class="stale">' in dom
    assert "Not known: Stopline does not answer. What is below is old." in dom


@asynccontextmanager
async def serving(index: Handler):
    app = web.Application()
    app.add_routes([web.get("/", index)])
    async with TestServer(app) as server:
        yield str(server.make_url("/"))

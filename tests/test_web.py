"""What the HTTP side answers, to Prometheus, to Kubernetes and to a person."""

import gzip
import re

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text
from states import quiet

from exporter.live import page
from exporter.web import build_app

OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.1"


@pytest.fixture
async def client(aiohttp_client):
    registry = CollectorRegistry()
    Gauge("stopline_a", "a", ["n"], registry=registry).labels("1").set(1)
    Gauge("stopline_b", "b", registry=registry).set(2)
    waiting: list[str] = ["gpu"]
    app = build_app(registry, ready=lambda: waiting, state=quiet)
    client = await aiohttp_client(app)
    client.waiting = waiting
    client.registry = registry
    return client


async def test_text_is_the_default(client) -> None:
    response = await client.get("/metrics")
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert {f.name for f in text(await response.text())} == {"stopline_a", "stopline_b"}


async def test_openmetrics_is_spoken_to_who_asks(client) -> None:
    response = await client.get("/metrics", headers={"Accept": OPENMETRICS})
    assert response.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert {f.name for f in openmetrics(await response.text())} == {"stopline_a", "stopline_b"}


@pytest.mark.parametrize("version", ["2.0.0", "abc", "9"])
async def test_a_version_we_do_not_speak_is_not_claimed(client, version: str) -> None:
    accept = f"application/openmetrics-text;version={version},text/plain;version=0.0.4;q=0.5"
    response = await client.get("/metrics", headers={"Accept": accept})
    assert response.status == 200
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")


async def test_a_large_page_is_compressed_for_who_can_read_it(client) -> None:
    for n in range(200):
        Gauge(f"stopline_filler_{n}", "x", registry=client.registry).set(n)
    plain = await (await client.get("/metrics", headers={"Accept-Encoding": "identity"})).read()
    response = await client.get("/metrics", headers={"Accept-Encoding": "gzip"}, auto_decompress=False)
    assert response.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(await response.read()) == plain


async def test_single_families_can_be_asked_for(client) -> None:
    response = await client.get("/metrics", params={"name[]": "stopline_b"})
    assert [f.name for f in text(await response.text())] == ["stopline_b"]


async def test_healthy_at_once_and_ready_when_each_source_was_tried(client) -> None:
    assert (await client.get("/-/healthy")).status == 200
    response = await client.get("/-/ready")
    assert (response.status, await response.text()) == (503, "Not ready: waiting for gpu.\n")
    client.waiting.clear()
    assert (await client.get("/-/ready")).status == 200


async def test_the_live_page_may_run_and_load_nothing_but_its_own(client) -> None:
    response = await client.get("/")
    policy = dict(part.strip().split(" ", 1) for part in response.headers["Content-Security-Policy"].split(";"))
    hashes = [policy.pop(name) for name in ("style-src", "script-src")]
    assert all(re.fullmatch(r"'sha256-[\w+/]{43}='", value) for value in hashes)
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert (response.content_type, response.headers["Cache-Control"]) == ("text/html", "no-store")
    assert await response.text() == page.render(quiet())


async def test_its_state_is_json_and_the_sections_come_for_who_asks(client) -> None:
    response = await client.get("/api/state")
    assert (response.content_type, response.headers["Cache-Control"]) == ("application/json", "no-store")
    assert await response.read() == page.answer(quiet(), with_sections=False)
    told = await (await client.get("/api/state?sections")).json()
    assert told["sections"] == page.sections(quiet())


async def test_a_path_that_is_not_there_says_which_are(client) -> None:
    response = await client.get("/metric")
    assert (response.status, "/metrics" in await response.text()) == (404, True)
    assert (await client.post("/metrics")).status == 405

"""The engine's endpoint, over real sockets: what it tells, and everything that can be wrong with it."""

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from harness import Clock
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter import catalog, strictyaml
from exporter.engines import profile as profiles
from exporter.engines.profile import Profile
from exporter.lifecycle import Lifecycle
from exporter.sources.fetch import Access, Server, Unreadable
from exporter.sources.page import PageReader
from exporter.sources.scrape import ScrapeSource
from exporter.store import Store

FIXTURES = Path(__file__).parent.parent / "fixtures"
IDLE = (FIXTURES / "vllm/0.32.0/metrics-idle.txt").read_text()
QUEUEING = (FIXTURES / "vllm/0.32.0/metrics-queueing.txt").read_text()


async def never() -> None:
    raise AssertionError("once() does not wait")


class Rig:
    """A scrape source over a server whose handlers the test sets."""

    def __init__(self, session: aiohttp.ClientSession, url: str, **options) -> None:
        self.clock = Clock()
        self.store = Store(clock=self.clock, wall=lambda: 1_796_100_000.0 + self.clock.now)
        self.lifecycle = Lifecycle(has_page=True)
        profile = options.pop("profile", profiles.bundled("vllm"))
        server = Server(url.rstrip("/"), session, options.pop("access", Access(timeout=5.0)))
        self.source = ScrapeSource(server, profile, self.store, self.lifecycle, tick=never, clock=self.clock, **options)

    async def once(self) -> "Rig":
        await self.source.once()
        self.clock.pass_(1.0)
        return self

    @property
    def reading(self):
        return self.store.readings["metrics"]

    def gauge(self, family: catalog.Family) -> dict:
        return self.store.gauges().get(family, {})


class Upstream:
    """Answers /metrics and /health with what the test set."""

    def __init__(self) -> None:
        self.page: str | bytes = IDLE
        self.path = "/metrics"
        self.moved: dict[str, str] = {}
        self.status = 200
        self.health = 200
        self.headers: dict[str, str] = {}
        self.asked: list[web.Request] = []
        self.health_asked = 0
        self.hold: asyncio.Event | None = None
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/{path:.*}", self._metrics)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("/"))

    async def _metrics(self, request: web.Request) -> web.Response:
        self.asked.append(request)
        if self.hold is not None:
            await self.hold.wait()
        if to := self.moved.get(request.path):
            return web.Response(status=307, headers={"Location": to})
        if request.path != self.path:
            raise web.HTTPNotFound
        body = self.page.encode() if isinstance(self.page, str) else self.page
        return web.Response(body=body, status=self.status, headers=self.headers)

    async def _health(self, _: web.Request) -> web.Response:
        self.health_asked += 1
        return web.Response(status=self.health)


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
async def upstream():
    upstream = Upstream()
    await upstream.server.start_server()
    yield upstream
    if upstream.hold is not None:
        upstream.hold.set()
    await upstream.server.close()


def test_credentials_that_cannot_be_read_are_a_reason(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="credentials"):
        Access(token_file=tmp_path / "none").headers()


async def test_gauges_of_a_queueing_server(session, upstream) -> None:
    upstream.page = QUEUEING
    rig = await Rig(session, upstream.url).once()
    assert rig.gauge(catalog.RUNNING) == {("tiny", "0"): 8.0}
    assert rig.gauge(catalog.WAITING) == {("tiny", "0"): 24.0}
    assert rig.gauge(catalog.METRIC_MISSING) == {}
    assert rig.reading.ok
    assert rig.lifecycle.up


async def test_nobody_listens(session) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    rig = await Rig(session, url).once()
    assert (rig.reading.ok, rig.reading.reason, rig.reading.samples) == (False, "refused", ())
    assert (rig.lifecycle.phase, rig.lifecycle.up) == ("starting", False)


@pytest.mark.parametrize(
    ("page", "status", "reason"),
    [
        ("", 404, "http_404"),
        ("", 503, "http_503"),
        ("<html>hello</html>", 200, "not_metrics"),
        (b"\xff\xfe\x00", 200, "not_metrics"),
        ("# HELP x y\n" + "x" * 5000, 200, "too_large"),
    ],
)
async def test_an_answer_that_is_no_page_has_its_reason(session, upstream, page, status, reason) -> None:
    upstream.page, upstream.status = page, status
    rig = await Rig(session, upstream.url, access=Access(max_bytes=4096)).once()
    assert (rig.reading.ok, rig.reading.reason) == (False, reason)


async def test_a_server_that_does_not_answer_costs_the_deadline_and_no_more(session, upstream) -> None:
    upstream.hold = asyncio.Event()
    rig = Rig(session, upstream.url, access=Access(timeout=0.05))
    await asyncio.wait_for(rig.once(), 2.0)
    assert rig.reading.reason == "timeout"


@asynccontextmanager
async def answering(raw: bytes) -> AsyncIterator[str]:
    """A server that writes *raw* to whoever comes, and closes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(raw)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_connection_cut_amid_the_page_gives_no_half_a_page(session) -> None:
    async with answering(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n" + IDLE.encode()[:5000]) as url:
        rig = await Rig(session, url).once()
    assert (rig.reading.ok, rig.reading.reason, rig.reading.samples) == (False, "broken", ())


@pytest.mark.parametrize(("page", "ok"), [(IDLE, True), (IDLE[:-3], False), (IDLE[: IDLE.rindex("\n") + 1], True)])
async def test_where_nothing_tells_the_end_of_a_page_it_ends_with_a_line(session, page: str, ok: bool) -> None:
    """311 of 31124 tokens would else be a fall, and then a rise."""
    async with answering(b"HTTP/1.0 200 OK\r\n\r\n" + page.encode()) as url:
        rig = await Rig(session, url).once()
    assert (rig.reading.ok, rig.reading.reason) == (ok, "" if ok else "broken")


@pytest.mark.parametrize("body", ["", "OK", "OK\n", "a\nb\n"])
async def test_an_answer_of_one_line_needs_no_end_of_it(session, body: str) -> None:
    """As of /health."""
    async with answering(b"HTTP/1.0 200 OK\r\n\r\n" + body.encode()) as url:
        assert await Server(url, session, Access()).get("/health") == (body, False)


async def test_a_page_of_the_process_alone_is_not_recognised(session, upstream) -> None:
    upstream.page = "python_info 1\nprocess_start_time_seconds 5\n"
    rig = await Rig(session, upstream.url, profile=None).once()
    assert (rig.reading.ok, rig.reading.reason) == (False, "not_recognised")
    assert not rig.lifecycle.up


async def test_the_engine_is_recognised_once_its_page_is_there(session, upstream) -> None:
    found = []
    upstream.page = "python_info 1\n"
    rig = await Rig(session, upstream.url, profile=None, recognised=found.append).once()
    upstream.page = IDLE
    await rig.once()
    await rig.once()
    assert [p.engine for p in found] == ["vllm"]
    assert rig.reading.ok


async def test_gzip_is_read(session, upstream) -> None:
    upstream.page = gzip.compress(QUEUEING.encode())
    upstream.headers = {"Content-Encoding": "gzip"}
    rig = await Rig(session, upstream.url).once()
    assert rig.gauge(catalog.RUNNING) == {("tiny", "0"): 8.0}


async def test_a_failed_poll_drops_every_gauge_and_no_counter(session, upstream) -> None:
    rig = await Rig(session, upstream.url).once()
    upstream.page = QUEUEING
    await rig.once()
    counted = dict(rig.store.counters[catalog.TOKENS])
    upstream.status = 500
    await rig.once()
    assert rig.gauge(catalog.RUNNING) == {}
    assert rig.store.counters[catalog.TOKENS] == counted
    assert sum(counted.values()) > 0


async def test_what_can_be_counted_exists_at_zero_after_the_first_page(session, upstream) -> None:
    rig = await Rig(session, upstream.url).once()
    assert rig.store.counters[catalog.REQUESTS] == {
        ("tiny", outcome): 0.0 for outcome in ("ok", "error", "aborted", "rejected")
    }
    assert rig.store.histograms[catalog.QUEUE_WAIT]["tiny", "metrics"].cumulative()[-1] == 0
    assert set(rig.store.counters[catalog.ERRORS]) == {("server_error", "metrics"), ("rejected", "metrics")}


async def test_a_frozen_engine_behind_a_server_that_answers_is_dead(session, upstream) -> None:
    upstream.page = QUEUEING
    rig = await Rig(session, upstream.url).once()
    assert rig.lifecycle.up
    upstream.health = 503
    for _ in range(5):
        await rig.once()
    assert (rig.reading.reason, rig.lifecycle.phase, rig.lifecycle.up) == ("unhealthy", "dead", False)
    assert rig.gauge(catalog.RUNNING) == {}
    upstream.health = 200
    await rig.once()
    assert (rig.lifecycle.phase, rig.lifecycle.up) == ("serving", True)


async def test_what_a_dead_engine_answers_is_still_counted(session, upstream) -> None:
    failed = 'http_requests_total{{handler="/v1/completions",method="POST",status="5xx"}} {}\n'
    upstream.page = QUEUEING + failed.format(1)
    rig = await Rig(session, upstream.url).once()
    upstream.health, upstream.page = 503, QUEUEING + failed.format(9)
    for _ in range(6):
        await rig.once()
    assert rig.reading.reason == "unhealthy"
    assert rig.store.counters[catalog.ERRORS]["server_error", "metrics"] == 8.0


async def test_health_is_not_asked_at_every_poll(session, upstream) -> None:
    rig = Rig(session, upstream.url)
    for _ in range(20):
        await rig.once()
    assert upstream.health_asked == 4


async def test_a_restart_of_the_engine_never_takes_anything_away(session, upstream) -> None:
    rig = await Rig(session, upstream.url).once()
    seen = []
    restarted = IDLE.replace("process_start_time_seconds 1.7960", "process_start_time_seconds 1.7961")
    assert restarted != IDLE
    for page in (QUEUEING, restarted, QUEUEING, IDLE):
        upstream.page = page
        await rig.once()
        buckets = rig.store.histograms[catalog.FIRST_TOKEN]["tiny", "metrics"]
        seen.append((sum(rig.store.counters[catalog.TOKENS].values()), buckets.cumulative()[-1]))
    assert seen == sorted(seen)


async def test_a_restart_seen_on_the_page_takes_no_signal_from_the_log(session, upstream) -> None:
    """The log told the same requests already; its own start line is what opens the question anew."""
    rig = await Rig(session, upstream.url).once()
    rig.store.observe(catalog.FIRST_TOKEN, ("tiny",), 0.1, origin="log")
    upstream.page = QUEUEING.replace("seconds 1.7960", "seconds 1.7961")
    await rig.once()
    assert rig.store.histograms[catalog.FIRST_TOKEN]["tiny", "metrics"].cumulative()[-1] == 0


async def test_another_model_after_a_restart_leaves_nothing_of_the_first(session, upstream) -> None:
    rig = await Rig(session, upstream.url).once()
    upstream.page = QUEUEING.replace('"tiny"', '"big"').replace("seconds 1.7960", "seconds 1.7961")
    await rig.once()
    assert {labels[0] for labels in rig.store.counters[catalog.TOKENS]} == {"big"}
    assert rig.lifecycle.info["model"] == "big"


async def test_another_model_without_a_restart_leaves_nothing_of_the_first(session, upstream) -> None:
    """Served under another name behind the same address: the process that changed need not tell its start time."""
    page = "".join(line for line in QUEUEING.splitlines(keepends=True) if "process_start_time" not in line)
    upstream.page = page
    rig = await Rig(session, upstream.url).once()
    upstream.page = page.replace('"tiny"', '"big"')
    await rig.once()
    assert {labels[0] for labels in rig.store.counters[catalog.TOKENS]} == {"big"}


async def test_what_the_log_counted_so_far_is_not_counted_twice_when_the_page_takes_over(session, upstream) -> None:
    name = 'vllm:generation_tokens_total{{engine="0",model_name="m"}} {}\n'
    upstream.page = 'vllm:num_requests_running{engine="0",model_name="m"} 0\n'
    rig = await Rig(session, upstream.url).once()
    rig.store.count(catalog.TOKENS, ("m", "generation"), 40.0, origin="log")
    seen = []
    for value in (40, 45, 52):
        upstream.page = name.format(value)
        await rig.once()
        seen.append(rig.store.counters[catalog.TOKENS]["m", "generation"])
    assert seen == [40.0, 45.0, 52.0]


async def test_a_dead_engine_is_not_revived_by_counters_its_server_moves(session, upstream) -> None:
    upstream.page = QUEUEING
    rig = await Rig(session, upstream.url).once()
    rig.lifecycle.enter("dead")
    upstream.health = 503
    for refused in (1, 2):
        upstream.page = (
            QUEUEING + f'http_requests_total{{handler="/v1/completions",method="POST",status="5xx"}} {refused}\n'
        )
        await rig.once()
    assert (rig.lifecycle.phase, rig.lifecycle.up) == ("dead", False)


async def test_a_restart_after_a_planned_stop_needs_no_line_in_the_log(session, upstream) -> None:
    upstream.page = QUEUEING
    rig = await Rig(session, upstream.url).once()
    rig.lifecycle.enter("stopping")
    upstream.page = IDLE.replace("process_start_time_seconds 1.7960", "process_start_time_seconds 1.7961")
    await rig.once()
    assert (rig.lifecycle.phase, rig.lifecycle.up) == ("serving", True)


async def test_a_page_with_a_rank_for_every_request_stays_bounded(session, upstream) -> None:
    upstream.page = "".join(f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} 1\n' for rank in range(1100))
    rig = await Rig(session, upstream.url).once()
    assert len(rig.gauge(catalog.RUNNING)) == 1025
    assert rig.gauge(catalog.RUNNING)["m", "other"] == 1100 - 1024


async def test_a_gateways_page_in_the_engines_place_is_told(session, upstream) -> None:
    upstream.page = 'envoy_cluster_upstream_rq_total{cluster="m"} 3\n'
    rig = await Rig(session, upstream.url).once()
    assert rig.reading.reason == "not_recognised"


async def test_an_expected_metric_that_is_missing_is_told(session, upstream) -> None:
    upstream.page = "".join(line for line in IDLE.splitlines(keepends=True) if "num_requests_running" not in line)
    rig = await Rig(session, upstream.url).once()
    assert rig.gauge(catalog.METRIC_MISSING) == {("vllm:num_requests_running",): 1.0}


@pytest.mark.parametrize(
    "names", [["gpu_cache_usage_perc"], ["kv_cache_usage_perc"], ["gpu_cache_usage_perc", "kv_cache_usage_perc"]]
)
async def test_old_and_new_names_give_the_same_series(session, upstream, names: list[str]) -> None:
    upstream.page = "".join(f'vllm:{name}{{engine="0",model_name="m"}} 0.5\n' for name in names)
    rig = await Rig(session, upstream.url).once()
    assert rig.gauge(catalog.KV_USAGE) == {("m", "0"): 0.5}


async def test_ranks_count_for_themselves_and_add_up(session, upstream) -> None:
    upstream.page = "".join(
        f'vllm:num_requests_running{{engine="{rank}",model_name="m"}} {n}\n'
        f'vllm:generation_tokens_total{{engine="{rank}",model_name="m"}} {n * 100}\n'
        for rank, n in ((0, 3), (1, 5))
    )
    rig = await Rig(session, upstream.url).once()
    upstream.page = upstream.page.replace(" 300\n", " 310\n").replace(" 500\n", " 505\n")
    await rig.once()
    assert rig.gauge(catalog.RUNNING) == {("m", "0"): 3.0, ("m", "1"): 5.0}
    assert rig.store.counters[catalog.TOKENS]["m", "generation"] == 15.0


async def test_a_refusal_that_two_counters_tell_in_two_polls_is_one(session, upstream) -> None:
    def page(refused: int, failed: int) -> str:
        return (
            f'vllm:admission_rejections_total{{model_name="m",reason="max_num_queued_reqs"}} {refused}\n'
            f'http_requests_total{{handler="/v1/completions",method="POST",status="5xx"}} {failed}\n'
        )

    rig = Rig(session, upstream.url)
    for refused, failed in ((0, 0), (3, 1), (3, 3), (3, 5)):
        upstream.page = page(refused, failed)
        await rig.once()
    assert rig.store.counters[catalog.ERRORS] == {("rejected", "metrics"): 3.0, ("server_error", "metrics"): 2.0}


@pytest.mark.parametrize(("share", "told"), [("1.0", 1.0), ("1.0005", 1.0005), ("1.7", None), ("95", None)])
async def test_more_than_all_of_the_cache_is_no_share(session, upstream, share: str, told: float | None) -> None:
    upstream.page = f'vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {share}\n'
    rig = await Rig(session, upstream.url).once()
    assert list(rig.gauge(catalog.KV_USAGE).values()) == ([] if told is None else [told])
    assert rig.store.counters[catalog.SERIES_DROPPED] == (
        {("stopline_kv_cache_usage_ratio",): 1} if told is None else {}
    )


async def test_sentinels_and_nonsense_are_dropped_and_counted(session, upstream) -> None:
    bad = 'vllm:num_requests_running{engine="0",model_name="m"} -1\nvllm:kv_cache_usage_perc{engine="0",model_name="m"} NaN\n'
    upstream.page = bad
    rig = await Rig(session, upstream.url).once()
    assert (rig.gauge(catalog.RUNNING), rig.gauge(catalog.KV_USAGE)) == ({}, {})
    assert rig.store.counters[catalog.SERIES_DROPPED] == {
        ("stopline_requests_running",): 1,
        ("stopline_kv_cache_usage_ratio",): 1,
    }


async def test_an_uptime_in_a_sum_is_dropped_and_the_next_window_counts(session, upstream) -> None:
    def page(counts: int, total: float) -> str:
        name = "vllm:request_queue_time_seconds"
        return (
            "process_start_time_seconds 1796100000\n"
            f'{name}_bucket{{le="0.3",model_name="m"}} {counts}\n{name}_bucket{{le="+Inf",model_name="m"}} {counts}\n'
            f'{name}_count{{model_name="m"}} {counts}\n{name}_sum{{model_name="m"}} {total}\n'
        )

    rig = Rig(session, upstream.url)
    for counts, total in ((0, 0.0), (2, 600_000.0), (3, 600_000.01), (4, 5.0), (5, 5.02)):
        upstream.page = page(counts, total)
        await rig.once()
    buckets = rig.store.histograms[catalog.QUEUE_WAIT]["m", "metrics"]
    assert (buckets.cumulative()[-1], buckets.sum) == (2, pytest.approx(0.03))
    assert rig.store.counters[catalog.SERIES_DROPPED] == {("stopline_request_queue_wait_seconds",): 3}


def queue_page(low: int, all_: int, total: object) -> str:
    """A vLLM page of the queue wait alone: requests of at most 0.3 s, all of them, and their sum."""
    name = "vllm:request_queue_time_seconds"
    return (
        "process_start_time_seconds 1796100000\n"
        f'{name}_bucket{{le="0.3",model_name="m"}} {low}\n{name}_bucket{{le="+Inf",model_name="m"}} {all_}\n'
        f'{name}_count{{model_name="m"}} {all_}\n{name}_sum{{model_name="m"}} {total}\n'
    )


@pytest.mark.parametrize(
    ("low", "all_", "total"),
    [
        (12, 12, -5.0),
        (12, 12, 599_999.0),
        (12, 12, 0.9),
        (12, 12, "NaN"),
        (12, 12, "+Inf"),
        (12, 12, 700.0),
        (8, 12, 1.2),
        (10, 12, 1.02),
    ],
    ids=["negative-sum", "uptime", "sum-falls", "nan", "infinite", "sum-above", "bucket-falls", "sum-below"],
)
async def test_a_window_that_cannot_be_true_changes_no_quantile(session, upstream, low, all_, total) -> None:
    """What engines tell of requests that ended before a milestone is dropped and counted, and the next poll counts."""
    rig = Rig(session, upstream.url)
    for page in (queue_page(0, 0, 0.0), queue_page(10, 10, 1.0), queue_page(low, all_, total)):
        upstream.page = page
        await rig.once()
    buckets = rig.store.histograms[catalog.QUEUE_WAIT]["m", "metrics"]
    assert (buckets.cumulative()[-1], buckets.sum) == (10, pytest.approx(1.0))
    assert rig.store.counters[catalog.SERIES_DROPPED]["stopline_request_queue_wait_seconds",] >= 1


async def test_a_queue_wait_is_spread_as_the_first_tokens_of_the_same_engine_were(session, upstream) -> None:
    """Of four that ended together one had a late first token: it has waited, and the three have not."""

    def page(first: tuple[int, ...], first_sum: float, ended: int, waited: float) -> str:
        name = "vllm:time_to_first_token_seconds"
        labels = 'engine="0",model_name="m"'
        bounds = ("0.06", "0.25", "0.5", "+Inf")
        buckets = [f'{name}_bucket{{{labels},le="{le}"}} {n}\n' for le, n in zip(bounds, first, strict=True)]
        queue = queue_page(ended, ended, waited).replace('model_name="m"', labels)
        return f"{''.join(buckets)}{name}_count{{{labels}}} {first[-1]}\n{name}_sum{{{labels}}} {first_sum}\n{queue}"

    rig = Rig(session, upstream.url)
    for text in (page((0, 0, 0, 0), 0, 0, 0), page((3, 3, 4, 4), 0.45, 0, 0), page((3, 3, 4, 4), 0.45, 4, 0.2)):
        upstream.page = text
        await rig.once()
    buckets = rig.store.histograms[catalog.QUEUE_WAIT]["m", "metrics"]
    at_rest = next(n for bound, n in zip(buckets.bounds, buckets.cumulative(), strict=False) if bound > 0.01)
    assert (at_rest, buckets.cumulative()[-1], buckets.sum) == (3, 4, pytest.approx(0.2))


async def test_the_token_is_read_anew_for_each_request(session, upstream, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("one\n")
    rig = await Rig(session, upstream.url, access=Access(token_file=token)).once()
    token.write_text("two\n")
    await rig.once()
    assert [r.headers["Authorization"] for r in upstream.asked] == ["Bearer one", "Bearer two"]


async def test_basic_authentication(session, upstream, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret\n")
    await Rig(session, upstream.url, access=Access(user="me", password_file=tmp_path / "password")).once()
    assert upstream.asked[0].headers["Authorization"] == "Basic bWU6c2VjcmV0"


async def test_only_changes_of_state_are_logged(session, upstream, caplog) -> None:
    caplog.set_level("INFO")
    rig = Rig(session, upstream.url)
    for status in (500, 500, 500, 200, 200, 500):
        upstream.status = status
        await rig.once()
    told = [r.levelname for r in caplog.records if r.name.startswith("exporter")]
    assert told == ["WARNING", "INFO", "WARNING"]


def written(metrics: dict, **more) -> Profile:
    """A profile as a user writes it, with these metrics."""
    text = json.dumps({"engine": "acme", "detect": {"metrics": ["acme_"]}, "metrics": metrics, **more})
    return strictyaml.parse(text, Profile, "acme.yaml")


async def over_pages(session, upstream, profile: Profile, *pages: str) -> Rig:
    rig = Rig(session, upstream.url, profile=profile)
    for page in pages:
        upstream.page = page
        await rig.once()
    return rig


async def test_a_ratio_of_two_gauges_is_taken_series_by_series(session, upstream) -> None:
    metrics = {"kv_cache_usage_ratio": {"sample": "acme_used", "over": "acme_all"}}
    profile = written(metrics, labels={"rank": "dp"})
    page = 'acme_used{dp="0"} 30\nacme_used{dp="1"} 5\nacme_used{dp="2"} 5\n'
    page += 'acme_all{dp="0"} 40\nacme_all{dp="1"} 50\nacme_all{dp="3"} 9\nacme_all{dp="4"} 0\nacme_used{dp="4"} 1\n'
    rig = await over_pages(session, upstream, profile, page)
    assert rig.gauge(catalog.KV_USAGE) == {("", "0"): 0.75, ("", "1"): 0.1}


async def test_a_sum_and_a_number_that_are_two_counters_make_a_histogram(session, upstream) -> None:
    rule = {"sample": "acme_wait_us", "count": "acme_done", "scale": 1e-6}
    pages = (
        f"# TYPE acme_wait_us counter\nacme_wait_us {us}\nacme_done {n}\n" for us, n in ((5e6, 9), (5e6, 9), (8e6, 11))
    )
    rig = await over_pages(session, upstream, written({"request_queue_wait_seconds": rule}), *pages)
    buckets = rig.store.histograms[catalog.QUEUE_WAIT]["", "metrics"]
    assert (buckets.cumulative()[-1], buckets.sum) == (2, pytest.approx(3.0))


@pytest.mark.parametrize("kind", ["# TYPE acme_evicted counter\n", ""])
@pytest.mark.parametrize("name", ["acme_evicted", "acme_evicted_total"])
async def test_a_counter_is_written_as_the_engine_prints_it(session, upstream, name: str, kind: str) -> None:
    profile = written({"preemptions_total": {"sample": name}})
    pages = (f"{kind.replace('acme_evicted', name)}{name} {n}\n" for n in (3, 5, 1, -4, 2))
    rig = await over_pages(session, upstream, profile, *pages)
    assert rig.gauge(catalog.METRIC_MISSING) == {}
    assert rig.store.counters[catalog.PREEMPTIONS] == {("",): 2 + 1 + 1}


async def test_the_sum_of_a_histogram_can_be_a_counter_and_the_histogram_is_still_read(session, upstream) -> None:
    metrics = {
        "step_latency_seconds": {"sample": "acme_step", "labels": {"phase": "decode"}},
        "step_seconds_total": {"sample": "acme_step_sum", "labels": {"phase": "decode"}},
    }
    pages = (
        f'# TYPE acme_step histogram\nacme_step_bucket{{le="1"}} {n}\nacme_step_bucket{{le="+Inf"}} {n}\n'
        f"acme_step_sum {n / 4}\nacme_step_count {n}\n"
        for n in (0, 8)
    )
    rig = await over_pages(session, upstream, written(metrics), *pages)
    assert rig.store.counters[catalog.STEP_SECONDS] == {("", "decode"): 2.0}
    assert rig.store.histograms[catalog.STEP_LATENCY]["", "decode", "metrics"].sum == pytest.approx(2.0)


GONE = {
    "requests_total": {
        "sample": "acme_first_count",
        "less": ["acme_done_count"],
        "open": ["acme_running", "acme_waiting"],
        "labels": {"outcome": "aborted"},
    }
}


def flow(first: int, done: int, running: int, waiting: int) -> str:
    return f"acme_first_count {first}\nacme_done_count {done}\nacme_running {running}\nacme_waiting {waiting}\n"


@pytest.mark.parametrize(
    ("polls", "aborted"),
    [
        ([(0, 0, 0, 0), (4, 0, 4, 2), (6, 3, 3, 0), (6, 6, 0, 0)], 0),
        ([(0, 0, 0, 0), (4, 0, 4, 2), (6, 3, 2, 0), (6, 5, 0, 0)], 1),  # one of six went
        ([(0, 0, 0, 0), (4, 0, 2, 2), (4, 0, 2, 0), (4, 2, 0, 0)], 2),  # hidden behind the queue for a poll
        ([(9, 1, 3, 4), (9, 4, 0, 4), (13, 8, 0, 0)], 0),  # what was open at the first poll is not counted
        ([(9, 1, 3, 0), (9, 4, 0, 0), (12, 5, 2, 0), (12, 6, 1, 0), (12, 6, 0, 0)], 1),
        ([(5, 0, 5, 0), (2, 0, 2, 0), (2, 2, 0, 0)], 0),  # what a restart ended did not go away by itself
        ([(0, 0, 0, 0), (4, 0, 0, 0), (4, 0, 4, 0), (4, 4, 0, 0)], 0),  # a gauge that is a poll late
    ],
)
async def test_who_was_admitted_and_is_neither_finished_nor_open_has_gone_away(
    session, upstream, polls, aborted
) -> None:
    rig = await over_pages(session, upstream, written(GONE), *(flow(*poll) for poll in (*polls, polls[-1])))
    assert rig.store.counters[catalog.REQUESTS] == {("", "aborted"): aborted}


@settings(max_examples=200, deadline=None)
@given(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)),
    st.lists(st.sampled_from(["arrive", "first", "finish", "abort", "poll"]), max_size=80),
)
def test_who_went_away_is_never_overcounted_and_exact_once_nothing_was_open(start, events: list[str]) -> None:
    profile = written(GONE)
    store, clock = Store(), Clock()
    source = ScrapeSource(None, profile, store, Lifecycle(has_page=True), tick=never, clock=clock)
    waiting, running, done = start
    first, gone, since_idle, idle = running + done, 0, 0, False
    for event in ("poll", *events, *["first", "finish"] * 80, "poll", "poll"):
        if event == "arrive":
            waiting += 1
        elif event == "first" and waiting:
            waiting, running, first = waiting - 1, running + 1, first + 1
        elif event == "finish" and running:
            running, done = running - 1, done + 1
        elif event == "abort" and running:
            running, gone, since_idle = running - 1, gone + 1, since_idle + idle
        elif event == "poll":
            source._translate(PageReader(profile).read(flow(first, done, running, waiting)), None)
            told = store.counters[catalog.REQUESTS].get(("", "aborted"), 0.0)
            assert told <= gone
            idle |= not running + waiting
    assert told >= since_idle


@pytest.mark.parametrize("gauge", ["", "acme_running NaN\n", "acme_running{ 5\n", "acme_running -3\n"])
async def test_a_gauge_that_is_not_there_for_a_poll_makes_nobody_go_away(session, upstream, gauge: str) -> None:
    busy = flow(5, 0, 5, 0)
    without = busy.replace("acme_running 5\n", gauge)
    pages = (flow(0, 0, 0, 0), busy, without, without, busy, flow(5, 5, 0, 0), flow(5, 5, 0, 0))
    rig = await over_pages(session, upstream, written(GONE), *pages)
    assert rig.store.counters[catalog.REQUESTS] == {("", "aborted"): 0}


async def test_what_is_told_twice_is_owed_for_a_few_polls_only(session, upstream) -> None:
    rule = {"sample": "acme_all", "less": ["acme_left"], "labels": {"outcome": "ok"}}
    pages = [
        f"acme_all {done}\nacme_left {left}\n"
        for done, left in ((0, 0), (0, 4), (1, 4), (1, 4), (1, 4), (1, 4), (5, 4))
    ]
    rig = await over_pages(session, upstream, written({"requests_total": rule}), *pages)
    assert rig.store.counters[catalog.REQUESTS] == {("", "ok"): 4.0}


async def test_a_gauge_is_no_counter_whatever_its_name_ends_in(session, upstream) -> None:
    metrics = {
        "requests_running": {"sample": "acme_running_count"},
        "requests_total": {"sample": "acme_done", "labels": {"outcome": "ok"}},
    }
    pages = (
        f"# TYPE acme_running_count gauge\nacme_running_count {n}\nacme_done {done}\n"
        for n, done in ((9, 1000), (0, 1002))
    )
    rig = await over_pages(session, upstream, written(metrics), *pages)
    assert rig.store.counters[catalog.REQUESTS] == {("", "ok"): 2.0}


async def test_a_counter_that_its_page_calls_total_may_be_named_without(session, upstream) -> None:
    pages = (f"# TYPE acme_evicted_total counter\nacme_evicted_total {n}\n" for n in (1, 3))
    rig = await over_pages(session, upstream, written({"preemptions_total": {"sample": "acme_evicted"}}), *pages)
    assert rig.store.counters[catalog.PREEMPTIONS] == {("",): 2.0}


async def test_a_histogram_whose_sum_is_no_number_is_dropped_and_counted(session, upstream) -> None:
    rule = {"sample": "acme_wait"}
    pages = (
        f'acme_wait_bucket{{le="+Inf"}} {n}\nacme_wait_count {n}\nacme_wait_sum {total}\n'
        for n, total in ((0, 0), (5, "NaN"))
    )
    rig = await over_pages(session, upstream, written({"request_queue_wait_seconds": rule}), *pages)
    assert rig.store.histograms[catalog.QUEUE_WAIT]["", "metrics"].cumulative()[-1] == 0
    assert rig.store.counters[catalog.SERIES_DROPPED]["stopline_request_queue_wait_seconds",] >= 1


@pytest.mark.parametrize("odd", ["\u2028", "\x85", "\x0c", "\x1c"])
async def test_only_a_newline_ends_a_sample(session, upstream, odd: str) -> None:
    metrics = {"requests_waiting": {"sample": "acme_waiting"}, "requests_running": {"sample": "acme_running"}}
    page = f'acme_running{{name="x{odd}acme_waiting 4242{odd}y"}} 1\n'
    rig = await over_pages(session, upstream, written(metrics), page)
    assert rig.gauge(catalog.WAITING) == {}
    assert sum(rig.gauge(catalog.RUNNING).values()) == 1


async def test_records_that_are_gone_once_read_are_not_read_again_unasked(session, upstream) -> None:
    upstream.page = '[{"iter": 1}]'
    rig = await Rig(session, upstream.url, profile=None).once()
    for _ in range(40):
        await rig.once()
    assert [request.path for request in upstream.asked].count("/metrics") == 1
    assert not rig.reading.ok


async def test_a_page_at_another_engines_path_is_found_and_kept(session, upstream) -> None:
    upstream.path = "/prometheus/metrics"
    rig = await Rig(session, upstream.url, profile=None).once()
    await rig.once()
    assert rig.reading.ok
    paths = [request.path for request in upstream.asked]
    assert (paths[0], paths[-2:], paths.count("/metrics")) == ("/metrics", [upstream.path] * 2, 1)


async def test_a_server_without_a_page_is_not_asked_everywhere_at_every_poll(session, upstream) -> None:
    upstream.status = 404
    rig = await Rig(session, upstream.url).once()
    first = len(upstream.asked)
    for _ in range(20):
        await rig.once()
    assert rig.reading.reason == "http_404"
    assert [request.path for request in upstream.asked[first:]] == ["/metrics"] * 20


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("/metrics/", ""),
        ("{url}metrics/", ""),
        ("http://127.0.0.2:1/metrics", "http_307"),
        ("//127.0.0.2:1/metrics", "http_307"),
        ("/metrics", "broken"),
        ("http://[", "broken"),
    ],
)
async def test_a_redirect_is_followed_on_the_same_server_only(session, upstream, location: str, reason: str) -> None:
    upstream.path = "/metrics/"
    upstream.moved = {"/metrics": location.format(url=upstream.url)}
    rig = await Rig(session, upstream.url).once()
    assert rig.reading.reason == reason


async def test_gauges_are_multiplied_and_taken_off_series_by_series(session, upstream) -> None:
    metrics = {
        "kv_cache_capacity_tokens": {"sample": "acme_blocks", "times": "acme_block_size"},
        "kv_cache_capacity_bytes": {"sample": "acme_info", "label_value": "blocks", "times": "bytes"},
        "requests_running": {"sample": "acme_inflight", "less": ["acme_queued"]},
    }
    profile = written(metrics, labels={"rank": "dp"})
    page = 'acme_blocks{dp="0"} 30\nacme_blocks{dp="1"} 5\nacme_block_size{dp="0"} 16\n'
    page += 'acme_info{dp="0",blocks="30",bytes="4096"} 1\nacme_info{dp="1",blocks="30",bytes="None"} 1\n'
    page += 'acme_inflight{dp="0"} 9\nacme_inflight{dp="1"} 4\nacme_queued{dp="0"} 2\nacme_queued{dp="2"} 1\n'
    rig = await over_pages(session, upstream, profile, page)
    assert rig.gauge(catalog.KV_TOKENS) == {("", "0"): 480.0}
    assert rig.gauge(catalog.KV_BYTES) == {("", "0"): 122_880.0}
    assert rig.gauge(catalog.RUNNING) == {("", "0"): 7.0, ("", "1"): 4.0}


async def test_a_counter_that_an_engine_shows_only_once_it_has_counted_exists_before(session, upstream) -> None:
    metrics = {
        "preemptions_total": {"sample": "acme_evicted", "optional": True},
        "request_queue_wait_seconds": {"sample": "acme_wait", "optional": True},
    }
    rig = await over_pages(session, upstream, written(metrics), "acme_other 1\n")
    assert rig.reading.ok
    assert rig.store.counters[catalog.PREEMPTIONS] == {("",): 0.0}
    assert rig.store.histograms == {}


@pytest.mark.parametrize(("late", "counted"), [(0.1, 1), (1.5, 2)])
async def test_what_the_page_told_a_moment_ago_the_log_does_not_tell_again(session, upstream, late, counted) -> None:
    metrics = {"requests_total": {"sample": "acme_left", "labels": {"outcome": "aborted"}}}
    profile = written(metrics, order={"requests_total": ["log", "metrics"]})
    rig = await over_pages(session, upstream, profile, "acme_left 0\n", "acme_left 1\n")
    rig.clock.pass_(late - 1.0)
    for _ in range(2):  # the first is the one the page told, or another
        rig.store.count(catalog.REQUESTS, ("", "aborted"), origin="log")
    upstream.page = "acme_left 2\n"
    await rig.once()
    assert rig.store.counters[catalog.REQUESTS] == {("", "aborted"): counted + 1}


async def test_one_over_a_gauge(session, upstream) -> None:
    profile = written({"expert_balance_ratio": {"over": "acme_skew"}}, labels={"model": "name"})
    rig = await over_pages(session, upstream, profile, 'acme_skew{name="a"} 1.25\nacme_skew{name="b"} 0\n')
    assert rig.gauge(catalog.EXPERT_BALANCE) == {("a",): 0.8}
    assert rig.gauge(catalog.METRIC_MISSING) == {}


@pytest.mark.parametrize(
    ("version", "told"), [("3.2.1", {"version": "3.2.1"}), ("None", {}), ("x\\ny", {}), ("é" * 99, {})]
)
async def test_an_info_metric_tells_the_version(session, upstream, version: str, told: dict) -> None:
    profile = written({}, info={"version": {"sample": "acme_build_info", "label": "version"}})
    rig = await over_pages(session, upstream, profile, f'acme_build_info{{version="{version}"}} 1\n')
    assert rig.lifecycle.info == told


async def test_what_a_histogram_observed_above_a_bound_can_be_a_counter(session, upstream) -> None:
    rule = {"sample": "acme_seconds", "where": {"path": "/generate"}, "above": 1.0}

    def page(*cumulative: int) -> str:
        told = ["# TYPE acme_seconds histogram"]
        for path, more in (("/generate", 0), ("/tokenize", 50)):
            bounds = zip(("0.5", "1.0", "2.0", "+Inf"), cumulative, strict=True)
            told += [f'acme_seconds_bucket{{path="{path}",le="{le}"}} {n + more}' for le, n in bounds]
            told += [f'acme_seconds_{what}{{path="{path}"}} {cumulative[-1] + more}' for what in ("sum", "count")]
        return "\n".join(told) + "\n"

    pages = page(1, 2, 3, 4), page(3, 5, 7, 9), page(3, 5, 7, 9)
    rig = await over_pages(session, upstream, written({"long_answers_total": rule}), *pages)
    assert rig.store.counters[catalog.LONG_ANSWERS] == {("",): 2.0}
    assert catalog.LATENCY not in rig.store.histograms


def ended(**reasons: int) -> str:
    lines = (f'acme_finished_total{{why="{why}"}} {n}\n' for why, n in reasons.items())
    return "# TYPE acme_finished_total counter\n" + "".join(lines)


async def test_a_request_that_ended_in_an_unknown_way_neither_failed_nor_was_answered(
    session, upstream, caplog
) -> None:
    rules = [
        {"sample": "acme_finished_total", "where": {"why": "stop"}, "labels": {"outcome": "ok"}},
        {"sample": "acme_finished_total", "where": {"why": "lost"}, "labels": {"outcome": "error"}},
    ]
    profile = written({"requests_total": rules}, reasons={"acme_finished_total": {"why": "stop|lost|moved"}})
    pages = [ended(stop=n, lost=n, moved=n, content_filter=n) for n in (5, 6, 9)]
    rig = await over_pages(session, upstream, profile, *pages)
    assert rig.store.counters[catalog.REQUESTS] == {("", "ok"): 4.0, ("", "error"): 4.0}
    assert rig.store.counters[catalog.SERIES_DROPPED] == {("stopline_requests_total",): 4.0}
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "requests ended in an unknown way and count as none: metric=acme_finished_total why='content_filter'"
    ]


async def test_the_share_of_communication_is_that_of_one_source(session, upstream) -> None:
    metrics = {"step_seconds_total": {"sample": "acme_step_seconds", "labels": {"phase": "decode"}}}
    rig = await over_pages(session, upstream, written(metrics), "acme_step_seconds 0\n", "acme_step_seconds 30\n")
    rig.store.count(catalog.COMMUNICATION, ("", "all_reduce"), 0.1, origin="log")
    rig.store.count(catalog.STEP_SECONDS, ("", "decode"), 0.5, origin="log")
    assert rig.store.counters[catalog.COMMUNICATION] == {}
    assert rig.store.counters[catalog.STEP_SECONDS] == {("", "decode"): 30.0}

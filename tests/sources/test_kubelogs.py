"""A container's log from an API server that streams in chunks, breaks where it likes, and restarts the container."""

import asyncio
import ssl
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from exporter import catalog
from exporter.config import Config, GpuConfig, LogConfig
from exporter.sidecar import Sidecar
from exporter.sources import kubelogs
from exporter.sources.kubelogs import Api, KubeLog
from exporter.strictyaml import ConfigError

START = datetime(2026, 11, 30, 10, tzinfo=UTC)
LOG = "/api/v1/namespaces/ml/pods/engine-0/log"


def stamp(nanoseconds: int) -> bytes:
    """As a kubelet writes it."""
    when = START + timedelta(seconds=nanoseconds // 10**9)
    return f"{when:%Y-%m-%dT%H:%M:%S}.{nanoseconds % 10**9:09d}Z".encode()


@dataclass
class Container:
    """One life of the container: its lines by their time in ns since START, and whether it is over."""

    lines: list[tuple[int, bytes]] = field(default_factory=list)
    over: bool = False
    open_line: bytes = b""  # with its time, and no newline yet


class Cluster:
    """The API's log endpoint. *cuts* say after how many bytes a stream breaks, and whether by a proper end."""

    def __init__(self, *lives: Container, cuts: list[tuple[int, bool]] | None = None) -> None:
        self.lives = list(lives)
        self.cuts = list(cuts or [])
        self.token = "first"
        self.refusals: list[int] = []
        self.requests: list[dict[str, str]] = []
        self.grown = asyncio.Event()
        self.closed = False

    def close(self) -> None:
        """Let go of who still follows."""
        self.closed = True
        self.grow()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get(LOG, self._log)
        return app

    def write(self, *lines: tuple[int, bytes]) -> None:
        self.lives[-1].lines += lines
        self.grow()

    def grow(self) -> None:
        self.grown.set()
        self.grown = asyncio.Event()

    async def _log(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(dict(request.query))
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"message": "Unauthorized"}, status=401)
        if self.refusals:
            return web.json_response({"message": "for the test"}, status=self.refusals.pop(0))
        if request.query.get("previous"):
            if len(self.lives) < 2:
                text = 'previous terminated container "server" in pod "engine-0" not found'
                return web.json_response({"message": text}, status=400)
            life = self.lives[-2]
        else:
            life = self.lives[-1]
        since = int((datetime.fromisoformat(request.query.get("sinceTime", "1970-01-01T00:00:00Z")) - START)
                    / timedelta(seconds=1)) * 10**9  # fmt: skip
        response = web.StreamResponse(headers={"Content-Type": "text/plain"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        cut, proper = self.cuts.pop(0) if self.cuts else (None, True)
        sent, at = 0, 0
        while True:
            grown = self.grown
            new, at = life.lines[at:], len(life.lines)
            data = b"".join(stamp(t) + b" " + line + b"\n" for t, line in new if t >= since) + life.open_line
            if cut is not None and sent + len(data) >= cut:
                await response.write(data[: cut - sent] or b"") if cut > sent else None
                if not proper or request.query.get("previous"):  # that one is sent whole, unless the connection is lost
                    request.transport.abort()
                return response
            if data:
                await response.write(data)
            sent += len(data)
            if self.closed or life.over or life is not self.lives[-1] or not request.query.get("follow"):
                return response
            await grown.wait()


async def no_pause(_: float) -> None:
    await asyncio.sleep(0.001)


class Follower:
    """A KubeLog and what it gave."""

    def __init__(self, url: str, tmp_path: Path, **options) -> None:
        self.account = tmp_path
        (tmp_path / "token").write_text("first\n")
        api = Api(url.rstrip("/"), "ml", "engine-0", "server", tmp_path)
        options = {"directory": None, "from_start": True, "pause": no_pause} | options
        self.log = KubeLog(api, clock=lambda: 0.0, wall=lambda: START.timestamp() + 100, **options)
        self.live: list[bytes] = []
        self.history: list[bytes] = []

    def poll(self) -> None:
        for chunk in self.log.poll():
            (self.history if chunk.history else self.live).extend(chunk.data.removesuffix(b"\n").split(b"\n"))

    async def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                self.poll()
                await asyncio.sleep(0.002)
        await asyncio.sleep(0.01)
        self.poll()


@pytest.fixture
async def follow(tmp_path: Path):
    """Start a server for a cluster and a follower of it; both are ended."""
    begun: list[tuple[Cluster, TestServer, Follower]] = []

    async def start(cluster: Cluster, **options) -> Follower:
        server = TestServer(cluster.app())
        await server.start_server()
        follower = Follower(str(server.make_url("/")), tmp_path, **options)
        begun.append((cluster, server, follower))
        return follower

    yield start
    for cluster, server, follower in begun:
        await ended(follower)
        cluster.close()
        await server.close()


async def ended(follower: Follower) -> None:
    follower.log.close()
    if follower.log._task is not None:
        await asyncio.wait([follower.log._task])


lives = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=12).map(lambda b: b.replace(b"\n", b""))), max_size=12),
    min_size=1,
    max_size=2,
)
cuts = st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=8)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lives=lives, cuts=cuts, step=st.sampled_from([1, 400_000_000, 1_700_000_000]), before=st.integers(0, 12))
def test_wherever_the_stream_breaks_each_line_comes_once(
    lives: list, cuts: list, step: int, before: int, tmp_path: Path
) -> None:
    """Times repeat; *before* lines are there when following begins; the container is started again in between."""

    async def run() -> None:
        time, written = 0, []
        pending: list[list[tuple[int, bytes]]] = []
        for life in lives:
            pending.append([])
            for gap, text in life:
                time += gap * step
                pending[-1].append((time, b"%d:" % len(written) + text))
                written.append(pending[-1][-1][1])
            time += step
        cluster = Cluster(Container(), cuts=cuts)
        cluster.write(*pending[0][:before])
        async with TestServer(cluster.app()) as server:
            follower = Follower(str(server.make_url("/")), tmp_path)
            try:
                await follower.until(lambda: follower.log._begun)
                cluster.write(*pending[0][before:])
                for life in pending[1:]:
                    cluster.lives[-1].over = True
                    cluster.lives.append(Container())
                    cluster.grow()
                    cluster.write(*life)
                with suppress(TimeoutError):
                    await follower.until(lambda: len(follower.live) >= len(written), 5)
            finally:
                await ended(follower)
                cluster.close()
        assert follower.live == written

    asyncio.run(run())


async def test_a_line_that_stops_growing_is_given_and_what_still_comes_of_it_is_not(follow, monkeypatch) -> None:
    monkeypatch.setattr(kubelogs, "FLUSH_SECONDS", 0.05)
    cluster = Cluster(Container([(1, b"one")], open_line=stamp(2) + b" Killed"))
    follower = await follow(cluster)
    await follower.until(lambda: len(follower.live) == 2)
    assert follower.live == [b"one", b"Killed"]
    cluster.lives[0].open_line, cluster.cuts = b"", [(0, False)]
    cluster.write((2, b"Killed at last"), (3, b"three"))
    await follower.until(lambda: b"three" in follower.live)
    assert [line for line in follower.live if line.startswith(b"Killed")] == [b"Killed"]


async def test_what_was_there_before_is_history_and_what_comes_counts(follow) -> None:
    now = 100 * 10**9
    cluster = Cluster(Container([(1, b"tensor_parallel_size: 4")]))
    follower = await follow(cluster, from_start=False)
    await follower.until(lambda: bool(follower.history))
    cluster.write((now + 1, b"new"))
    await follower.until(lambda: bool(follower.live))
    assert (follower.history, follower.live) == ([b"tensor_parallel_size: 4"], [b"new"])
    assert (follower.log.stats.lines, follower.log.stats.bytes) == (1, 4)


async def test_a_restarted_sidecar_counts_what_was_written_meanwhile_once(follow, tmp_path: Path) -> None:
    cluster = Cluster(Container([(5, b"a"), (7, b"b"), (7, b"c")]))
    first = await follow(cluster, directory=tmp_path, from_start=True)
    await first.until(lambda: len(first.live) == 3)
    await ended(first)
    cluster.write((7, b"d"), (9, b"e"))
    cluster.lives.append(Container([(11, b"f")]))
    cluster.grow()
    second = await follow(cluster, directory=tmp_path, from_start=False)
    await second.until(lambda: len(second.live) == 3)
    assert second.live == [b"d", b"e", b"f"]  # the rest of the life before, and the new one


async def test_in_the_same_life_the_facts_are_read_again_and_not_counted_again(follow, tmp_path: Path) -> None:
    cluster = Cluster(Container([(5, b"a"), (7, b"b"), (7, b"c")]))
    first = await follow(cluster, directory=tmp_path, from_start=True)
    await first.until(lambda: len(first.live) == 3)
    await ended(first)
    cluster.write((7, b"d"), (9, b"e"))
    second = await follow(cluster, directory=tmp_path, from_start=False)
    await second.until(lambda: len(second.live) == 2)
    assert (second.history, second.live) == ([b"a", b"b", b"c"], [b"d", b"e"])


async def test_a_renewed_token_is_used_from_the_next_request_on(follow, tmp_path: Path) -> None:
    cluster = Cluster(Container([(1, b"one")]), cuts=[(1000, True)])
    follower = await follow(cluster)
    await follower.until(lambda: len(follower.live) == 1)
    cluster.token = "second"
    cluster.cuts = []
    cluster.write(*((n, b"x" * 50) for n in range(2, 40)))  # beyond the cut
    await follower.until(lambda: follower.log.stats.reason == "permission")
    (tmp_path / "token").write_text("second\n")
    await follower.until(lambda: follower.log.stats.readable and len(follower.live) == 39)


@pytest.mark.parametrize(
    ("status", "reason"),
    [(400, "missing"), (404, "missing"), (403, "permission"), (410, "io_error"), (500, "io_error"), (503, "io_error")],
)
async def test_a_refusal_has_a_reason_and_is_waited_out(follow, status: int, reason: str, caplog) -> None:
    cluster = Cluster(Container([(1, b"one")]))
    cluster.refusals = [status] * 400
    follower = await follow(cluster)
    follower.log.stats.reason = "other"
    await follower.until(lambda: follower.log.stats.reason == reason)
    assert not follower.log.stats.readable
    cluster.refusals = []
    await follower.until(lambda: follower.live == [b"one"])
    assert follower.log.stats.readable


async def test_what_the_api_says_itself_is_no_line_of_the_container(follow) -> None:
    cluster = Cluster(Container([(1, b"one")], open_line=b"failed to watch file: no such file\n"))
    follower = await follow(cluster)
    await follower.until(lambda: bool(follower.live))
    assert follower.live == [b"one"]


async def test_a_burst_waits_in_the_server_and_not_here(follow) -> None:
    cluster = Cluster(Container([(n, b"x" * 1000) for n in range(20_000)]))
    follower = await follow(cluster)
    follower.poll()
    await asyncio.sleep(0.5)
    assert follower.log._waiting_bytes < 2 << 20
    await follower.until(lambda: len(follower.live) == 20_000, 30)


async def test_the_clusters_authority_is_trusted_and_no_other(tmp_path: Path) -> None:
    """Over real TLS, by the address of the API server, as in a pod."""
    for name in ("ca", "other"):
        subject = ("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1")
        files = ("-keyout", str(tmp_path / f"{name}.key"), "-out", str(tmp_path / f"{name}.pem"))
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")
        subprocess.run(["openssl", "req", "-x509", *key, *subject, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.pem", tmp_path / "ca.key")
    cluster = Cluster(Container([(1, b"one")]))
    server = TestServer(cluster.app(), scheme="https")
    await server.start_server(ssl=context)
    follower = Follower(str(server.make_url("/")), tmp_path)
    (tmp_path / "ca.crt").write_bytes((tmp_path / "other.pem").read_bytes())
    await follower.until(lambda: follower.log.stats.reason == "io_error")
    assert not follower.live
    (tmp_path / "ca.crt").write_bytes((tmp_path / "ca.pem").read_bytes())
    await follower.until(lambda: follower.live == [b"one"])
    await ended(follower)
    cluster.close()
    await server.close()


def test_what_kubernetes_tells_a_container_is_enough(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("ml\n")
    told = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443", "HOSTNAME": "engine-0"}
    assert Api.of_this_pod("", told, tmp_path) == Api("https://[fd00::1]:443", "ml", "engine-0", "", tmp_path)
    told |= {"POD_NAME": "other", "POD_NAMESPACE": "prod"}
    assert Api.of_this_pod("server", told, tmp_path).pod == "other"


def test_outside_of_a_pod_it_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"log.paths: kube://server: works in a pod only"):
        Api.of_this_pod("server", {}, tmp_path)
    with pytest.raises(ConfigError, match="no namespace"):
        Api.of_this_pod("", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)


async def test_a_sidecar_reads_its_log_there(monkeypatch, tmp_path: Path) -> None:
    """From the setting to the counter, by a name of the source that people can read."""
    cluster = Cluster(Container())
    (tmp_path / "token").write_text("first")
    async with TestServer(cluster.app()) as server:
        monkeypatch.setattr(
            Api,
            "of_this_pod",
            lambda container, _: Api(str(server.make_url("")).rstrip("/"), "ml", "engine-0", container, tmp_path),
        )
        sidecar = Sidecar(Config(log=LogConfig(paths=("kube://server",)), gpus=GpuConfig(devices="none")))
        source = sidecar.build(None)["kube://server"]  # type: ignore[arg-type]
        await source.once()
        now = int((datetime.now(UTC) - START) / timedelta(seconds=1)) * 10**9
        cluster.write((now + 10**10, b"2026-11-30 10:00:00 ERROR CUDA error: an illegal memory access was encountered"))
        async with asyncio.timeout(10):
            while not sidecar.store.counters[catalog.LOG_LINES].get(("kube://server",)):
                await source.once()
                await asyncio.sleep(0.01)
        assert sidecar.store.readings["kube://server"].ok
        assert cluster.requests[0] == {"timestamps": "true", "follow": "true", "container": "server"}
        source.close()
        cluster.close()
        await asyncio.sleep(0.01)


class Odd(Cluster):
    """Answers each request for the log with *body* and *status*, or with the *lines*."""

    body, status, lines = b"", 503, b""

    async def _log(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("previous"):
            return web.json_response({"message": "no"}, status=400)
        if self.lines:
            return web.Response(body=self.lines)
        return web.Response(body=self.body, status=self.status, content_type="application/json")


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]",
        b'"x"',
        b"12",
        b"null",
        b'{"message":{"a":1}}',
        b"<html>",
        b"\xff",
        b'{"message":"a\\nb"}',
        b"[" * 4096,
    ],
)
async def test_a_refusal_that_says_nothing_ends_nothing(follow, body: bytes, caplog) -> None:
    cluster = Odd(Container())
    cluster.body = body
    follower = await follow(cluster)
    await follower.until(lambda: follower.log.stats.reason == "io_error", 3)
    assert "\nb" not in caplog.text
    follower.poll()


@pytest.mark.parametrize(
    "stamp",
    [b"2026-13-30T10:00:00Z", b"2026-11-30T10:00:60Z", b"0000-01-01T00:00:00Z", b"2026-11-30T10:00:00+99:99"],
)
async def test_a_time_that_cannot_be_ends_nothing(follow, stamp: bytes, tmp_path: Path) -> None:
    cluster = Odd(Container())
    cluster.lines = stamp + b" one\n2026-11-30T10:00:01Z two\n"
    follower = await follow(cluster, directory=tmp_path)
    await follower.until(lambda: b"two" in follower.live, 3)
    follower.log.close()


@pytest.mark.parametrize("token", [b"\xff\xfe", b"a\nb", b"a\r\nX: y", b"", b"\x00", "é".encode()])
async def test_a_token_that_is_none_is_waited_for(follow, token: bytes, tmp_path: Path) -> None:
    follower = await follow(Cluster(Container([(1, b"one")])))
    (tmp_path / "token").write_bytes(token)
    await follower.until(lambda: follower.log.stats.reason in ("permission", "io_error"), 3)
    (tmp_path / "token").write_text("first")
    await follower.until(lambda: follower.live == [b"one"], 5)


@pytest.mark.parametrize(
    "text", ['{"time": -99999999999999999999, "given": 1}', '{"time": 9223372036854775807}', "[]", '{"time": 1e400}']
)
async def test_a_checkpoint_that_cannot_be_is_none(follow, tmp_path: Path, text: str) -> None:
    (tmp_path / "kube-server.json").write_text(text)
    cluster = Cluster(Container([(1, b"one")]))
    follower = await follow(cluster, directory=tmp_path, from_start=False)
    await follower.until(lambda: b"one" in follower.live + follower.history, 3)

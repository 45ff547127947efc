"""TLS and passwords: the file of exporter-toolkit, real handshakes with curl, and Debian's Prometheus behind both."""

import asyncio
import base64
import shutil
import subprocess
import time
from pathlib import Path

import bcrypt
import pytest
from aiohttp import web
from realengine import free_port
from test_prometheus import eventually, query

from exporter import webfile
from exporter.config import Config, GpuConfig, WebConfig
from exporter.sidecar import Sidecar
from exporter.strictyaml import ConfigError

HASH = "$2b$04$zO.1U7Jh59qJmxAq5gE4Oe6sWi216T45w60rtwQh00N7P.fk01H/W"  # of secret
OTHER = bcrypt.hashpw(b"other", bcrypt.gensalt(4)).decode()


def openssl(*arguments: str | Path, **options) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, **options)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, two certificates of the server (one of which has expired), and one of a client."""
    root = tmp_path_factory.mktemp("pki")
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
            "-subj", "/CN=authority", "-keyout", root / "ca.key", "-out", root / "ca.pem")  # fmt: skip
    names = root / "names"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for name, dates in (("one", ["-days", "2"]), ("two", ["-days", "2"]), ("client", ["-days", "2"]), ("old", [])):
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
                "-keyout", root / f"{name}.key", "-out", root / f"{name}.csr")  # fmt: skip
        openssl("x509", "-req", "-in", root / f"{name}.csr", "-CA", root / "ca.pem", "-CAkey", root / "ca.key",
                "-CAcreateserial", "-extfile", names, *(dates or ["-days", "-1"]), "-out", root / f"{name}.pem")  # fmt: skip
    return root


def written(directory: Path, text: str) -> Path:
    path = directory / "web.yml"
    path.write_text(text)
    return path


def tls(pki: Path, name: str = "one", **more: str) -> str:
    keys = {"cert_file": pki / f"{name}.pem", "key_file": pki / f"{name}.key", **more}
    return "tls_server_config:\n" + "".join(f"  {key}: {value}\n" for key, value in keys.items())


def users(**given: str) -> str:
    return "basic_auth_users:\n" + "".join(f"  {name}: {hashed}\n" for name, hashed in given.items())


class Running:
    """A sidecar that serves, and curl to ask it."""

    def __init__(self, sidecar: Sidecar, pki: Path) -> None:
        self.sidecar, self.pki = sidecar, pki

    async def curl(self, *options: str | Path, path: str = "/metrics", scheme: str = "https") -> tuple[int, str]:
        """curl's exit status, and what it printed: the HTTP status first."""
        url = f"{scheme}://127.0.0.1:{self.sidecar.address[1]}{path}"
        process = await asyncio.create_subprocess_exec(
            "curl", "-sS", "-m", "10", "-i", "--cacert", self.pki / "ca.pem", *options, url,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        out, _ = await process.communicate()
        return process.returncode, out.decode()

    async def status(self, *options: str | Path, **more: str) -> int:
        """The HTTP status; 0 if there was no answer."""
        code, out = await self.curl(*options, **more)
        return 0 if code else int(out.split()[1])

    def ok(self) -> float:
        from exporter import catalog

        return self.sidecar.store.fixed[catalog.RELOAD_OK][()]


@pytest.fixture
async def serve(pki: Path):
    """Start a sidecar behind a file; stopped at the end."""
    running: list[tuple[asyncio.Event, asyncio.Task]] = []

    async def start(path: Path) -> Running:
        web = WebConfig(listen_address="127.0.0.1:0", config_file=path)
        sidecar, stop = Sidecar(Config(gpus=GpuConfig(devices="none"), web=web)), asyncio.Event()
        running.append((stop, asyncio.create_task(sidecar.run(stop))))
        while sidecar.address is None:
            await asyncio.sleep(0.01)
        return Running(sidecar, pki)

    yield start
    for stop, task in running:
        stop.set()
        await task


async def test_tls_is_spoken_and_nothing_else(serve, pki: Path, tmp_path: Path) -> None:
    running = await serve(written(tmp_path, tls(pki)))
    assert await running.status() == 200
    assert await running.status(scheme="http") == 0
    assert await running.status("--tls-max", "1.1") == 0


async def test_a_certificate_that_expired_is_refused_by_who_asks(serve, pki: Path, tmp_path: Path) -> None:
    running = await serve(written(tmp_path, tls(pki, "old")))
    code, out = await running.curl()
    assert (code, "expired" in out) == (60, True)
    assert await running.status("-k") == 200


async def test_the_password_is_wanted_for_all_but_health(serve, pki: Path, tmp_path: Path) -> None:
    running = await serve(written(tmp_path, tls(pki) + users(alice=HASH)))
    assert await running.status() == 401
    assert "basic realm" in (await running.curl())[1].lower()
    assert await running.status("-u", "alice:wrong") == 401
    assert await running.status("-u", "bob:secret") == 401
    assert await running.status("-u", f"alice:{'x' * 100}") == 401
    assert await running.status("-H", "Authorization: Basic !") == 401
    assert await running.status("-H", "Authorization: Bearer secret") == 401
    assert await running.status("-u", "alice:secret") == 200
    assert await running.status("-u", "alice:secret", path="/") == 200
    assert await running.status(path="/") == 401
    assert await running.status(path="/nowhere") == 401
    assert [await running.status(path=path) for path in ("/-/healthy", "/-/ready")] == [200, 200]


async def test_a_password_that_was_right_is_not_computed_again(tmp_path: Path) -> None:
    slow = bcrypt.hashpw(b"secret", bcrypt.gensalt(11)).decode()
    guard = webfile.Guard(webfile.load(written(tmp_path, users(alice=slow))))
    header = "Basic YWxpY2U6c2VjcmV0"
    began = time.perf_counter()
    assert await guard._may(header)
    first = time.perf_counter() - began
    assert all([await guard._may(header) for _ in range(20)])
    assert time.perf_counter() - began < 2 * first
    guard.protection = webfile.load(written(tmp_path, users(alice=OTHER)))
    assert not await guard._may(header)


async def test_who_guesses_many_at_once_is_refused_and_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    guard = webfile.Guard(webfile.load(written(tmp_path, users(alice=HASH))))
    wrong, right = (f"Basic {base64.b64encode(text).decode()}" for text in (b"alice:guess", b"alice:secret"))
    asked = [guard._may(wrong, "10.0.0.66") for _ in range(50)]
    *guesses, mine = await asyncio.gather(*asked, guard._may(right, "10.0.0.1"), return_exceptions=True)
    assert mine is True
    assert guesses[:4] == [False] * 4
    assert {type(outcome) for outcome in guesses[4:]} == {web.HTTPTooManyRequests}
    assert await guard._may(right, "10.0.0.66")
    assert not guard._guesses


async def test_a_client_needs_a_certificate_where_one_is_required(serve, pki: Path, tmp_path: Path) -> None:
    more = {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": str(pki / "ca.pem")}
    running = await serve(written(tmp_path, tls(pki, **more)))
    assert await running.status() == 0
    assert await running.status("--cert", pki / "client.pem", "--key", pki / "client.key") == 200


async def test_headers_are_on_every_answer(serve, tmp_path: Path) -> None:
    text = "http_server_config:\n  http2: false\n  headers: {X-Frame-Options: deny}\n"
    running = await serve(written(tmp_path, text + users(alice=HASH)))
    for path in ("/metrics", "/-/healthy"):
        assert "x-frame-options: deny" in (await running.curl(path=path, scheme="http"))[1].lower()


async def test_a_change_holds_from_the_next_connection_on_and_the_port_stays_open(
    serve, pki: Path, tmp_path: Path
) -> None:
    running = await serve(written(tmp_path, tls(pki, "one") + users(alice=HASH)))
    statuses: list[int] = []

    done = asyncio.Event()

    async def ask() -> None:
        while not done.is_set():
            statuses.append(await running.status(path="/-/healthy"))

    asking = asyncio.create_task(ask())
    for name, hashed, password in (("two", OTHER, "other"), ("one", HASH, "secret"), ("two", OTHER, "other")):
        written(tmp_path, tls(pki, name) + users(alice=hashed))
        await running.sidecar.reload_protection()
        code, out = await running.curl("-v", "-u", f"alice:{password}")
        assert code == 0
        assert f"CN={name}" in out.replace("CN = ", "CN=")
        assert running.ok() == 1
    done.set()
    await asking
    assert set(statuses) == {200}


async def test_a_file_with_an_error_changes_nothing_and_says_so(serve, pki: Path, tmp_path: Path, caplog) -> None:
    running = await serve(written(tmp_path, tls(pki) + users(alice=HASH)))
    written(tmp_path, tls(pki, key_file=str(pki / "two.key")))
    await running.sidecar.reload_protection()
    assert running.ok() == 0
    assert "do not belong together" in caplog.text
    assert await running.status("-u", "alice:secret") == 200
    running.sidecar.reload()  # that the settings are sound does not hide it
    assert running.ok() == 0
    written(tmp_path, tls(pki))
    await running.sidecar.reload_protection()
    assert (running.ok(), await running.status()) == (1, 200), caplog.text


async def test_a_changed_certificate_is_noticed_also_behind_the_links_of_a_secret(
    serve, pki: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("exporter.sidecar._RELOAD_SECONDS", 0.05)
    for version in ("one", "two"):
        (tmp_path / version).mkdir()
        shutil.copy(pki / f"{version}.pem", tmp_path / version / "tls.crt")
        shutil.copy(pki / f"{version}.key", tmp_path / version / "tls.key")
        written(tmp_path / version, "tls_server_config: {cert_file: tls.crt, key_file: tls.key}\n")
    (tmp_path / "..data").symlink_to("one")
    for name in ("tls.crt", "tls.key", "web.yml"):
        (tmp_path / name).symlink_to(f"..data/{name}")
    running = await serve(tmp_path / "web.yml")
    (tmp_path / "..new").symlink_to("two")
    (tmp_path / "..new").replace(tmp_path / "..data")
    async with asyncio.timeout(10):
        while "CN=two" not in (await running.curl("-v"))[1].replace("CN = ", "CN="):
            await asyncio.sleep(0.05)


async def test_prometheus_scrapes_it_with_tls_and_a_password(serve, pki: Path, tmp_path: Path) -> None:
    running = await serve(written(tmp_path, tls(pki) + users(prometheus=HASH)))
    binary = shutil.which("prometheus")
    assert binary, "prometheus is missing: apt-get install prometheus"
    job = f"""
  scheme: https
  tls_config: {{ca_file: {pki / "ca.pem"}}}
  static_configs: [{{targets: ['127.0.0.1:{running.sidecar.address[1]}']}}]
"""
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 300ms, scrape_timeout: 300ms}\nscrape_configs:\n"
        f"- job_name: right\n  basic_auth: {{username: prometheus, password: secret}}{job}"
        f"- job_name: wrong\n  basic_auth: {{username: prometheus, password: guess}}{job}"
    )
    port = free_port()
    process = subprocess.Popen(
        [
            binary,
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]
    )
    try:
        found = await eventually(lambda: len(query(port, "count_over_time(up[1m]) >= 3")) == 2 and query(port, "up"))
        assert {r["metric"]["job"]: r["value"][1] for r in found} == {"right": "1", "wrong": "0"}
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("basic_auth_user: {}", "1: basic_auth_user: unknown key (did you mean 'basic_auth_users'?)"),
        ("tls_server_config: {cert_file: a}", "1: tls_server_config.key_file: is required"),
        (
            "tls_server_config: {cert_file: a, key_file: b, min_version: TLS9}",
            "1: tls_server_config.min_version: expected one of TLS10, TLS11, TLS12, TLS13, got 'TLS9'",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, min_version: TLS13, max_version: TLS12}",
            "1: tls_server_config.min_version: is above max_version, TLS12",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAndVerifyClientCert}",
            "1: tls_server_config.client_auth_type: is RequireAndVerifyClientCert: give client_ca_file too",
        ),
        (
            "tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAnyClientCert}",
            "1: tls_server_config.client_auth_type: expected one of NoClientCert, VerifyClientCertIfGiven,",
        ),
        (
            "tls_server_config:\n  cert_file: a\n  key_file: b\n  cipher_suites: [TLS_RSA_WITH_RC4_128_SHA]",
            "4: tls_server_config.cipher_suites: has unknown or unsafe ones: TLS_RSA_WITH_RC4_128_SHA",
        ),
        (
            "basic_auth_users:\n  alice: my-password",
            "2: basic_auth_users.alice: not a bcrypt hash; make one with: htpasswd -nBC 10 alice",
        ),
        (
            f"basic_auth_users:\n  alice: {HASH.replace('$04$', '$31$')}",
            "2: basic_auth_users.alice: its cost is above 16, so each check takes long",
        ),
        (
            "http_server_config:\n  headers:\n    Server: x",
            "3: http_server_config.headers.Server: unknown header (known are: Content-Security-Policy,",
        ),
        ("tls_server_config: {cert_file: a, key_file: b}", " tls_server_config.cert_file: {dir}/a: No such file"),
    ],
)
def test_a_mistake_is_told_with_its_place(text: str, problem: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        webfile.load(path)
    (told,) = caught.value.problems
    assert told.startswith(f"{path}:{problem.format(dir=tmp_path)}")
    assert "my-password" not in told


def test_a_key_with_a_password_and_a_file_that_is_no_certificate_are_told(pki: Path, tmp_path: Path) -> None:
    openssl("pkey", "-in", pki / "one.key", "-aes256", "-passout", "pass:x", "-out", tmp_path / "locked.key")
    with pytest.raises(ConfigError, match="needs a password"):
        webfile.load(written(tmp_path, tls(pki, key_file=str(tmp_path / "locked.key"))))
    with pytest.raises(ConfigError, match="not PEM"):
        webfile.load(written(tmp_path, tls(pki, cert_file=str(pki / "names"))))
    more = {"client_auth_type": "VerifyClientCertIfGiven", "client_ca_file": str(pki / "names")}
    with pytest.raises(ConfigError, match=r"client_ca_file: .*/names: not PEM"):
        webfile.load(written(tmp_path, tls(pki, **more)))


def test_what_a_toolkit_file_may_say_is_taken(pki: Path, tmp_path: Path) -> None:
    more = {
        "client_auth_type": "VerifyClientCertIfGiven",
        "client_ca_file": str(pki / "ca.pem"),
        "min_version": "TLS13",
        "max_version": "TLS13",
        "cipher_suites": "[TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, TLS_AES_128_GCM_SHA256]",
        "prefer_server_cipher_suites": "true",
    }
    loaded = webfile.load(written(tmp_path, tls(pki, **more) + users(a=HASH)))
    assert loaded.tls is not None
    assert [c["name"] for c in loaded.tls.get_ciphers()][-1] == "ECDHE-ECDSA-AES128-GCM-SHA256"
    assert len(loaded.files) == 4

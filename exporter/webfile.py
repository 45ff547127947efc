"""Who may read our pages, and over what: --web.config.file, in the format of Prometheus' exporter-toolkit.

Format: https://prometheus.io/docs/prometheus/latest/configuration/https/.  Of its keys those that Python's TLS has no
counterpart for are unknown here, and refused like any unknown key: curve_preferences, client_allowed_sans, and the two
kinds of client_auth_type that take certificates without verifying them.
"""

import asyncio
import hashlib
import logging
import re
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from aiohttp import BasicAuth, web

from exporter import strictyaml
from exporter.strictyaml import ConfigError

log = logging.getLogger(__name__)

_HASH = re.compile(r"\$2[abxy]?\$(\d\d)\$[./A-Za-z0-9]{53}")
_MOST_COST = 16  # each step doubles the time of one check; this one takes some seconds
_REMEMBERED = 100
_GUESSES_AT_ONCE = 4
_OPEN = ("/-/healthy", "/-/ready")
_NOBODY = b"$2b$10$VuWAKnH6K62bT5GZO1vt5.sZD97sdINojoqtzHefAbLw0kZQa3O8O"
"""Compared with for an unknown user, so that it takes as long."""
_VERSIONS = {
    "TLS10": ssl.TLSVersion.TLSv1,
    "TLS11": ssl.TLSVersion.TLSv1_1,
    "TLS12": ssl.TLSVersion.TLSv1_2,
    "TLS13": ssl.TLSVersion.TLSv1_3,
}
_HEADERS = (
    "Content-Security-Policy",
    "Strict-Transport-Security",
    "X-Content-Type-Options",
    "X-Frame-Options",
    "X-XSS-Protection",
)
_SUITES = {  # Go's names, which the format has, and OpenSSL's; those of TLS 1.3 are always on, here as there
    f"TLS_{exchange}_WITH_{cipher}": f"{exchange.replace('_', '-')}-{short}"
    for exchange in ("ECDHE_ECDSA", "ECDHE_RSA")
    for cipher, short in (
        ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
        ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
        ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
        ("CHACHA20_POLY1305", "CHACHA20-POLY1305"),
    )
}
_ALWAYS_ON = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")

Version = Literal["TLS10", "TLS11", "TLS12", "TLS13"]


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """The certificate we show, and whether we want to see one."""

    cert_file: Path
    key_file: Path
    client_auth_type: Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"] = "NoClientCert"
    client_ca_file: Path | None = None
    min_version: Version = "TLS12"
    max_version: Version = "TLS13"
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True

    def __post_init__(self) -> None:
        wants = self.client_auth_type != "NoClientCert"
        if wants and self.client_ca_file is None:
            raise ValueError(f"client_auth_type is {self.client_auth_type}: give client_ca_file too")
        if not wants and self.client_ca_file is not None:
            raise ValueError("client_ca_file needs a client_auth_type, such as RequireAndVerifyClientCert")
        if self.min_version > self.max_version:
            raise ValueError(f"min_version is above max_version, {self.max_version}")
        if unknown := [suite for suite in self.cipher_suites if suite not in (*_SUITES, *_ALWAYS_ON)]:
            raise ValueError(f"cipher_suites has unknown or unsafe ones: {', '.join(unknown)}")


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """What every answer carries. http2 is read and means nothing: HTTP/1.1 is spoken."""

    http2: bool = True
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in self.headers.items():
            if name not in _HEADERS:
                raise ValueError(f"headers.{name}: unknown header (known are: {', '.join(_HEADERS)})")
            if not value.isprintable():
                raise ValueError(f"headers.{name}: must be one line of text")


@dataclass(frozen=True, slots=True)
class WebFile:
    """The whole file."""

    tls_server_config: TlsConfig | None = None
    http_server_config: HttpConfig = field(default_factory=HttpConfig)
    basic_auth_users: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for user, text in self.basic_auth_users.items():
            found = _HASH.fullmatch(text)
            if not user or ":" in user:
                raise ValueError("basic_auth_users has a user without a name or with a colon in it")
            if not found:  # what stands there may be the password itself: it is not repeated
                raise ValueError(f"basic_auth_users.{user}: not a bcrypt hash; make one with: htpasswd -nBC 10 {user}")
            if int(found[1]) > _MOST_COST:
                raise ValueError(f"basic_auth_users.{user}: its cost is above {_MOST_COST}, so each check takes long")


@dataclass(frozen=True)
class Protection:
    """A file that was read, with all it leads to. *files* are those whose change matters."""

    tls: ssl.SSLContext | None = None
    users: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


def load(path: Path | None) -> Protection:
    """What the file at *path* asks for; without one plain HTTP for everybody. Raises ConfigError."""
    if path is None:
        return Protection()
    read = strictyaml.load(path, WebFile)
    files = [path]
    tls = None
    if (config := read.tls_server_config) is not None:
        tls = _context(path, config)
        named = (config.cert_file, config.key_file, config.client_ca_file)
        files += [path.parent / file for file in named if file is not None]
    return Protection(tls, read.basic_auth_users, read.http_server_config.headers, tuple(files))


class Guard:
    """Lets in who may come in by the protection of the moment; a password that was right is known again."""

    def __init__(self, protection: Protection) -> None:
        self.protection = protection
        self._right: dict[bytes, None] = {}
        self._one_at_a_time = asyncio.Lock()
        self._guesses = Counter[str]()
        """Logins that are being looked at or wait for it, by address: who makes many leaves room for others."""

    def middleware(self) -> Callable[..., Awaitable[web.StreamResponse]]:
        @web.middleware
        async def guard(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            header, peer = request.headers.get("Authorization", ""), request.remote or ""
            if request.path in _OPEN or await self._may(header, peer):
                response = await handler(request)
            else:
                response = web.Response(
                    status=401, text="Unauthorized\n", headers={"WWW-Authenticate": 'Basic realm="stopline"'}
                )
            response.headers.update(self.protection.headers)
            return response

        return guard

    async def _may(self, header: str, peer: str = "") -> bool:
        """Whether *header*, of *peer*, names a user with the password. One check takes up to seconds, in a thread.

        Raises HTTPTooManyRequests for who asks for several at a time.
        """
        users = self.protection.users
        if not users:
            return True
        try:
            given = BasicAuth.decode(header, "utf-8")
        except ValueError:
            return False
        known = users.get(given.login)
        key = hashlib.sha256("\0".join((given.login, known or "", given.password)).encode()).digest()
        if key in self._right:
            return True
        if self._guesses[peer] >= _GUESSES_AT_ONCE:
            raise web.HTTPTooManyRequests(text="Too many logins at once.\n", headers={"Retry-After": "1"})
        self._guesses[peer] += 1
        try:
            async with self._one_at_a_time:  # whoever guesses gets no more than one core, and that in turn
                right = await asyncio.to_thread(_is, given.password, known.encode() if known else _NOBODY)
        finally:
            self._guesses[peer] -= 1
            if not self._guesses[peer]:
                del self._guesses[peer]
        if known is None or not right:
            return False
        self._right[key] = None
        while len(self._right) > _REMEMBERED:
            del self._right[next(iter(self._right))]
        return True


def _is(password: str, hashed: bytes) -> bool:
    import bcrypt  # which who asks for no password need not load

    try:
        return bcrypt.checkpw(password.encode(), hashed)
    except ValueError:  # longer than bcrypt reads
        return False


def _context(path: Path, config: TlsConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    where = f"{path}: tls_server_config"
    cert, key = path.parent / config.cert_file, path.parent / config.key_file
    for name, file in (("cert_file", cert), ("key_file", key)):
        try:
            file.read_bytes()
        except (OSError, ValueError) as error:  # a path may hold what no path can
            raise ConfigError([f"{where}.{name}: {file}: {getattr(error, 'strerror', error)}"]) from None
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except ssl.SSLError as error:
        reason = "the two do not belong together" if error.reason == "KEY_VALUES_MISMATCH" else "not PEM"
        raise ConfigError([f"{where}: cert_file {cert} and key_file {key}: {reason} ({error.reason})"]) from None
    except OSError as error:  # gone since it was read
        raise ConfigError([f"{where}: cert_file {cert} and key_file {key}: {error.strerror}"]) from None
    except ValueError:
        raise ConfigError([f"{where}.key_file: {key}: needs a password; decrypt it with openssl pkey"]) from None
    context.minimum_version = _VERSIONS[config.min_version]
    context.maximum_version = _VERSIONS[config.max_version]
    if suites := [_SUITES[suite] for suite in config.cipher_suites if suite in _SUITES]:
        context.set_ciphers(":".join(suites))
    if config.prefer_server_cipher_suites:
        context.options |= ssl.OP_CIPHER_SERVER_PREFERENCE
    if config.client_ca_file is not None:
        authority = path.parent / config.client_ca_file
        try:
            context.load_verify_locations(authority)
        except (OSError, ssl.SSLError) as error:
            what = "not PEM" if isinstance(error, ssl.SSLError) else error.strerror
            raise ConfigError([f"{where}.client_ca_file: {authority}: {what}"]) from None
        required = config.client_auth_type == "RequireAndVerifyClientCert"
        context.verify_mode = ssl.CERT_REQUIRED if required else ssl.CERT_OPTIONAL
    return context


def _no_password() -> str:
    raise ValueError

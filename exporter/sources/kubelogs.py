"""A container's log from the Kubernetes API: ``kube://``, or ``kube://NAME`` for one of several.

``GET pods/NAME/log?follow=true`` streams until the container ends, the log is rotated, or something on the way has had
enough; it cannot be taken up again where it broke.  So every line is asked for with its time, and after a break what
came since the second of the last one; of these the ones that were given are passed over: all before its time, and of
that very time as many as were given.  A line that was cut comes whole the second time.

A container that was started again has a log of its own, and the end of the one before is had with ``previous=true``.
That is asked for after the new stream has begun, and read before it: whatever is started again meanwhile, each line is
in one of the two.

Lost are: what more than one restart between two looks leaves behind, what the kubelet has rotated away meanwhile, and,
where the node's clock is set back and the stream then breaks, what was written until the old time was reached again.

Facts: k8s.io/api PodLogOptions (sinceTime reaches the kubelet in whole seconds), kubelet's log reader (a line's time is
that of its first part); a token is renewed in its file by the kubelet, so that is read at each request.
"""

import asyncio
import logging
import re
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import aiohttp
import msgspec

from exporter import remedies
from exporter.sources.chunks import CHUNK_BYTES, FLUSH_SECONDS, Chunk, Lines, Reason, TailStats, count
from exporter.strictyaml import ConfigError

log = logging.getLogger(__name__)

SCHEME = "kube://"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
IDLE_SECONDS = 300.0  # without a line: ask anew, for a connection may be dead without saying so
CONNECT_SECONDS = 10.0
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 10.0
SAVE_SECONDS = 1.0
_MOST_WAITING = 1 << 20  # bytes that came and were not polled yet; then the stream has to wait
_AHEAD_SECONDS = 300.0  # that the clock of a node may be
_NANO = 1_000_000_000
_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ?")


class _Broken(Exception):
    """The log cannot be read now."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class _Refused(_Broken):
    """The API answered, with something other than a log."""


class Place(msgspec.Struct, frozen=True):
    """The newest time of a line that was given, in ns since epoch, and how many of that time were."""

    time: int = 0
    given: int = 0

    def after(self, time: int) -> "Place":
        """The place behind a further line."""
        if time > self.time:
            return Place(time, 1)
        return Place(self.time, self.given + 1) if time == self.time else self


class _Sieve:
    """Passes over what a stream that begins before *place* repeats. A stream is in the order of writing."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._again = place.given
        self._passed = False

    def is_new(self, time: int) -> bool:
        if not self._passed and time < self._place.time:
            return False
        if not self._passed and time == self._place.time and self._again:
            self._again -= 1
            return False
        self._passed = True
        return True


@dataclass(frozen=True, slots=True)
class Api:
    """Where and as whom one container's log is asked for; *container* empty for the only one of the pod."""

    url: str
    namespace: str
    pod: str
    container: str
    account: Path = ACCOUNT

    @classmethod
    def of_this_pod(cls, container: str, environment: Mapping[str, str], account: Path = ACCOUNT) -> "Api":
        """By what Kubernetes tells every container. Raises ConfigError."""
        host, port = (environment.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
        if not host:
            raise ConfigError([f"log.paths: {SCHEME}{container}: works in a pod only"])
        namespace = environment.get("POD_NAMESPACE", "")
        if not namespace:
            with suppress(OSError):
                namespace = (account / "namespace").read_text().strip()
        if not namespace:
            problem = (
                f"log.paths: {SCHEME}{container}: no namespace: mount the service account's token or set POD_NAMESPACE"
            )
            raise ConfigError([problem])
        host = f"[{host}]" if ":" in host else host
        pod = environment.get("POD_NAME") or environment.get("HOSTNAME", "")
        return cls(f"https://{host}:{port or 443}", namespace, pod, container, account)

    @asynccontextmanager
    async def open(self, session: aiohttp.ClientSession, **options: str) -> AsyncIterator[aiohttp.StreamReader]:
        """The log as *options* want it, with times. Raises _Broken."""
        path = f"/api/v1/namespaces/{quote(self.namespace, safe='')}/pods/{quote(self.pod, safe='')}/log"
        query = {"timestamps": "true"} | ({"container": self.container} if self.container else {}) | options
        try:
            token = (self.account / "token").read_text().strip()
        except OSError as error:
            raise _Broken("permission", f"{error.filename}: {error.strerror}") from None
        except UnicodeDecodeError:
            token = ""
        if not (token and token.isascii() and token.isprintable()):
            raise _Broken("permission", f"{self.account / 'token'}: holds no token")
        try:
            async with session.get(
                self.url + path, params=query, headers={"Authorization": f"Bearer {token}"}, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise _Refused(_reason(response.status), await _message(response))
                yield response.content
        except TimeoutError:
            raise _Broken("io_error", "no answer") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Broken("io_error", str(error) or type(error).__name__) from None

    def session(self) -> aiohttp.ClientSession:
        """A client that trusts the cluster's authority and nobody else. Raises _Broken."""
        trust: ssl.SSLContext | bool = True
        if self.url.startswith("https:"):
            try:
                trust = ssl.create_default_context(cafile=self.account / "ca.crt")
            except (OSError, ssl.SSLError) as error:
                raise _Broken("permission", f"{self.account / 'ca.crt'}: {error}") from None
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=4, ssl=trust),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=IDLE_SECONDS),
            trust_env=False,
        )


class KubeLog:
    """One container's log as a source of lines; its task begins with the first poll and ends with close().

    *directory* keeps the place over restarts. What is older than the start is history, unless *from_start*.
    """

    def __init__(
        self,
        api: Api,
        *,
        directory: Path | None,
        clock: Callable[[], float],
        wall: Callable[[], float],
        from_start: bool = False,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.stats = TailStats()
        self.paths: list[Path] = []
        self._api = api
        self._file = directory / f"kube-{api.container or 'only'}.json" if directory else None
        self._clock = clock
        self._wall = wall
        self._pause = pause
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[tuple[Chunk, Place]] = deque()
        self._waiting_bytes = 0
        self._room = asyncio.Event()
        self._saved_at = 0.0
        self._place = Place() if from_start else self._load() or Place(int(wall() * _NANO))
        self._polled = self._place
        self._saved: Place | None = None
        self._begun = False  # the first stream: what exists was seen
        self.stats.readable, self.stats.reason = False, "missing"

    def poll(self) -> Iterator[Chunk]:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._follow(), name=f"{SCHEME}{self._api.container}")
        if self._task.done():
            self._task.result()  # a bug ends the process, as in any source
        while self._waiting:
            chunk, self._polled = self._waiting.popleft()
            self._waiting_bytes -= len(chunk.data)
            if not chunk.history:
                count(self.stats, chunk.data, self._wall())
            yield chunk
        self._room.set()
        if self._clock() - self._saved_at >= SAVE_SECONDS:
            self._save()

    def close(self) -> None:
        """Remember how far it was read. What came and was not polled comes again after a restart."""
        self._save()
        if self._task is not None:
            self._task.cancel()

    # the task

    async def _follow(self) -> None:
        """Read one stream after the other, for ever; pause longer each time that one cannot be had."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            before = self._place
            try:
                async with self._api.session() as session:
                    await self._stream(session)
            except _Broken as error:
                self._report(error.reason, str(error))
            pause = FIRST_PAUSE_SECONDS if self._place != before else min(2 * pause, LONGEST_PAUSE_SECONDS)
            await self._pause(pause)

    async def _stream(self, session: aiohttp.ClientSession) -> None:
        """One stream, from where the last one ended to its end; at first all, for the facts in it.

        Raises _Broken if it cannot be had. That it breaks is nothing: every stream does.
        """
        since = {"sinceTime": _second(self._place)} if self._begun else {}
        async with self._api.open(session, follow="true", **since) as stream:
            if self._begun or self._place.time:
                await self._read_previous(session)
            self._report("", "")
            history, self._begun = not self._begun, True
            with suppress(aiohttp.ClientError, OSError):
                await self._read(stream, history=history)

    async def _read_previous(self, session: aiohttp.ClientSession) -> None:
        """What the container said before it was started again, if it was. Raises _Broken if that breaks."""
        with suppress(_Refused):
            async with self._api.open(session, previous="true", sinceTime=_second(self._place)) as stream:
                await self._read(stream)

    async def _read(self, stream: aiohttp.StreamReader, *, history: bool = False) -> None:
        """Give the new lines of *stream* until it ends, and with *history* the others as such.

        A line that has begun and does not go on is given, too.
        """
        sieve, lines, data, ended = _Sieve(self._place), Lines(), b"", False
        while not ended:
            try:
                async with asyncio.timeout(FLUSH_SECONDS if lines.held else None):
                    data = await stream.read(CHUNK_BYTES)
            except TimeoutError:
                if not lines.held:
                    return
                whole = lines.flush() if _STAMP.match(lines.held) else b""
            else:
                ended = not data
                whole = lines.feed(data) if data else b""
            self.stats.dropped_bytes += lines.dropped
            lines.dropped = 0
            self._give(whole, sieve, history)
            while self._waiting_bytes > _MOST_WAITING:
                self._room.clear()
                await self._room.wait()

    def _give(self, whole: bytes, sieve: _Sieve, history: bool) -> None:
        """Queue what is new of *whole* lines, without their times; with *history* the others too, apart.

        A line without a time is not the container's: the API says so that it cannot read further.
        """
        kept: dict[bool, list[bytes]] = {False: [], True: []}  # what is new comes behind what is not
        for line in whole.split(b"\n"):
            if (stamp := _STAMP.match(line)) and (time := _nanoseconds(stamp)) is not None:
                new = sieve.is_new(time)
                kept[new].append(line[stamp.end() :])
                if new:
                    self._place = self._place.after(time)
        if kept[False] and history:
            self._queue(kept[False], history=True)
        if kept[True]:
            self._queue(kept[True], history=False)

    def _queue(self, lines: list[bytes], *, history: bool) -> None:
        data = b"\n".join((*lines, b""))
        self._waiting.append((Chunk(data, history), self._place))
        self._waiting_bytes += len(data)

    def _report(self, reason: str, detail: str) -> None:
        if reason != self.stats.reason:
            if reason:
                remedy = remedies.plain(remedies.LOG[reason].remedy)
                level = logging.INFO if reason == "missing" else logging.WARNING
                log.log(level, "log not readable: container=%s reason=%s detail=%r remedy=%r",
                        self._api.container, reason, detail, remedy)  # fmt: skip
            else:
                log.info("log readable: pod=%s container=%s", self._api.pod, self._api.container)
        self.stats.readable, self.stats.reason = not reason, reason

    # the place on disk

    def _load(self) -> Place | None:
        if self._file is None:
            return None
        try:
            place = msgspec.json.decode(self._file.read_bytes(), type=Place)
            if not 0 <= place.time <= int((self._wall() + _AHEAD_SECONDS) * _NANO):
                raise ValueError("a time that cannot be")
            return place
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("no checkpoint: lines written while down are not counted; file=%s error=%s", self._file, error)
            return None

    def _save(self) -> None:
        self._saved_at = self._clock()
        if self._file is None or self._polled == self._saved:
            return
        draft = self._file.with_suffix(".tmp")
        try:
            draft.write_bytes(msgspec.json.encode(self._polled))
            draft.replace(self._file)
        except OSError as error:
            log.debug("checkpoint not written: file=%s error=%s", self._file, error)
        self._saved = self._polled


def _second(place: Place) -> str:
    return datetime.fromtimestamp(place.time // _NANO, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _nanoseconds(stamp: re.Match[bytes]) -> int | None:
    whole, fraction, zone = stamp.groups()
    try:
        seconds = int(datetime.fromisoformat((whole + zone).decode()).timestamp())
    except (ValueError, OverflowError):
        return None
    return seconds * _NANO + int((fraction or b"0").ljust(9, b"0"))


def _reason(status: int) -> Reason:
    if status in (401, 403):
        return "permission"
    return "missing" if status in (400, 404) else "io_error"  # 400: the container waits to be started


async def _message(response: aiohttp.ClientResponse) -> str:
    """What the API says of its refusal, shortened."""
    with suppress(aiohttp.ClientError, TimeoutError, msgspec.MsgspecError, ValueError, RecursionError):
        body = msgspec.json.decode(await response.content.read(4096))
        if isinstance(body, dict) and isinstance(body.get("message"), str):
            return f"HTTP {response.status}: {body['message']}"
    return f"HTTP {response.status}"

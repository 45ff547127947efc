"""The composition: everything is built here from the settings, runs, and is stopped."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, Protocol

import aiohttp
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

from exporter import baseline, catalog, webfile
from exporter import config as settings
from exporter.collector import StoreCollector
from exporter.concurrency import Levels
from exporter.config import Config
from exporter.engines import profile as profiles
from exporter.engines.profile import Profile
from exporter.facts import Facts
from exporter.headroom import Headroom
from exporter.history import History
from exporter.lifecycle import Lifecycle
from exporter.listener import Listener
from exporter.live.state import Live
from exporter.signals import Gauges, Sample
from exporter.sources import iterations, scrape, traces
from exporter.sources.checkpoint import Checkpoint
from exporter.sources.chunks import LineSource
from exporter.sources.fetch import Access, Server
from exporter.sources.files import LogFiles
from exporter.sources.gpu import GpuSource
from exporter.sources.iterations import IterationSource
from exporter.sources.kubelogs import SCHEME, Api, KubeLog
from exporter.sources.lines import Lines
from exporter.sources.logs import LogSource
from exporter.sources.peel import Unwrapper
from exporter.sources.scrape import ScrapeSource
from exporter.sources.stdin import StandardInput
from exporter.sources.traces import TraceSource
from exporter.store import Store
from exporter.strictyaml import ConfigError
from exporter.untold import Untold
from exporter.web import build_app
from exporter.webfile import Guard

log = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 2.0
_RELOAD_SECONDS = 5.0
_TELL_AGAIN_SECONDS = 60.0
_LAST_READ_SECONDS = 1.0
_KEEP_SECONDS = 5.0
_HISTORY_SECONDS = 5.0


class Source(Protocol):
    """Something that runs and produces signals. run() never returns."""

    async def run(self) -> None: ...


class Sidecar:
    """One engine's sidecar. *overrides* are the flags, by section, kept for a reload of *path*.

    *from_start* counts what the logs hold already, too. *pace* divides the windows of the live page, for tests.
    """

    def __init__(
        self,
        config: Config,
        *,
        path: Path | None = None,
        overrides: dict[str, dict[str, Any]] | None = None,
        from_start: bool = False,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        pace: float = 1.0,
    ) -> None:
        self.config = config
        self.lifecycle = Lifecycle(
            has_page=bool(config.engine.url),
            watched=bool(config.engine.url or config.log.paths or config.traces.listen_address),
        )
        self.store = Store(
            factor=config.histograms.factor,
            cap=config.labels.max_values,
            lag=config.log.interval,
            clock=clock,
            wall=wall,
            levels=Levels(self.lifecycle, clock),
            untold=Untold(self.lifecycle, clock, before=lambda: self.config.log.collapse + self.config.scrape.interval),
        )
        self.address: tuple[str, int] | None = None
        self.lines: list[Lines] = []
        self.logs: list[LogSource] = []
        self.scrape: ScrapeSource | None = None
        self.gpus: GpuSource | None = None
        self.profile = config.profile()
        """How page and log are read; None until the engine is recognised."""
        self.recognised_by: Literal["settings", "metrics", "log"] = "settings"
        self._errors_counted: dict[str, tuple[float | None, float]] = {}
        self.pins = config.pins()
        self._web_file = config.web.config_file
        self._guard = Guard(webfile.load(self._web_file))
        self._listener: Listener | None = None
        self._not_reloaded: frozenset[str] = frozenset()
        self._path = path
        self._overrides = overrides
        self._from_start = from_start
        self._clock = clock
        self._expected: list[str] = []
        self._facts = Facts(config.state_dir, self.lifecycle)
        self._reload = asyncio.Event()
        if self.profile is not None:
            self.lifecycle.engine = self.profile.engine
        else:  # read now, for it takes half a second in which nothing would be answered
            for name in profiles.names():
                profiles.bundled(name)
        self.headroom = Headroom(
            self.store,
            self.lifecycle,
            lambda: self.profile,
            interval=config.gpus.interval,
            tick=_ticker(config.gpus.interval),
        )
        self.registry = CollectorRegistry(auto_describe=False)
        collector = StoreCollector(self.store, self.lifecycle, self.headroom.samples, self._pinned)
        self.registry.register(collector)
        ProcessCollector(registry=self.registry)
        self._create_known()
        self.history = History(
            self.store,
            self.lifecycle,
            collector.gauges,
            clock=clock,
            tick=_ticker(_HISTORY_SECONDS),
            pace=pace,
        )
        self.live = Live(
            self.store,
            self.lifecycle,
            self.history,
            collector.gauges,
            config=lambda: self.config,
            pins=lambda: self.pins,
            expected=lambda: self._expected,
            clock=clock,
            pace=pace,
        )

    async def run(self, stop: asyncio.Event, *, extra: Mapping[str, Source] | None = None) -> None:
        """Serve until *stop* is set, or until a source raises; always release the socket.

        *extra* are further sources by name, as the demo has. Raises OSError if the address cannot be had, and an
        ExceptionGroup if a source failed through a bug.
        """
        app = build_app(
            self.registry,
            ready=self.waiting_for,
            state=self.live.state,
            guard=self._guard.middleware(),
        )
        asyncio.get_running_loop().set_exception_handler(_Quiet())
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS, logger=_server_log())
        await runner.setup()
        listener = Listener(runner)
        try:
            tls = self._guard.protection.tls
            self.address = await listener.open(*self.config.web.host_port(), tls)
            self._listener = listener
            log.info("listening: address=%s tls=%s", self.config.web.listen_address, tls is not None)
            async with self._traces():
                await self.watch(stop, extra=extra)
        finally:
            listener.close()
            await runner.cleanup()

    @contextlib.asynccontextmanager
    async def _traces(self) -> AsyncIterator[None]:
        """Spans are taken in meanwhile, if they are to be. Raises ConfigError if the address cannot be had."""
        config = self.config.traces
        if not config.listen_address:
            yield
            return
        source = TraceSource(
            lambda: self.profile,
            self.store,
            self.lifecycle,
            clock=self._clock,
            model=self.config.engine.model,
            max_bytes=config.max_bytes,
        )
        runner = web.AppRunner(source.app(), access_log=None, shutdown_timeout=0.5, logger=_server_log())
        await runner.setup()
        try:
            host, port = config.host_port()
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                problem = f"traces.listen_address {config.listen_address}: {error.strerror or error}"
                raise ConfigError([problem]) from None
            log.info("taking in traces: address=%s path=%s", config.listen_address, traces.PATH)
            yield
        finally:
            await runner.cleanup()

    async def watch(self, stop: asyncio.Event, *, extra: Mapping[str, Source] | None = None) -> None:
        """Read the sources until *stop* is set, or until one raises; nothing is served."""
        own: dict[str, Source] = {"headroom": self.headroom, "history": self.history}
        async with aiohttp.ClientSession(connector=_connector(self.config), trust_env=False) as session:
            await self._run_sources(self.build(session) | own | dict(extra or {}), stop)

    def build(self, session: aiohttp.ClientSession) -> dict[str, Source]:
        """The sources that the settings ask for, by name."""
        config, sources = self.config, dict[str, Source]()
        if config.engine.url:
            server = self._server(session)
            self.scrape = self._build_scrape(server)
            sources[scrape.SOURCE] = self.scrape
            if config.scrape.iterations:
                sources[iterations.SOURCE] = self._build_iterations(server)
        if config.state_dir is not None:
            with contextlib.suppress(OSError):  # the checkpoint says what it means that it cannot be written
                config.state_dir.mkdir(parents=True, exist_ok=True)
        checkpoint = Checkpoint(config.state_dir)
        for path in dict.fromkeys(map(_normal, config.log.paths)):
            source = self._build_log(path, checkpoint)
            sources[source.source] = source
            self.logs.append(source)
        self._facts.recall(self._lines_by_source(), self.store.wall())
        if config.gpus.devices != "none":
            sources["gpu"] = self.gpus = GpuSource(
                config.gpus.devices,
                self.store,
                interval=config.gpus.interval,
                clock=self._clock,
                wall=self.store.wall,
            )
        self._expected = list(sources)
        return sources

    def waiting_for(self) -> list[str]:
        """Sources that have not been tried once."""
        return [name for name in self._expected if name not in self.store.readings]

    def request_reload(self) -> None:
        """Read the file again soon."""
        self._reload.set()

    def reload(self) -> None:
        """Read the file again; on an error keep what is in use and say so."""
        try:
            new = settings.load(self._path, self._overrides)
            pins = new.pins()
        except ConfigError as error:
            for problem in error.problems:
                log.error("configuration not reloaded, the old one stays: %s", problem)
            self._tell_reload("settings", ok=False)
            return
        fixed = ("engine", "scrape", "gpus", "traces", "web", "histograms", "labels", "logging", "state_dir")
        late = [n for n in fixed if getattr(new, n) != getattr(self.config, n)]
        late += [f"log.{n}" for n in ("paths", "interval") if getattr(new.log, n) != getattr(self.config.log, n)]
        if late:
            log.warning("takes effect only after a restart: %s", ", ".join(late))
        self.config, self.pins = new, pins
        self._set_thresholds()
        for lines in self.lines:
            lines.configure(new.log.patterns, new.log.fields, new.log.collapse)
        self._tell_reload("settings", ok=True)
        log.info("configuration reloaded: file=%s", self._path)

    async def reload_protection(self) -> None:
        """Read certificates and passwords again; on an error keep those in use and say so."""
        if self._web_file is None:
            return
        try:
            new = webfile.load(self._web_file)
        except ConfigError as error:
            for problem in error.problems:
                log.error("TLS and passwords not reloaded, the old ones stay: %s", problem)
            self._tell_reload("protection", ok=False)
            return
        if self._listener is not None and (new.tls or self._guard.protection.tls):
            await self._listener.renew(new.tls)
        self._guard.protection = new
        self._tell_reload("protection", ok=True)
        log.info("TLS and passwords reloaded: file=%s", self._web_file)

    # within

    async def _run_sources(self, sources: dict[str, Source], stop: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_forever(s), name=name) for name, s in sources.items()]
                tasks.append(group.create_task(self._watch_files(), name="config"))
                tasks.append(group.create_task(self._keep_facts(), name="facts"))
                await stop.wait()
                log.info("stopping")
                for task in tasks:
                    task.cancel()
            with contextlib.suppress(TimeoutError):  # what was written up to the last moment
                async with asyncio.timeout(_LAST_READ_SECONDS):
                    for source in self.logs:
                        await source.once()
            self._facts.keep(self._lines_by_source())
        finally:
            for source in self.logs:
                source.close()

    async def _watch_files(self) -> None:
        """Reload on request, and when a file that a path leads to is another or has changed."""
        watched = [
            _Watched(self._settings_files, patient=self._path is not None),
            _Watched(lambda: self._guard.protection.files, patient=True),
        ]
        while True:
            asked = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RELOAD_SECONDS):
                    asked = await self._reload.wait()
            self._reload.clear()
            settings_changed, protection_changed = (each.changed() for each in watched)
            if asked or settings_changed:
                self.reload()
            if asked or protection_changed:
                await self.reload_protection()

    async def _keep_facts(self) -> None:
        while True:
            await asyncio.sleep(_KEEP_SECONDS)
            self._facts.keep(self._lines_by_source())

    def _lines_by_source(self) -> dict[str, Lines]:
        return {lines.source: lines for lines in self.lines}

    def _tell_reload(self, what: str, *, ok: bool) -> None:
        """Note whether *what* is as its file wants it; told is whether all is."""
        self._not_reloaded = self._not_reloaded - {what} if ok else self._not_reloaded | {what}
        self.store.fixed[catalog.RELOAD_OK] = {(): 0.0 if self._not_reloaded else 1.0}

    def _settings_files(self) -> Sequence[Path]:
        return [*([self._path] if self._path else []), *self.config.baseline.files]

    def _server(self, session: aiohttp.ClientSession) -> Server:
        config = self.config.scrape
        access = Access(
            timeout=config.deadline,
            max_bytes=config.max_bytes,
            token_file=config.bearer_token_file,
            user=config.username,
            password_file=config.password_file,
        )
        return Server(self.config.engine.url.rstrip("/"), session, access)

    def _build_scrape(self, server: Server) -> ScrapeSource:
        return ScrapeSource(
            server,
            self.profile,
            self.store,
            self.lifecycle,
            tick=_ticker(self.config.scrape.interval),
            clock=self._clock,
            recognised=lambda profile: self._recognised(profile, "metrics"),
            model=self.config.engine.model,
        )

    def _build_iterations(self, server: Server) -> IterationSource:
        return IterationSource(
            server,
            lambda: self.profile,
            self._build_lines(iterations.SOURCE),
            self.store,
            tick=_ticker(self.config.scrape.interval),
            clock=self._clock,
        )

    def _build_log(self, path: str, checkpoint: Checkpoint) -> LogSource:
        config = self.config.log
        files: LineSource
        if path == "-":
            files = StandardInput(clock=self._clock, wall=self.store.wall)
        elif path.startswith(SCHEME):
            api = Api.of_this_pod(path.removeprefix(SCHEME), os.environ)
            files = KubeLog(
                api,
                directory=self.config.state_dir,
                clock=self._clock,
                wall=self.store.wall,
                from_start=self._from_start,
            )
        else:
            files = LogFiles(
                path, checkpoint=checkpoint, clock=self._clock, wall=self.store.wall, from_start=self._from_start
            )
        return LogSource(
            files,
            self._build_lines("stdin" if path == "-" else path),
            self.store,
            tick=_ticker(config.interval),
            recognise=self._recognise,
            clock=self._clock,
        )

    def _build_lines(self, source: str) -> Lines:
        config = self.config.log
        lines = Lines(
            source,
            self.profile or profiles.bundled(profiles.GENERIC),
            self.store,
            self.lifecycle,
            clock=self._clock,
            patterns=config.patterns,
            fields=config.fields,
            window=config.collapse,
            counted=self._errors_counted,
            model=self.config.engine.model,
        )
        self.lines.append(lines)
        return lines

    def _recognise(self, data: bytes) -> None:
        """Find out from a log which engine writes it, once."""
        if self.profile is None and (engine := profiles.of_log(Unwrapper().feed(data))):
            log.info("engine recognised: engine=%s by=log", engine)
            self._recognised(profiles.bundled(engine), "log")

    def _recognised(self, profile: Profile, by: Literal["metrics", "log"]) -> None:
        self.profile, self.recognised_by = profile, by
        self.lifecycle.engine = profile.engine
        for lines in self.lines:
            lines.use(profile)
        if self.scrape is not None:
            self.scrape.use(profile)

    def _create_known(self) -> None:
        """Let what can be counted exist at 0 before anything is: a counter born at 1 pages nobody."""
        self._set_thresholds()
        self.store.fixed[catalog.RELOAD_OK] = {(): 1.0}
        for kind in catalog.ERROR_KINDS:
            if self.config.engine.url:
                self.store.create(catalog.ERRORS, (kind,), origin="metrics")
            if self.config.log.paths or not self.config.engine.url:
                self.store.create(catalog.ERRORS, (kind,), origin="log")

    def _pinned(self, gauges: Gauges) -> Iterator[Sample]:
        return baseline.samples(self.pins, self.lifecycle, gauges, self.config.engine.model)

    def _set_thresholds(self) -> None:
        lines = asdict(self.config.thresholds)
        self.store.fixed[catalog.THRESHOLD] = {(line,): float(value) for line, value in lines.items()}


class _Quiet:
    """What asyncio reports and nobody awaits. Out of file descriptors it does so thousands of times a second."""

    def __init__(self) -> None:
        self._told_at = -_TELL_AGAIN_SECONDS

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
        elif loop.time() - self._told_at >= _TELL_AGAIN_SECONDS:
            self._told_at = loop.time()
            log.warning("connections are not accepted: %s", os.strerror(error.errno))


def _server_log() -> logging.Logger:
    """The HTTP server's log, without what clients send that is no HTTP."""
    server = logging.getLogger("aiohttp.server")
    server.addFilter(_is_ours)
    return server


def _is_ours(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], (HttpProcessingError, web.RequestPayloadError)))


async def _forever(source: Source) -> None:
    """A source that stops by itself is a bug too; a TaskGroup alone would not notice."""
    await source.run()
    raise RuntimeError(f"{type(source).__name__}.run() returned")


def _ticker(interval: float) -> Callable[[], Awaitable[None]]:
    async def tick() -> None:
        await asyncio.sleep(interval)

    return tick


def _connector(config: Config) -> aiohttp.TCPConnector:
    if config.scrape.insecure_skip_verify:
        return aiohttp.TCPConnector(limit=4, ssl=False)
    if config.scrape.ca_file is not None:
        context = ssl.create_default_context()
        try:
            context.load_verify_locations(config.scrape.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError([f"scrape.ca_file: {config.scrape.ca_file}: {error}"]) from None
        return aiohttp.TCPConnector(limit=4, ssl=context)
    return aiohttp.TCPConnector(limit=4)


def _normal(path: str) -> str:
    """*path* of a log as it is named everywhere."""
    return path if path == "-" or path.startswith(SCHEME) else os.path.normpath(path)


class _Watched:
    """Files of which one may change, or be another; *patient*: while the first is missing, nothing has changed yet."""

    def __init__(self, files: Callable[[], Sequence[Path]], *, patient: bool) -> None:
        self._files = files
        self._patient = patient
        self._seen = self._stamps()

    def changed(self) -> bool:
        """Whether they did since this was asked last."""
        if (now := self._stamps()) == self._seen or (self._patient and now[0] is None):
            return False
        self._seen = now
        return True

    def _stamps(self) -> list[tuple[str, int, int] | None]:
        return [_stamp(file) for file in self._files()]


def _stamp(path: Path) -> tuple[str, int, int] | None:
    """What changes when the file behind *path* does, also when a mounted ConfigMap swaps its link."""
    try:
        real = path.resolve()
        stat = real.stat()
    except OSError:
        return None
    return str(real), stat.st_mtime_ns, stat.st_size


async def until_signalled(sidecar: Sidecar, *, extra: Mapping[str, Source] | None = None) -> None:
    """Run *sidecar* until SIGTERM or SIGINT; SIGHUP reloads."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, sidecar.request_reload)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # one that came since the start of the process waits
    await sidecar.run(stop, extra=extra)
    log.info("stopped")

"""The composition: everything is built here from the settings, runs, and is stopped."""

import asyncio
import contextlib
import logging
import signal
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import aiohttp
from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.process_collector import ProcessCollector

from exporter import catalog, overview
from exporter import config as settings
from exporter.collector import StoreCollector
from exporter.config import Config
from exporter.engines import profile as profiles
from exporter.engines.profile import Profile
from exporter.lifecycle import Lifecycle
from exporter.sources import scrape
from exporter.sources.checkpoint import Checkpoint
from exporter.sources.chunks import LineSource
from exporter.sources.fetch import Access, Server
from exporter.sources.files import LogFiles
from exporter.sources.gpu import GpuSource
from exporter.sources.lines import Lines
from exporter.sources.logs import LogSource
from exporter.sources.peel import Unwrapper
from exporter.sources.scrape import ScrapeSource
from exporter.sources.stdin import StandardInput
from exporter.store import Store
from exporter.strictyaml import ConfigError
from exporter.web import build_app

log = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 2.0
_RELOAD_SECONDS = 5.0
_LAST_READ_SECONDS = 1.0


class Source(Protocol):
    """Something that runs and produces signals. run() never returns."""

    async def run(self) -> None: ...


class Sidecar:
    """One engine's sidecar. *overrides* are the flags, by section, kept for a reload of *path*."""

    def __init__(
        self,
        config: Config,
        *,
        path: Path | None = None,
        overrides: dict[str, dict[str, Any]] | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.config = config
        self.store = Store(factor=config.histograms.factor, cap=config.labels.max_values, clock=clock, wall=wall)
        self.lifecycle = Lifecycle(has_page=bool(config.engine.url))
        self.address: tuple[str, int] | None = None
        self.lines: list[Lines] = []
        self._path = path
        self._overrides = overrides
        self._clock = clock
        self._profile = config.profile()
        self._scrape: ScrapeSource | None = None
        self._logs: list[LogSource] = []
        self._expected: list[str] = []
        self._reload = asyncio.Event()
        if self._profile is not None:
            self.lifecycle.engine = self._profile.engine
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(StoreCollector(self.store, self.lifecycle))
        ProcessCollector(registry=self.registry)
        self._create_known()

    async def run(self, stop: asyncio.Event, *, extra: Mapping[str, Source] | None = None) -> None:
        """Serve until *stop* is set, or until a source raises; always release the socket.

        *extra* are further sources by name, as the demo has. Raises OSError if the address cannot be had, and an
        ExceptionGroup if a source failed through a bug.
        """
        app = build_app(self.registry, ready=self.waiting_for, rows=lambda: overview.rows(self.store, self.lifecycle))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_SECONDS)
        await runner.setup()
        try:
            host, port = self.config.web.host_port()
            await web.TCPSite(runner, host, port).start()
            self.address = runner.addresses[0][:2]
            log.info("listening: address=%s", self.config.web.listen_address)
            async with aiohttp.ClientSession(connector=_connector(self.config), trust_env=False) as session:
                await self._run_sources(self.build(session) | dict(extra or {}), stop)
        finally:
            await runner.cleanup()

    def build(self, session: aiohttp.ClientSession) -> dict[str, Source]:
        """The sources that the settings ask for, by name."""
        config, sources = self.config, dict[str, Source]()
        if config.engine.url:
            self._scrape = self._build_scrape(session)
            sources[scrape.SOURCE] = self._scrape
        if config.state_dir is not None:
            with contextlib.suppress(OSError):  # the checkpoint says what it means that it cannot be written
                config.state_dir.mkdir(parents=True, exist_ok=True)
        checkpoint = Checkpoint(config.state_dir)
        for path in config.log.paths:
            source = self._build_log(path, checkpoint)
            sources[self.lines[-1].source] = source
            self._logs.append(source)
        if config.gpus.devices != "none":
            sources["gpu"] = GpuSource(
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
        except ConfigError as error:
            for problem in error.problems:
                log.error("configuration not reloaded, the old one stays: %s", problem)
            self.store.fixed[catalog.RELOAD_OK] = {(): 0.0}
            return
        fixed = ("engine", "scrape", "gpus", "web", "histograms", "labels", "logging", "state_dir")
        late = [n for n in fixed if getattr(new, n) != getattr(self.config, n)]
        late += [f"log.{n}" for n in ("paths", "interval") if getattr(new.log, n) != getattr(self.config.log, n)]
        if late:
            log.warning("takes effect only after a restart: %s", ", ".join(late))
        self.config = new
        self._set_thresholds()
        for lines in self.lines:
            lines.configure(new.log.patterns, new.log.fields, new.log.collapse)
        self.store.fixed[catalog.RELOAD_OK] = {(): 1.0}
        log.info("configuration reloaded: file=%s", self._path)

    # within

    async def _run_sources(self, sources: dict[str, Source], stop: asyncio.Event) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(_forever(s), name=name) for name, s in sources.items()]
                tasks.append(group.create_task(self._watch_file(), name="config"))
                await stop.wait()
                log.info("stopping")
                for task in tasks:
                    task.cancel()
            with contextlib.suppress(TimeoutError):  # what was written up to the last moment
                async with asyncio.timeout(_LAST_READ_SECONDS):
                    for source in self._logs:
                        await source.once()
        finally:
            for source in self._logs:
                source.close()

    async def _watch_file(self) -> None:
        """Reload on request, and when the file that the path leads to is another or has changed."""
        seen = _stamp(self._path)
        while True:
            try:
                await asyncio.wait_for(self._reload.wait(), _RELOAD_SECONDS)
            except TimeoutError:
                if (now := _stamp(self._path)) == seen or now is None:
                    continue
            self._reload.clear()
            seen = _stamp(self._path)
            self.reload()

    def _build_scrape(self, session: aiohttp.ClientSession) -> ScrapeSource:
        config = self.config.scrape
        access = Access(
            timeout=config.deadline,
            max_bytes=config.max_bytes,
            token_file=config.bearer_token_file,
            user=config.username,
            password_file=config.password_file,
        )
        return ScrapeSource(
            Server(self.config.engine.url.rstrip("/"), session, access),
            self._profile,
            self.store,
            self.lifecycle,
            tick=_ticker(config.interval),
            clock=self._clock,
            recognised=self._recognised,
            model=self.config.engine.model,
        )

    def _build_log(self, path: str, checkpoint: Checkpoint) -> LogSource:
        config = self.config.log
        files: LineSource
        if path == "-":
            files = StandardInput(clock=self._clock, wall=self.store.wall)
        else:
            files = LogFiles(path, checkpoint=checkpoint, clock=self._clock, wall=self.store.wall)
        lines = Lines(
            "stdin" if path == "-" else path,
            self._profile or profiles.bundled(profiles.GENERIC),
            self.store,
            self.lifecycle,
            clock=self._clock,
            patterns=config.patterns,
            fields=config.fields,
            window=config.collapse,
            model=self.config.engine.model,
        )
        self.lines.append(lines)
        return LogSource(
            files,
            lines,
            self.store,
            tick=_ticker(config.interval),
            recognise=self._recognise,
            clock=self._clock,
        )

    def _recognise(self, data: bytes) -> None:
        """Find out from a log which engine writes it, once."""
        if self._profile is None and (engine := profiles.of_log(Unwrapper().feed(data))):
            log.info("engine recognised: engine=%s by=log", engine)
            self._recognised(profiles.bundled(engine))

    def _recognised(self, profile: Profile) -> None:
        self._profile = profile
        self.lifecycle.engine = profile.engine
        for lines in self.lines:
            lines.use(profile)
        if self._scrape is not None:
            self._scrape.use(profile)

    def _create_known(self) -> None:
        """Let what can be counted exist at 0 before anything is: a counter born at 1 pages nobody."""
        self._set_thresholds()
        self.store.fixed[catalog.RELOAD_OK] = {(): 1.0}
        for kind in catalog.ERROR_KINDS:
            if self.config.engine.url:
                self.store.create(catalog.ERRORS, (kind,), origin="metrics")
            if self.config.log.paths or not self.config.engine.url:
                self.store.create(catalog.ERRORS, (kind,), origin="log")

    def _set_thresholds(self) -> None:
        lines = asdict(self.config.thresholds)
        self.store.fixed[catalog.THRESHOLD] = {(line,): float(value) for line, value in lines.items()}


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


def _stamp(path: Path | None) -> tuple[str, int, int] | None:
    """What changes when the file behind *path* does, also when a mounted ConfigMap swaps its link."""
    if path is None:
        return None
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
    await sidecar.run(stop, extra=extra)
    log.info("stopped")

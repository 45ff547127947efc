"""One server under load: its warm-up, one level at a time, and the commands that set it up anew."""

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp

from exporter.load import sidecar as sidecars
from exporter.load import stats
from exporter.load.client import Cost, Progress, Target, ask, closed_loop, encoded
from exporter.load.level import Pass
from exporter.load.mix import Mix
from exporter.load.result import Condition, Engine, Level, Request
from exporter.load.sidecar import Sidecar, Watch
from exporter.load.verdict import Limits
from exporter.sources.fetch import Unreadable
from exporter.strictyaml import ConfigError

ROUNDS = 4
"""Requests at least for each client of a level."""
_IDLE = 60.0  # seconds a queue may take to empty
_STABLE = 0.1  # by which the median may still fall when the warm-up ends
_MOST_WARM_UPS = 5
_TICK = 0.5  # seconds between two lines of progress
_LOOK = 5.0  # seconds until a server must say whether it is alive


@dataclass(frozen=True, slots=True)
class Plan:
    """What is sent where, and how much of it."""

    target: Target
    mix: Mix
    requests: int = 200
    """Measured at each level."""
    warm_up: int = 20
    """Requests before the first level, and after each reset, that are not measured."""
    pause: float = 1.0
    """Seconds between two levels, where no sidecar tells that the queue is empty."""
    sidecar: str | None = None
    reset: str | None = None
    """Command before each level."""
    ready_seconds: float = 600.0
    """How long the server may take after a command until it answers."""
    max_seconds: float = 3600.0
    max_requests: int = 20_000
    conditions: dict[str, Condition] = field(default_factory=dict)
    """What the user says of the server."""
    limits: dict[str, float] = field(default_factory=dict)
    """Thresholds that the user chose, as Limits names them; the rest is the sidecar's, or the defaults."""


class Report(Protocol):
    """Who is told how it goes."""

    def say(self, text: str) -> None:
        """One thing that happened."""

    def progress(self, concurrency: int, progress: Progress, seconds: float) -> None:
        """Where the level at hand is, twice a second."""

    def level(self, level: Level, baseline: Level) -> None:
        """One pass of a level is over; *level* has all its passes."""


class Bench:
    """One server under load; use as ``async with``."""

    def __init__(self, plan: Plan, report: Report, stop: asyncio.Event) -> None:
        self.plan, self.report, self.stop = plan, report, stop
        self.notes: list[str] = []
        self.made = 0
        """Requests so far."""
        self._deadline = time.perf_counter() + plan.max_seconds
        self._passes = 0
        self._sidecar: Sidecar | None = None
        self._warm = False
        self.limits = Limits(**plan.limits)

    async def __aenter__(self) -> "Bench":
        """Raises ConfigError if the sidecar, where one is given, does not answer."""
        self._session = aiohttp.ClientSession()
        if self.plan.sidecar is not None:
            self._sidecar = Sidecar(self.plan.sidecar, self._session)
            try:
                self.limits = sidecars.limits(await self._sidecar.page(), self.plan.limits)
            except Unreadable as error:
                await self._session.close()
                raise ConfigError([f"--sidecar {self.plan.sidecar}: {error}"]) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @property
    def over(self) -> str:
        """Why no further level may begin; empty if one may."""
        if self.stop.is_set():
            return "interrupted"
        if time.perf_counter() >= self._deadline:
            return f"--max-seconds {self.plan.max_seconds:g} are over"
        if self.made >= self.plan.max_requests:
            return f"--max-requests {self.plan.max_requests} are made"
        return ""

    async def describe(self) -> tuple[dict[str, Condition], dict[str, str]]:
        """What must be alike in runs that are compared, and model and config for a pin; what the user says wins."""
        told: dict[str, Condition] = {"tool": "stopline ramp"} | await self._models() | self.plan.mix.conditions()
        identity = {}
        if self._sidecar is not None:
            with contextlib.suppress(Unreadable):
                page = await self._sidecar.page()
                told |= sidecars.conditions(page)
                identity = sidecars.identity(page)
        return told | self.plan.conditions, identity

    async def prepare(self) -> None:
        """Find the model, run the reset, warm up. Raises ConfigError if the server does not take these requests."""
        if self.plan.reset is not None:
            await self.run(self.plan.reset)
            self._warm = False
        if not self.plan.mix.model and self.plan.mix.api != "generate" and not self.plan.mix.given:
            model = (await self._models()).get("model")
            if model is None:
                raise ConfigError([f"{self._base}/v1/models does not tell a model; is the server up? Give --model"])
            self.plan = replace(self.plan, mix=replace(self.plan.mix, model=str(model)))
        if not self._warm:
            await self._warm_up()
            self._warm = True

    async def measure(self, concurrency: int) -> Pass:
        """One pass at this level, when the queue is empty."""
        before = await self._quiet(concurrency)
        self._passes += 1
        plan, salt = self.plan, str(self._passes)
        whole = max(plan.requests, ROUNDS * concurrency)
        wanted = min(whole, max(plan.max_requests - self.made, 1))
        warm_up = min(concurrency, wanted)
        bodies = itertools.chain(
            plan.mix.bodies(warm_up, f"{salt} begins"),
            plan.mix.bodies(wanted, salt),
            plan.mix.bodies(wanted, f"{salt} ends"),
        )
        progress, cost = Progress(wanted), Cost()
        watch = Watch(self.limits) if before is not None else None
        if watch is not None and before is not None:
            watch.see(before)
        async with cost, self._watched(watch), self._shown(concurrency, progress):
            measured, others = await closed_loop(
                plan.target,
                map(encoded, bodies),
                concurrency=concurrency,
                warm_up=warm_up,
                progress=progress,
                stop=self.stop,
                deadline=self._deadline,
            )
        self.made += len(others) + len(measured)
        complete = len(measured) == whole
        engine = await self._engine(before, watch) if before is not None and watch is not None else None
        answered = [r.latency for r in measured if not r.error]
        client = cost.told(stats.quantile(answered, 0.5) if answered else None)
        failed = [r for r in others if r.error]
        return Pass(concurrency, measured + failed, [r for r in others if not r.error], engine, client, complete)

    async def alive(self) -> bool:
        """Whether the server answers at all, and does not say that it is unwell."""
        try:
            async with (
                asyncio.timeout(_LOOK),
                self._session.get(self._base + "/health", headers=self.plan.target.headers) as response,
            ):
                return response.status < 500
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def run(self, command: str) -> None:
        """Run a command of the user's, then wait for the server. Raises ConfigError if either fails."""
        self.report.say(f"running: {command}")
        with tempfile.TemporaryFile() as output:  # no pipe: what it starts in the background would keep that open
            process = await asyncio.create_subprocess_shell(
                command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
            )
            code = await process.wait()
            output.seek(0)
            said = output.read().decode("utf-8", "replace").strip()[-500:]
        if code:
            raise ConfigError([f"the command {command!r} ended with {code}: {said or 'it printed nothing'}"])
        end = time.monotonic() + self.plan.ready_seconds
        while not await self.alive():
            if time.monotonic() > end:
                raise ConfigError([f"{self._base}: no answer {self.plan.ready_seconds:g} s after {command!r}"])
            if self.stop.is_set():
                return
            await asyncio.sleep(_TICK)
        self._warm = False

    @property
    def _base(self) -> str:
        parts = urlsplit(self.plan.target.url)
        return f"{parts.scheme}://{parts.netloc}"

    async def _models(self) -> dict[str, Condition]:
        """Name and longest context of the first model; empty where the server does not tell."""
        try:
            async with (
                asyncio.timeout(_TICK if self.over else _LOOK),  # whoever ends it does not wait for this
                self._session.get(self._base + "/v1/models", headers=self.plan.target.headers) as response,
            ):
                first = (await response.json())["data"][0]
                length = first.get("max_model_len")
                return {"model": str(first["id"])} | ({"max_model_len": length} if length else {})
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, AttributeError):
            return {"model": self.plan.mix.model} if self.plan.mix.model else {}

    async def _warm_up(self) -> None:
        """One client, until its requests get no faster; the first ones compile, capture and fill."""
        count = self.plan.warm_up
        if not count:
            return
        self.report.say(f"warm-up: {count} requests or more, not measured")
        medians: list[float] = []
        async with self.plan.target.session() as session:
            for batch in range(_MOST_WARM_UPS):
                seen: list[Request] = []
                for body in self.plan.mix.bodies(count, f"warm-up {batch}"):
                    if self.over:
                        return
                    answer = await self._unless_over(ask(session, self.plan.target, encoded(body)))
                    if answer is None:
                        return
                    seen.append(answer)
                    self.made += 1
                    self._refused(answer)
                medians.append(stats.quantile([r.latency for r in seen], 0.5))
                if batch and medians[-1] > (1 - _STABLE) * medians[-2]:
                    return

    async def _unless_over(self, work: Coroutine[Any, Any, Request]) -> Request | None:
        """What *work* gives; None if somebody stops the run, or its time is over, before."""
        futures: list[asyncio.Future[Any]] = [asyncio.create_task(work), asyncio.create_task(self.stop.wait())]
        left = max(self._deadline - time.perf_counter(), 0.0)
        try:
            await asyncio.wait(futures, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in futures:
                future.cancel()
            await asyncio.gather(*futures, return_exceptions=True)
        request: Request | None = None if futures[0].cancelled() else futures[0].result()
        return request

    def _refused(self, request: Request) -> None:
        """Raises ConfigError for what no level would mend."""
        url = self.plan.target.url
        if request.error == "connection":
            raise ConfigError([f"{url}: {request.detail}; is the server up, and is this its address?"])
        if request.error == "client_error":
            raise ConfigError([f"{url}: the server refuses the request: {request.detail}"])

    async def _quiet(self, concurrency: int) -> sidecars.Page | None:
        """The sidecar's page once nothing is in the engine; None without a sidecar."""
        if self._sidecar is None:
            if self._passes:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.plan.pause):
                        await self.stop.wait()
            return None
        try:
            if not await self._sidecar.idle(_IDLE):
                self.notes.append(f"the engine was not idle before concurrency {concurrency}: somebody else uses it")
            return await self._sidecar.settled()
        except Unreadable as error:
            self.notes.append(f"the sidecar did not answer: {error.reason}")
            return None

    async def _engine(self, before: sidecars.Page, watch: Watch) -> Engine | None:
        assert self._sidecar is not None
        try:
            after = await self._sidecar.settled()
        except Unreadable as error:
            self.notes.append(f"the sidecar did not answer: {error.reason}")
            return None
        watch.see(after)
        return sidecars.engine(before, after, watch)

    @contextlib.asynccontextmanager
    async def _watched(self, watch: Watch | None) -> AsyncIterator[None]:
        if watch is None or self._sidecar is None:
            yield
            return
        async with _meanwhile(self._sidecar.watch(watch, time.monotonic())):
            yield

    @contextlib.asynccontextmanager
    async def _shown(self, concurrency: int, progress: Progress) -> AsyncIterator[None]:
        async def show() -> None:
            began = time.monotonic()
            while True:
                await asyncio.sleep(_TICK)
                self.report.progress(concurrency, progress, time.monotonic() - began)

        async with _meanwhile(show()):
            yield


@contextlib.asynccontextmanager
async def _meanwhile(work: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

"""Reads what ``run`` would read, for a while and without serving, and tells what came of it.

It is the sidecar itself that reads. Three things differ: nothing is kept in ``state_dir``; what the log holds already
counts, so that an idle engine is judged by what it did; and nothing is read that is then gone for the sidecar beside.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

import aiohttp

from exporter import catalog
from exporter.config import Config
from exporter.doctor import engine, gpus, logs, services, verdicts
from exporter.doctor.findings import Finding, Report
from exporter.doctor.services import Service
from exporter.engines import profile as profiles
from exporter.sidecar import Sidecar
from exporter.sources import scrape

_PATIENCE = 10.0  # seconds for the first answer of each source
_LOOK = 0.02


async def examine(
    config: Config,
    *,
    seconds: float,
    prometheus: Service | None = None,
    grafana: Service | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Report:
    """Watch everything that *config* names for *seconds*, then ask *prometheus* and *grafana* where given.

    Raises ConfigError, and an ExceptionGroup if a source failed through a bug.
    """
    harmless = replace(config, state_dir=None, scrape=replace(config.scrape, iterations=False))
    for name in profiles.names():  # at once: it takes half a second, in which no answer would be taken in
        profiles.bundled(name)
    sidecar = Sidecar(harmless, from_start=True)
    grown, polls = await _watch(sidecar, seconds, sleep)
    findings = [Finding("settings", "note", text) for text in config.warnings()]
    if config.scrape.iterations:
        text = "scrape.iterations was left out: what is read there is gone for stopline run"
        findings.append(Finding("settings", "note", text))
    findings += logs.findings(sidecar, grown, seconds)
    findings += engine.findings(sidecar, polls)
    findings += gpus.findings(sidecar)
    scraped = True
    async with aiohttp.ClientSession(trust_env=False) as session:
        if prometheus is not None:
            told, scraped = await services.prometheus(prometheus, session, config.web)
            findings += told
        if grafana is not None:
            findings += await services.grafana(grafana, session)
    return Report(tuple(findings), tuple(verdicts.of(sidecar, scraped=scraped)))


async def _watch(
    sidecar: Sidecar, seconds: float, sleep: Callable[[float], Awaitable[None]]
) -> tuple[Counter[str], list[float]]:
    """Let the sidecar read until each source was tried, then for *seconds*.

    Gives by how many bytes each log grew in these, and how many seconds each poll of the page took.
    """
    stop, polls = asyncio.Event(), dict[float, float]()
    reading, timing = asyncio.create_task(sidecar.watch(stop)), asyncio.create_task(_time(sidecar, polls))
    patience = time.monotonic() + max(_PATIENCE, sidecar.config.scrape.deadline + 1.0)
    try:
        await asyncio.wait({reading}, timeout=_LOOK)  # until then it has not said what is to be tried
        while sidecar.waiting_for() and time.monotonic() < patience and not reading.done():
            await asyncio.wait({reading}, timeout=_LOOK)
        before = _written(sidecar)
        pause = asyncio.ensure_future(sleep(seconds))
        await asyncio.wait({reading, pause}, return_when=asyncio.FIRST_COMPLETED)
        pause.cancel()
    finally:
        timing.cancel()
        stop.set()
        await reading
    return _written(sidecar) - before, list(polls.values())


async def _time(sidecar: Sidecar, polls: dict[float, float]) -> None:
    """Note how long each poll of the page took, by when it ended, until cancelled."""
    while True:
        if poll := sidecar.store.readings.get(scrape.SOURCE):
            polls[poll.at] = poll.seconds
        await asyncio.sleep(_LOOK)


def _written(sidecar: Sidecar) -> Counter[str]:
    """Bytes by log: read, or there to be read."""
    read = {source: int(n) for (source,), n in sidecar.store.counters[catalog.LOG_BYTES].items()}
    unread = {source: int(n) for (source,), n in sidecar.store.gauges().get(catalog.LOG_LAG, {}).items()}
    return Counter(read) + Counter(unread)

"""The log source: follows a file, a glob or standard input and has its lines understood."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from exporter import catalog
from exporter.signals import Reading, Sample
from exporter.sources.chunks import LineSource
from exporter.sources.lines import Lines
from exporter.store import Store

_TELL_SECONDS = 0.25
_QUIET_SECONDS = 0.5
_TOTALS = (
    (catalog.LOG_LINES, "lines"),
    (catalog.LOG_BYTES, "bytes"),
    (catalog.LOG_ROTATIONS, "rotations"),
    (catalog.LOG_TRUNCATIONS, "truncations"),
    (catalog.LOG_DROPPED, "dropped_bytes"),
)


class Recogniser(Protocol):
    """Told every chunk until the engine is known; may change the profile of the lines before they are read."""

    def __call__(self, data: bytes) -> None: ...


class LogSource:
    """Reads what is there every *tick*, one chunk at a time, and lets others run in between."""

    def __init__(
        self,
        files: LineSource,
        lines: Lines,
        store: Store,
        *,
        tick: Callable[[], Awaitable[None]],
        recognise: Recogniser,
        clock: Callable[[], float],
    ) -> None:
        self._files = files
        self._lines = lines
        self._store = store
        self._tick = tick
        self._recognise = recognise
        self._clock = clock
        self._told_at = -math.inf

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            await self.once()
            await self._tick()

    def close(self) -> None:
        """Let go of the files, and remember how far they were read."""
        self._files.close()

    @property
    def source(self) -> str:
        return self._lines.source

    @property
    def paths(self) -> list[Path]:
        """The files that are followed now; none for standard input."""
        return self._files.paths

    async def once(self) -> None:
        """Read all that is there now; what is known meanwhile is told, however long that takes.

        Of a quiet log there is little to tell.
        """
        began = told = self._clock()
        quiet = began - self._told_at < _QUIET_SECONDS
        for chunk in self._files.poll():
            quiet = False
            self._recognise(chunk.data)
            self._lines.feed(chunk.data, history=chunk.history)
            if self._clock() - told >= _TELL_SECONDS:
                told = self._clock()
                self._tell(told - began)
            await asyncio.sleep(0)
        if not quiet:
            self._tell(self._clock() - began)

    def _tell(self, seconds: float) -> None:
        self._told_at = self._clock()
        self._lines.flush()
        source, stats, store = self._lines.source, self._files.stats, self._store
        for family, name in _TOTALS:
            store.set_total(family, (source,), getattr(stats, name))
        store.counters[catalog.LOG_UNPARSED].setdefault((source,), 0.0)
        samples = [*self._lines.samples(), Sample(catalog.LOG_LAG, (source,), stats.lag_bytes)]
        if stats.last_line_at is not None:
            samples.append(Sample(catalog.LOG_LAST_LINE, (source,), stats.last_line_at))
        store.publish(
            Reading(
                source=source,
                origin="log",
                ok=stats.readable,
                at=store.wall(),
                samples=tuple(samples) if stats.readable else (),
                reason="" if stats.readable else stats.reason,
                seconds=seconds,
            )
        )

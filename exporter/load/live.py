"""How a ramp goes, while it goes: one line that moves on a terminal, plain lines elsewhere. To standard error."""

import math
import time
from collections.abc import Callable
from typing import TextIO

from exporter.load import stats, table
from exporter.load.client import Progress
from exporter.load.result import Level

_PLAIN = 10.0  # seconds between two lines where none can be overwritten
_BAR = 20  # characters


class Live:
    """Tells *out*; *clock* is monotonic, in seconds."""

    def __init__(self, out: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._out, self._clock = out, clock
        self._moving = out.isatty()
        self._width = 0
        self._last = clock()

    def say(self, text: str) -> None:
        self._line(text)

    def progress(self, concurrency: int, progress: Progress, seconds: float) -> None:
        if not self._moving and self._clock() - self._last < _PLAIN:
            return
        done = len(progress.done)
        p99 = stats.quantile([r.latency for r in progress.done], 0.99) if done else None
        filled = _BAR * done // max(progress.wanted, 1)
        bar = f"[{'#' * filled}{'.' * (_BAR - filled)}] " if self._moving else ""
        text = (
            f"concurrency {concurrency}: {bar}{done} of {progress.wanted}, "
            f"{done / seconds if seconds else 0:.1f} req/s, P99 {table.time(p99)}, errors {progress.errors}"
        )
        if self._moving:
            self._out.write(f"\r{text.ljust(self._width)}")
            self._out.flush()
            self._width = len(text)
        else:
            self._line(text)

    def level(self, level: Level, baseline: Level) -> None:
        p99, base = level.latency.p99, baseline.latency.p99
        ratio = f", {p99 / base:.2f}x" if p99 is not None and p99 < math.inf and base and level is not baseline else ""
        again = f", pass {level.passes}" if level.passes > 1 else ""
        self._line(
            f"concurrency {level.concurrency}{again}: "
            f"P50 {table.time(level.latency.p50)}, P99 {table.time(p99)}{ratio}, "
            f"{table.number(level.requests_per_second, 2)} req/s, {table.number(level.tokens_per_second)} tok/s, "
            f"errors {table.counts(level.errors)}{f'; {level.cause}' if level.cause else ''}"
        )

    def _line(self, text: str) -> None:
        start = f"\r{' ' * self._width}\r" if self._width else ""
        self._out.write(f"{start}{text}\n")
        self._out.flush()
        self._width = 0
        self._last = self._clock()

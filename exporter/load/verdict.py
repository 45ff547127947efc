"""The three stop lines as code: whether a level crosses one, which level to try next, and what came of it all.

Knows nothing of networks or clocks: whoever drives it hands in measured levels, real or simulated.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from exporter.config import Thresholds
from exporter.load.result import Level, Tripped, Verdict

CONFIRMATIONS = 2
MIN_SAMPLES = 50
_DEFAULT = Thresholds()
_APART = 1.2  # times: what two passes of a steady baseline do not differ by
_OVERLOAD = {"timeout", "rejected"}  # errors that go away with the load


@dataclass(frozen=True, slots=True)
class Limits:
    """Where the lines are. Defaults are those of the sidecar."""

    latency_ratio: float = _DEFAULT.latency_ratio
    latency_floor_seconds: float = _DEFAULT.latency_floor_seconds
    memory_used_ratio: float = _DEFAULT.memory_used_ratio
    memory_headroom_bytes: float = float(_DEFAULT.memory_headroom_bytes)
    memory_growth_bytes: float = float(_DEFAULT.memory_growth_bytes)
    kv_cache_usage_ratio: float = _DEFAULT.kv_cache_usage_ratio

    def latency(self, baseline: float) -> float:
        """The P99 in seconds at which the latency line is crossed: the ratio, and the floor above the baseline."""
        return max(self.latency_ratio * baseline, baseline + self.latency_floor_seconds)


def errors(level: Level) -> str:
    """What failed; empty if nothing did."""
    told = [f"{count} {kind}" for kind, count in sorted(level.errors.items())]
    if level.engine is not None:
        told += [f"{count:g} {kind} (told by the engine)" for kind, count in sorted(level.engine.errors.items())]
    return ", ".join(told)


def memory(level: Level, limits: Limits) -> str:
    """Which GPU is near its limit, or that the KV cache is full; empty if neither is."""
    engine = level.engine
    if engine is None:
        return ""
    for gpu, m in sorted(engine.memory.items()):
        if (free := m.total - m.peak) < limits.memory_headroom_bytes:
            return f"GPU {gpu} has {_gib(free)} free, under {_gib(limits.memory_headroom_bytes)}"
        if not engine.preallocates and m.peak > limits.memory_used_ratio * m.total:
            return f"GPU {gpu} is {m.peak / m.total:.0%} full, above {limits.memory_used_ratio:.0%}"
        if engine.preallocates and m.plateau is not None and m.peak - m.plateau > limits.memory_growth_bytes:
            return f"GPU {gpu} grew {_gib(m.peak - m.plateau)} above its resting use"
    if engine.kv_cache_full:
        return f"the KV cache is {engine.kv_cache_usage or 1:.0%} full, and requests wait or are preempted"
    return ""


@dataclass(slots=True)
class Search:
    """Which level to measure next. Ask `next`, measure that level, hand the level to `tell`, until there is no next.

    First the given levels, upwards, until one crosses a line; then between it and the one before by bisection, until
    they are no farther apart than *precision* (a share of the level). A level whose P99 is above the line is measured
    again, *confirmations* times at most: it crosses the line if most passes say so and all passes together do.
    The first level is the baseline: it is measured *baselines* times, and once more if their P99 lie apart.
    """

    levels: Sequence[int]
    limits: Limits = field(default_factory=Limits)
    confirmations: int = CONFIRMATIONS
    baselines: int = 1
    precision: float = 0.1
    refine: bool = True
    measured: dict[int, Level] = field(default_factory=dict)
    """By concurrency, all passes together."""
    good: int | None = None
    bad: Tripped | None = None
    notes: list[str] = field(default_factory=list)
    """What the verdict is to mention."""
    _first: list[float] = field(default_factory=list)  # P99 of each pass of the baseline
    _above: int = 0  # passes of the level at hand with a P99 above the line
    _again: int | None = None
    _over: bool = False

    @property
    def baseline(self) -> float | None:
        """P99 of the first level, in seconds."""
        first = self.measured.get(self.levels[0])
        return first.latency.p99 if first is not None else None

    @property
    def line(self) -> float | None:
        """P99 in seconds at which the latency line is crossed."""
        return None if self.baseline is None else self.limits.latency(self.baseline)

    def next(self) -> int | None:
        """Concurrency of the level to measure; None when the answer is there."""
        if self._over:
            return None
        if self._again is not None:
            return self._again
        if self.bad is None:
            return next((level for level in self.levels if level not in self.measured), None)
        if not self.refine or self.good is None or not self._refinable(self.bad):
            return None
        gap = self.bad.concurrency - self.good
        return None if gap <= max(1.0, self.precision * self.bad.concurrency) else self.good + gap // 2

    def tell(self, last: Level, pooled: Level) -> None:
        """The level that was asked for: its *last* pass, and what all its passes come to together (*pooled*)."""
        concurrency = pooled.concurrency
        self.measured[concurrency] = pooled
        if concurrency == self.levels[0] and last.latency.p99 is not None:
            self._first.append(last.latency.p99)
        self._again = None
        if not pooled.complete and not pooled.errors:  # cut short: by time, or by whoever asked to stop
            self._over = True
        if failed := errors(pooled):
            self._cross("errors", concurrency, failed)
        elif full := memory(pooled, self.limits):
            self._cross("memory", concurrency, full)
        elif self._doubled(last, pooled):
            assert self.line is not None
            assert self.baseline is not None
            self._cross(
                "latency",
                concurrency,
                f"P99 {_time(pooled.latency.p99)} is {_ratio(pooled.latency.p99, self.baseline)} times the "
                f"{_time(self.baseline)} of concurrency {self.levels[0]}, the line is {_time(self.line)}",
            )
        elif concurrency == self.levels[0] and pooled.complete and self._unsettled():
            self._again = concurrency
        elif self._again is None and pooled.complete:
            if self._above:
                self.notes.append(
                    f"concurrency {concurrency} is not counted as above the line: {self._above} of {pooled.passes} "
                    "passes was"
                )
            self.good = max(self.good or 0, concurrency)
        if self._again is None:
            self._above = 0

    def stop(self, note: str) -> None:
        """Measure no further level, for the reason *note*."""
        self._over = True
        self.notes.append(note)
        if self._again is not None and self._above:
            self.notes.append(f"concurrency {self._again} was above the line, and is not confirmed")

    def verdict(self) -> Verdict:
        """What is known now."""
        notes = list(self.notes)
        if self._first and max(self._first) > _APART * min(self._first):
            passes = ", ".join(map(_time, self._first))
            notes.append(f"the baseline is unsteady: P99 of its passes was {passes}; is the machine shared?")
        if any(level.client is not None and level.client.limited for level in self.measured.values()):
            slow = [n for n, level in sorted(self.measured.items()) if level.client and level.client.limited]
            notes.append(f"client_limited at concurrency {_listed(slow)}: the client, not the server, may be measured")
        whole = [level for _, level in sorted(self.measured.items()) if level.complete and not level.errors]
        few = [level.concurrency for level in whole if level.requests < MIN_SAMPLES]
        if few:
            notes.append(
                f"latency was not judged at concurrency {_listed(few)}: it takes {MIN_SAMPLES} requests (--requests)"
            )
        if any(level.engine is None for level in self.measured.values()):
            notes.append("memory, queue and step were not judged: give --sidecar")
        elif self.measured and not any(level.engine and level.engine.memory for level in self.measured.values()):
            notes.append("GPU memory was not judged: the sidecar reads no GPU")
        finished = self.bad is not None or (all(level in self.measured for level in self.levels) and not self._over)
        return Verdict(self._text(finished), self.good, self.bad, finished, notes)

    def _text(self, finished: bool) -> str:
        if self.bad is not None:
            upto = f"concurrency {self.good} is the last good level" if self.good else "no lower level was good"
            return f"{self.bad.line} line crossed at concurrency {self.bad.concurrency}: {self.bad.why}; {upto}"
        if finished:
            return f"no line crossed up to concurrency {self.good}"
        upto = f"good up to concurrency {self.good}" if self.good else "no level was completed"
        return f"no line crossed so far, {upto}; not all levels were measured"

    def _unsettled(self) -> bool:
        """Whether the baseline is to be measured once more."""
        apart = max(self._first) > _APART * min(self._first)
        return len(self._first) < self.baselines + (apart and self.baselines > 1)

    def _cross(self, line: str, concurrency: int, why: str) -> None:
        self.bad = Tripped(line, concurrency, why)

    def _doubled(self, last: Level, pooled: Level) -> bool:
        """Whether the latency line is crossed for sure; else `_again` asks for another pass where one is due."""
        line, p99 = self.line, pooled.latency.p99
        if line is None or p99 is None or pooled.concurrency == self.levels[0] or pooled.requests < MIN_SAMPLES:
            return False
        self._above += last.latency.p99 is not None and last.latency.p99 >= line
        if self._above == 0 or not pooled.complete:
            return False
        most = self.confirmations // 2 + 1  # of as many passes as there may be
        below = pooled.passes - self._above
        if self._above >= most and p99 >= line and pooled.passes > 1:
            return True
        if pooled.passes <= self.confirmations and below < most:
            self._again = pooled.concurrency
        return self.confirmations == 0

    def _refinable(self, bad: Tripped) -> bool:
        """Latency comes back when the load goes; memory that is taken and an engine that failed do not."""
        level = self.measured[bad.concurrency]
        failed = set(level.errors) | set(level.engine.errors if level.engine else ())
        return bad.line == "latency" or (bad.line == "errors" and failed <= _OVERLOAD)


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds == math.inf:
        return "beyond measure"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _ratio(value: float | None, base: float) -> str:
    return "-" if value is None else f"{value / base:.2f}" if value < math.inf else "infinitely many"


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))

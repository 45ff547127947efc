"""What a load test found, and the file it is kept in (JSON).

Times are seconds, sizes bytes, rates per second, shares 0 to 1. None is what nobody told; infinite, written as the
text ``inf``, is a quantile that falls among requests which failed: they never got their answer.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from exporter.load import stats
from exporter.strictyaml import ConfigError

VERSION = 1
Condition = str | int | float | bool


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request as the client saw it."""

    start: float
    """On the client's monotonic clock."""
    latency: float
    """To the last byte, or to the failure."""
    first_token: float | None = None
    inter_token: float | None = None
    """Mean time between its tokens."""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    error: str = ""
    """Kind of the failure; empty for an answer."""
    detail: str = ""

    @property
    def end(self) -> float:
        return self.start + self.latency


class Quantiles(msgspec.Struct, frozen=True):
    """Of one signal at one level."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    mean: float | None = None
    """Of the requests that got an answer."""
    p99_low: float | None = None
    p99_high: float | None = None
    """The interval that holds the true P99 with 95 % confidence; infinite above where the samples are too few."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quantiles":
        """Of *values*, among which a failed request is infinite."""
        if not values:
            return cls()
        sure = stats.interval(values, 0.99)
        finite = [v for v in values if v < math.inf]
        p50, p95, p99 = (stats.quantile(values, q) for q in (0.5, 0.95, 0.99))
        return cls(p50, p95, p99, stats.mean(finite) if finite else None, sure.low, sure.high)


class Memory(msgspec.Struct, frozen=True):
    """One GPU during a level."""

    total: float
    peak: float
    """Highest use of any sample."""
    needed: float | None = None
    """Highest use without the unused part of the KV cache that was set aside."""
    plateau: float | None = None
    """Resting use of an engine that takes its memory when it starts."""
    utilization: float | None = None
    """Mean share of the time in which a kernel ran."""


class Step(msgspec.Struct, frozen=True):
    """The engine's steps of one phase during a level."""

    count: float
    mean: float
    p50: float
    p99: float


class Engine(msgspec.Struct, frozen=True):
    """What the sidecar saw of the engine during a level; its own histograms, by their increase."""

    queue_wait: Quantiles = Quantiles()
    steps: dict[str, Step] = {}
    """By phase: prefill, decode, mixed."""
    errors: dict[str, float] = {}
    """By kind."""
    preemptions: float = 0.0
    kv_cache_usage: float | None = None
    """Highest of the polls."""
    kv_cache_full: bool = False
    """At some poll the KV cache was full while requests waited or were preempted."""
    communication_share: float | None = None
    """Of the time of the steps."""
    memory: dict[str, Memory] = {}
    """By GPU."""
    preallocates: bool | None = None


class Client(msgspec.Struct, frozen=True):
    """What the load generator itself cost."""

    cpu_share: float
    """CPU time over wall time; it has one core."""
    lag_p99: float
    """How late its event loop was."""
    limited: bool
    """It may be what was measured, and not the server."""


class Level(msgspec.Struct, frozen=True):
    """One level of concurrency, all its passes together."""

    concurrency: int
    requests: int
    """Measured, those that failed included."""
    passes: int
    seconds: float
    """That the throughput is of: while all clients were busy."""
    latency: Quantiles
    first_token: Quantiles
    inter_token: Quantiles
    requests_per_second: float | None
    tokens_per_second: float | None
    """Generated."""
    errors: dict[str, int] = {}
    """Failed requests by kind."""
    engine: Engine | None = None
    client: Client | None = None
    complete: bool = True
    """All requests were made; else it was cut short."""
    cause: str = ""
    """What grew against the baseline: the queue or the step."""
    latencies: list[float] = []
    """Of each request, a failed one infinite."""

    @property
    def throughput(self) -> float | None:
        """Tokens per second where they are known, else requests per second."""
        return self.tokens_per_second if self.tokens_per_second is not None else self.requests_per_second

    @property
    def memory_peak(self) -> float | None:
        """Of the fullest GPU."""
        return max((m.peak for m in self.engine.memory.values()), default=None) if self.engine else None


class Tripped(msgspec.Struct, frozen=True):
    """A stop line that a level crossed."""

    line: str
    """latency, errors or memory."""
    concurrency: int
    why: str


class Verdict(msgspec.Struct, frozen=True):
    """How a ramp ended."""

    text: str
    good: int | None
    """Highest level that crossed no line; None if none did."""
    tripped: Tripped | None = None
    """The first line that was crossed, at the lowest level found to cross one."""
    finished: bool = True
    """False if it was interrupted, or out of time, before a line was crossed or all levels were made."""
    notes: list[str] = []


class Run(msgspec.Struct, frozen=True):
    """One configuration of the server under load."""

    conditions: dict[str, Condition]
    """What must be alike, but for one, in runs that are compared."""
    levels: list[Level]
    baseline: int | None = None
    """The level whose P99 the latency line compares with."""
    limits: dict[str, float] = {}
    verdict: Verdict | None = None
    identity: dict[str, str] = {}
    """Of the engine as the sidecar has it: model and config, for a pin."""
    varied: str = ""
    """In a sweep: the variable that this run is one value of."""

    def level(self, concurrency: int) -> Level | None:
        return next((level for level in self.levels if level.concurrency == concurrency), None)


class File(msgspec.Struct, frozen=True):
    """A result file: one run of a ramp, several of a sweep."""

    stopline_result: int
    runs: list[Run]
    varied: list[str] = []
    """Variables of a sweep."""


def write(path: Path, file: File) -> None:
    """Replace the file at *path* at once. Raises OSError."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(msgspec.json.format(encode(file), indent=1) + b"\n")
    new.replace(path)


def encode(value: Any) -> bytes:
    """JSON, with infinity as ``inf``: JSON has none."""
    return msgspec.json.encode(_told(msgspec.to_builtins(value)))


def read(data: bytes, name: str) -> File:
    """Raises ConfigError, which calls the file *name*."""
    try:
        file = msgspec.json.decode(data, type=File, strict=False)  # not strict: infinity is a text
    except msgspec.DecodeError as error:
        raise ConfigError([f"{name}: not a result of stopline ramp: {error}"]) from None
    if file.stopline_result != VERSION:
        raise ConfigError([f"{name}: is of version {file.stopline_result}, this stopline reads version {VERSION}"])
    return file


def flaw(level: Level) -> str:
    """What cannot have been measured; empty if all can."""
    if level.concurrency < 1:
        return f"a level has concurrency {level.concurrency}, and must have 1 or more"
    for name, value in msgspec.to_builtins(level).items():
        if any(not number >= 0 for number in _numbers(value)):
            return f"{name} at concurrency {level.concurrency} holds a number that is negative or none (NaN)"
    return ""


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _numbers(inner)


def _told(value: Any) -> Any:
    if isinstance(value, float):
        return "inf" if value == math.inf else value
    if isinstance(value, dict):
        return {key: _told(inner) for key, inner in value.items()}
    return [_told(inner) for inner in value] if isinstance(value, list) else value

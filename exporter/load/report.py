"""A run as a table and a few sentences."""

import math
from collections.abc import Callable, Iterator, Sequence

from exporter.load import stats, table
from exporter.load.result import Level, Run

HEADER = (
    *("concurrency", "requests", "P50", "P95", "P99", "P99 between", "first token P99", "between tokens P50"),
    *("req/s", "tok/s", "queue P99", "prefill P50", "decode P50", "memory peak", "errors", "why"),
)

Layout = Callable[[Sequence[str], Sequence[Sequence[str]]], list[str]]


def row(level: Level) -> tuple[str, ...]:
    """The cells of *level* under HEADER."""
    engine, latency = level.engine, level.latency
    return (
        str(level.concurrency) + ("" if level.complete else " (cut)"),
        str(level.requests),
        *map(table.time, (latency.p50, latency.p95, latency.p99)),
        between(level),
        table.time(level.first_token.p99),
        table.time(level.inter_token.p50),
        table.number(level.requests_per_second, 2),
        table.number(level.tokens_per_second),
        table.time(engine.queue_wait.p99 if engine else None),
        step(level, "prefill"),
        step(level, "decode"),
        table.size(level.memory_peak),
        table.counts(level.errors),
        level.cause,
    )


def between(level: Level) -> str:
    """The interval that holds the true P99 with 95 % confidence."""
    low, high = level.latency.p99_low, level.latency.p99_high
    if low is None or high is None:
        return table.UNKNOWN
    return f"over {table.time(low)}" if high == math.inf else f"{table.time(low)} to {table.time(high)}"


def step(level: Level, phase: str) -> str:
    """The typical step of this phase; where the engine does not tell the two apart, that of both."""
    steps = level.engine.steps if level.engine else {}
    found = steps.get(phase) or steps.get("mixed")
    return table.time(found.p50 if found else None)


def ramp(run: Run, layout: Layout = table.text) -> Iterator[str]:
    """The table of a ramp, then its verdict."""
    yield from layout(HEADER, [row(level) for level in run.levels])
    if run.verdict is None:
        return
    yield ""
    yield f"verdict: {run.verdict.text}"
    for note in run.verdict.notes:
        yield f"note: {note}"
    short = [level for level in run.levels if level.latency.p99_high == math.inf and not level.errors]
    if short:
        yield (
            f"note: {short[0].requests} requests bound P99 from below only; "
            f"from {stats.enough(0.99)} a level on its interval has two ends (--requests)"
        )
    if any(level.errors for level in run.levels):
        yield "note: a failed request counts as infinitely slow in the quantiles, and not in the throughput"
    costs = [level.client for level in run.levels if level.client is not None]
    if costs:
        yield (
            f"client: closed loop; at most {max(c.cpu_share for c in costs):.0%} of a core, "
            f"its event loop late by {table.time(max(c.lag_p99 for c in costs))} at P99"
        )

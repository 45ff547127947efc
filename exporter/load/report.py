"""A run, a comparison or a sweep as a table and a few sentences."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from exporter.load import stats, table
from exporter.load.compare import Comparison, Step, filled, in_tokens, stepped
from exporter.load.result import File, Level, Run
from exporter.load.sweep import CONCURRENCY

LEVELS = (
    *("concurrency", "requests", "P50", "P95", "P99", "P99 between", "first token P99", "between tokens P50"),
    *("req/s", "tok/s", "queue P99", "prefill P50", "decode P50", "memory peak", "errors", "why"),
)

Layout = Callable[[Sequence[str], Sequence[Sequence[str]]], list[str]]


def row(level: Level) -> tuple[str, ...]:
    """The cells of *level* under LEVELS."""
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
        step_time(level, "prefill"),
        step_time(level, "decode"),
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


def step_time(level: Level, phase: str) -> str:
    """The typical step of this phase; where the engine does not tell the two apart, that of both."""
    steps = level.engine.steps if level.engine else {}
    found = steps.get(phase) or steps.get("mixed")
    return table.time(found.p50 if found else None)


def ramp(run: Run, layout: Layout = table.text) -> Iterator[str]:
    """The table of a ramp, then its verdict."""
    yield from layout(LEVELS, [row(level) for level in run.levels])
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


STEPS = (
    *("step", "{variable}", "concurrency", "T", "ΔT", "P50", "P95", "P99", "ΔP99", "memory per GPU", "needed"),
    *("GPU utilization", "prefill P50", "decode P50", "communication", "queue P99", "errors", "why"),
)


def _tabled(variable: str, steps: Sequence[Step], layout: Layout) -> list[str]:
    """All steps as a table; the concurrency has one column, also where it is the variable."""
    header = [variable if cell == "{variable}" else cell for cell in STEPS]
    lines = [header, *map(list, _rows(steps))]
    if variable == CONCURRENCY:
        for line in lines:
            del line[1]
    return layout(lines[0], lines[1:])


def _rows(steps: Sequence[Step]) -> Iterator[tuple[str, ...]]:
    """The cells of each step under STEPS."""
    tokens = in_tokens(*(step.level for step in steps))
    for number, step in enumerate(steps):
        level, engine = step.level, step.level.engine
        full, loads = filled(level), _utilization(level)
        yield (
            "baseline" if number == 0 else str(number + 1),
            step.value,
            str(level.concurrency),
            _throughput(level, tokens),
            table.change(step.gain),
            *map(table.time, (level.latency.p50, level.latency.p95, level.latency.p99)),
            table.change(step.tail) + ("" if step.certain or step.tail is None else " (in the noise)"),
            table.size(level.memory_peak),
            table.share(full),
            table.share(loads),
            step_time(level, "prefill"),
            step_time(level, "decode"),
            table.share(engine.communication_share if engine else None),
            table.time(engine.queue_wait.p99 if engine else None),
            table.counts(level.errors),
            level.cause,
        )


def _throughput(level: Level, tokens: bool) -> str:
    value = level.tokens_per_second if tokens else level.requests_per_second
    return table.UNKNOWN if value is None else f"{value:.{1 if tokens else 2}f} {'tok/s' if tokens else 'req/s'}"


def _utilization(level: Level) -> float | None:
    loads = [m.utilization for m in level.engine.memory.values() if m.utilization is not None] if level.engine else []
    return sum(loads) / len(loads) if loads else None


def comparison(found: Comparison, layout: Layout) -> Iterator[str]:
    """The table, each pair of steps in the form of the record, and the verdict."""
    yield from _tabled(found.variable, found.steps, layout)
    for before, after in itertools.pairwise(found.steps):
        yield ""
        yield from _pair(found.variable, before, after)
    yield ""
    yield f"verdict: {found.verdict}"
    if found.untold:
        yield f"note: not told by every result, so not compared: {', '.join(found.untold)}"


def _pair(variable: str, before: Step, after: Step) -> Iterator[str]:
    a, b = before.level, after.level
    tokens = in_tokens(a, b)
    yield f"{variable} {before.value} -> {after.value}:"
    rates = f"{_throughput(a, tokens)} -> {_throughput(b, tokens)}"
    yield f"  throughput  {rates}, ΔT {table.change(after.gain)}"
    noise = "" if after.certain else ": its interval reaches down to the other, so this may be noise"
    yield (
        f"  P99         {table.time(a.latency.p99)} -> {table.time(b.latency.p99)}, "
        f"ΔP99 {table.change(after.tail)}{noise}"
    )
    yield f"  memory      {table.size(a.memory_peak)} -> {table.size(b.memory_peak)} on the fullest GPU"


def sweep(file: File, layout: Layout) -> Iterator[str]:
    """The tables of a sweep, one for each variable."""
    for variable in file.varied:
        of_it = [run for run in file.runs if run.varied == variable]
        steps: list[Step] = []
        for run in of_it:
            level = run.levels[0]
            value = str(level.concurrency) if variable == CONCURRENCY else str(run.conditions[variable])
            steps.append(stepped(value, level, steps[-1].level if steps else None))
        yield from _tabled(variable, steps, layout)
        yield ""

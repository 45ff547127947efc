"""The curve as a picture (SVG): P99 and throughput over the steps, with the line that was crossed."""

import math
from collections.abc import Iterator, Sequence
from html import escape

from exporter.load import table
from exporter.load.compare import Comparison
from exporter.load.result import Level, Run

_WIDTH, _HEIGHT = 640, 240  # of one panel
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 34, 34
_TICKS = 4
_STYLE = (
    "text{font:12px sans-serif;fill:#444}.title{font-weight:bold}.grid{stroke:#ddd}"
    ".curve{fill:none;stroke:#1769aa;stroke-width:2}.dot{fill:#1769aa}.bad{fill:#c62828}"
    ".line{stroke:#c62828;stroke-dasharray:6 4}.band{stroke:#1769aa;stroke-opacity:.35;stroke-width:6}"
)


def of_ramp(run: Run) -> str:
    """P99 and throughput by concurrency."""
    verdict = run.verdict
    crossed = verdict.tripped.concurrency if verdict is not None and verdict.tripped is not None else math.inf
    line = run.limits.get("latency_seconds")
    names = [str(level.concurrency) for level in run.levels]
    bad = [level.concurrency >= crossed for level in run.levels]
    return _picture(names, run.levels, bad, "concurrency", line)


def of_comparison(comparison: Comparison) -> str:
    """P99 and throughput by the variable; the steps not to take are red."""
    names = [step.value for step in comparison.steps]
    stay = names.index(comparison.stay) if comparison.stay is not None else len(names)
    levels = [step.level for step in comparison.steps]
    return _picture(names, levels, [n > stay for n in range(len(names))], comparison.variable, None)


def _picture(names: Sequence[str], levels: Sequence[Level], bad: Sequence[bool], axis: str, line: float | None) -> str:
    latencies = [level.latency.p99 for level in levels]
    bands = [(level.latency.p99_low, level.latency.p99_high) for level in levels]
    unit = "tokens/s" if any(level.tokens_per_second is not None for level in levels) else "requests/s"
    rates = [level.throughput for level in levels]
    body = [
        *_panel("P99 in seconds", names, latencies, bad, axis, 0, line=line, bands=bands),
        *_panel(f"throughput in {unit}", names, rates, bad, axis, _HEIGHT),
    ]
    size = f'width="{_WIDTH}" height="{2 * _HEIGHT}" viewBox="0 0 {_WIDTH} {2 * _HEIGHT}"'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<style>{_STYLE}</style>", *body, "</svg>", ""]
    )


def _panel(
    title: str,
    names: Sequence[str],
    values: Sequence[float | None],
    bad: Sequence[bool],
    axis: str,
    top: int,
    *,
    line: float | None = None,
    bands: Sequence[tuple[float | None, float | None]] = (),
) -> Iterator[str]:
    known = [v for v in (*values, line, *(x for b in bands for x in b)) if v is not None and math.isfinite(v)]
    most = _round(1.05 * max(known, default=1.0) or 1.0)
    low, high = top + _HEIGHT - _BOTTOM, top + _TOP
    step = (_WIDTH - _LEFT - _RIGHT) / max(len(names), 1)

    def x(n: int) -> float:
        return _LEFT + step * (n + 0.5)

    def y(value: float) -> float:
        return low - (low - high) * min(value, most) / most

    yield f'<text class="title" x="{_LEFT}" y="{top + 20}">{escape(title)}</text>'
    if all(value is None for value in values):
        yield f'<text x="{_WIDTH / 2:g}" y="{top + _HEIGHT / 2:g}" text-anchor="middle">nothing was measured</text>'
        return
    for n in range(_TICKS + 1):
        tick = most * n / _TICKS
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        yield f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>'
    for n, name in enumerate(names):
        yield f'<text x="{x(n):.1f}" y="{low + 16}" text-anchor="middle">{escape(name)}</text>'
    yield f'<text x="{_WIDTH - _RIGHT}" y="{low + 30}" text-anchor="end">{escape(axis)}</text>'
    for n, (lower, upper) in enumerate(bands):
        if lower is not None and upper is not None and upper < math.inf:
            yield f'<line class="band" x1="{x(n):.1f}" x2="{x(n):.1f}" y1="{y(lower):.1f}" y2="{y(upper):.1f}"/>'
    if line is not None:
        yield f'<line class="line" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(line):.1f}" y2="{y(line):.1f}"/>'
        yield f'<text x="{_LEFT + 4}" y="{y(line) - 5:.1f}">stop line {table.time(line)}</text>'
    points = [(x(n), y(v)) for n, v in enumerate(values) if v is not None]
    yield f'<polyline class="curve" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in points)}"/>'
    for n, value in enumerate(values):
        if value is not None:
            yield f'<circle class="{"bad" if bad[n] else "dot"}" cx="{x(n):.1f}" cy="{y(value):.1f}" r="4"/>'


def _round(most: float) -> float:
    """At least *most*, so that the ticks are round numbers."""
    unit = 10.0 ** math.floor(math.log10(most / _TICKS))
    return next(_TICKS * unit * n for n in (1, 2, 2.5, 5, 10) if _TICKS * unit * n >= most * (1 - 1e-9))

"""The pictures of the live page: SVG with a text beside each, coloured by classes of the style sheet alone.

No attribute ``style`` is used, so the Content-Security-Policy need not allow any. Every picture says in its label
what it shows; what is not known is hatched.
"""

import math
from collections.abc import Callable, Iterator, Sequence

from exporter.live.markup import Html, tag

WIDTH, HEIGHT = 400.0, 190.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 8.0, 14.0, 26.0

Values = Sequence[float | None]


def icon(state: str) -> Html:
    """A shape for each state, so that colour is never the only sign."""
    shapes = {
        "ok": tag("circle", cx=12, cy=12, r=10, class_="shape")
        + tag("path", d="M7 12.5l3.5 3.5L17 8.5", class_="mark"),
        "rising": tag("path", d="M12 2L23 21H1z", class_="shape")
        + tag("path", d="M12 8.5v6M12 17.6v.1", class_="mark"),
        "tripped": tag("path", d="M7.5 1.5h9l6 6v9l-6 6h-9l-6-6v-9z", class_="shape")
        + tag("path", d="M12 6v7.5M12 17.6v.1", class_="mark"),
        "unknown": tag("circle", cx=12, cy=12, r=10, class_="shape")
        + tag("path", d="M9 9.5a3 3 0 1 1 4.6 2.5c-1 .7-1.6 1.2-1.6 2.3M12 17.6v.1", class_="mark"),
    }
    return tag("svg", Html(shapes[state]), viewbox="0 0 24 24", class_="icon", aria_hidden="true")


def hatching() -> Html:
    """The patterns that other pictures refer to; once on the page."""
    patterns = [
        tag(
            "pattern",
            tag("path", d="M0 8L8 0M-2 2L2 -2M6 10L10 6", class_=f"stroke-{name}"),
            id=f"hatch-{name}",
            width=8,
            height=8,
            patternunits="userSpaceOnUse",
        )
        for name in ("unknown", "kv")
    ]
    return tag("svg", tag("defs", *patterns), width=0, height=0, class_="defs", aria_hidden="true")


def gauge(value: float, line: float, warning: float | None, top: float, labels: tuple[str, str], label: str) -> Html:
    """Where *value* is on a scale from 0 to *top*, before and beyond the *line*; *labels* are of 0 and of it."""
    width, y, height = 300.0, 6.0, 16.0
    at = [min(1.0, max(0.0, x / top)) * width for x in (value, line, warning if warning is not None else line)]
    far = at[1] > width / 2
    parts = [
        tag("rect", x=0, y=y, width=at[2], height=height, class_="zone-ok"),
        tag("rect", x=at[2], y=y, width=at[1] - at[2], height=height, class_="zone-rising"),
        tag("rect", x=at[1], y=y, width=width - at[1], height=height, class_="zone-tripped"),
        tag("rect", x=0, y=y + 4, width=at[0], height=height - 8, class_="fill"),
        tag("path", d=f"M{at[1]:.1f} {y - 5}v{height + 10}", class_="limit"),
        tag("path", d=f"M{min(at[0], width - 3):.1f} {y - 3}v{height + 6}", class_="needle"),
        tag("text", labels[0], x=0, y=42, class_="axis"),
        tag("text", labels[1], x=at[1] if far else max(at[1], 60.0), y=42, class_="axis end" if far else "axis"),
    ]
    return tag("svg", *parts, viewbox=f"0 0 {width:g} 46", role="img", aria_label=label, class_="gauge")


def bars(ago: Sequence[float], values: Sequence[float], step: float, span: float, label: str) -> Html:
    """One bar for each *step* of the last *span* seconds that has a value; hatched is what is not known."""
    width, height = 300.0, 26.0
    top = max([*values, 1.0])

    def x(seconds: float) -> float:
        return (1 - min(1.0, seconds / span)) * width

    known = x(ago[0] + step) if ago else width
    drawn = [tag("rect", x=0, y=4, width=known, height=height - 4, class_="gap")]
    for seconds, value in zip(ago, values, strict=True):
        if value:
            tall = max(5.0, value / top * height)
            wide = max(3.0, step / span * width - 1)
            drawn.append(
                tag("rect", x=max(0.0, x(seconds) - wide), y=height - tall, width=wide, height=tall, class_="error")
            )
    axis = tag("path", d=f"M0 {height}h{width:g}", class_="grid")
    ends = [tag("text", "15 min ago", x=0, y=42, class_="axis"), tag("text", "now", x=width, y=42, class_="axis end")]
    return tag("svg", *drawn, axis, *ends, viewbox=f"0 0 {width:g} 46", role="img", aria_label=label, class_="gauge")


def stack(parts: Sequence[tuple[str, float]], total: float, marks: Sequence[tuple[str, float]], label: str) -> Html:
    """*parts* side by side over the width that *total* has, *marks* as lines across; both are class and amount."""
    drawn, at = [], 0.0
    for name, amount in parts:
        drawn.append(
            tag("rect", x=at / total * WIDTH, y=5, width=amount / total * WIDTH, height=20, class_=f"part {name}")
        )
        if name == "kv_free":
            drawn.append(
                tag("rect", x=at / total * WIDTH, y=5, width=amount / total * WIDTH, height=20, class_="hatch-kv")
            )
        at += amount
    drawn += [tag("path", d=f"M{min(amount / total, 1) * WIDTH:.2f} 0v30", class_=name) for name, amount in marks]
    frame = tag("rect", x=0, y=5, width=WIDTH, height=20, class_="frame")
    return tag(
        "svg",
        *drawn,
        frame,
        viewbox=f"0 0 {WIDTH:g} 30",
        preserveaspectratio="none",
        role="img",
        aria_label=label,
        class_="stack",
    )


def lines(
    ago: Sequence[float],
    series: Sequence[tuple[str, Values]],
    level: tuple[str, float] | None,
    span: float,
    unit: Callable[[float], str],
    label: str,
) -> Html:
    """Values over the last *span* seconds; *series* are class and values, *level* a horizontal line with its name."""
    known = [value for _, values in series for value in values if value is not None]
    if not known:
        return _nothing(label)
    top = nice(max([*known, level[1]] if level and level[1] < 3 * max(known) else known))

    def x(seconds: float) -> float:
        return _LEFT + (1 - min(1.0, seconds / span)) * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - min(1.0, value / top) * (HEIGHT - _TOP - _BOTTOM)

    drawn = [*_grid(top, y, unit), *_gaps(ago, [values for _, values in series], x, span)]
    if level and level[1] <= top:
        drawn.append(tag("path", d=f"M{_LEFT} {y(level[1]):.1f}H{WIDTH - _RIGHT}", class_="level"))
        drawn.append(tag("text", level[0], x=_LEFT + 4, y=y(level[1]) - 4, class_="axis"))
    for name, values in series:
        points = [(x(s), y(v)) if v is not None else None for s, v in zip(ago, values, strict=True)]
        drawn.append(tag("path", d=_path(points), class_=f"line {name}"))
    drawn.append(tag("text", f"{span / 60:.0f} min ago", x=_LEFT, y=HEIGHT - 8, class_="axis"))
    drawn.append(tag("text", "now", x=WIDTH - _RIGHT, y=HEIGHT - 8, class_="axis end"))
    return _chart(drawn, label)


def curve(
    names: Sequence[str],
    latency: Values,
    throughput: Values,
    solid: Sequence[bool],
    line: float | None,
    first_over: str,
    unit: Callable[[float], str],
    label: str,
) -> Html:
    """Latency as points on a line over throughput as bars, by level; *solid* are the levels that count."""
    known = [value for value in latency if value is not None]
    if not known:
        return _nothing(label)
    top = nice(max([*known, line * 1.1] if line else known))
    most = max([value for value in throughput if value is not None], default=0.0) or 1.0
    wide = (WIDTH - _LEFT - _RIGHT) / len(names)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - min(1.0, value / top) * (HEIGHT - _TOP - _BOTTOM)

    drawn = list(_grid(top, y, unit))
    for n, value in enumerate(throughput):
        if value:
            tall = value / most * 0.8 * (HEIGHT - _TOP - _BOTTOM)
            drawn.append(
                tag(
                    "rect",
                    x=_LEFT + (n + 0.2) * wide,
                    y=HEIGHT - _BOTTOM - tall,
                    width=0.6 * wide,
                    height=tall,
                    class_="throughput",
                )
            )
    if line is not None:
        drawn.append(tag("path", d=f"M{_LEFT} {y(line):.1f}H{WIDTH - _RIGHT}", class_="limit"))
        drawn.append(tag("text", "line", x=_LEFT + 4, y=y(line) - 4, class_="axis"))
    points = [(_LEFT + (n + 0.5) * wide, y(v)) if v is not None else None for n, v in enumerate(latency)]
    drawn.append(tag("path", d=_path(points), class_="line p99"))
    for name, point, counts in zip(names, points, solid, strict=True):
        if point is not None:
            over = " over" if name == first_over else ""
            drawn.append(
                tag(
                    "circle",
                    cx=point[0],
                    cy=point[1],
                    r=5 if over else 4,
                    class_=f"dot{'' if counts else ' few'}{over}",
                )
            )
    for n, name in enumerate(names):
        drawn.append(
            tag(
                "text",
                {"1024": "1k", "inf": ">1k"}.get(name, name),
                x=_LEFT + (n + 0.5) * wide,
                y=HEIGHT - 8,
                class_="axis middle",
            )
        )
    return _chart(drawn, label)


def nice(value: float) -> float:
    """The next number of 1, 2 or 5 times a power of ten at or above *value*."""
    power = 10 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next((times * power for times in (1, 2, 5) if value <= times * power * (1 + 1e-9)), 10 * power)


# within


def _chart(drawn: Sequence[Html], label: str) -> Html:
    return tag("svg", *drawn, viewbox=f"0 0 {WIDTH:g} {HEIGHT:g}", role="img", aria_label=label, class_="chart")


def _nothing(label: str) -> Html:
    middle = tag("text", "nothing was seen", x=WIDTH / 2, y=HEIGHT / 2 + 5, class_="axis middle plain")
    return _chart([tag("rect", x=0, y=0, width=WIDTH, height=HEIGHT, class_="gap"), middle], label)


def _grid(top: float, y: Callable[[float], float], unit: Callable[[float], str]) -> Iterator[Html]:
    for value in (0.0, top / 2, top):
        yield tag("path", d=f"M{_LEFT} {y(value):.1f}H{WIDTH - _RIGHT}", class_="grid")
        yield tag("text", unit(value) if value else "0", x=_LEFT - 6, y=y(value) + 4, class_="axis end")


def _gaps(
    ago: Sequence[float], all_values: Sequence[Values], x: Callable[[float], float], span: float
) -> Iterator[Html]:
    """Hatched where no series has a value."""

    def gap(older: float, newer: float) -> Html:
        return tag("rect", x=x(older), y=_TOP, width=x(newer) - x(older), height=HEIGHT - _TOP - _BOTTOM, class_="gap")

    edge = span
    for n, seconds in enumerate(ago):
        if any(values[n] is not None for values in all_values):
            if edge - seconds > 0 and (n == 0 or all(values[n - 1] is None for values in all_values)):
                yield gap(edge, seconds)
            edge = seconds
    if edge > (ago[-1] if ago else 0.0):
        yield gap(edge, 0.0)


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    """Broken where there is no point; a single one becomes a dot by its round end."""
    written, pen = [], False
    for point in points:
        if point is not None:
            written.append(f"{'L' if pen else 'M'}{point[0]:.1f} {point[1]:.1f}{'' if pen else 'h.01'}")
        pen = point is not None
    return "".join(written)

"""Capacity: how much concurrency a configuration carries, and whether another layout would carry more."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from . import board as boards
from .panels import (
    BLUE,
    GREEN,
    RED,
    Shown,
    cells,
    color,
    colored,
    gauge_column,
    joined,
    levels,
    limit,
    line,
    lines,
    query,
    right,
    row,
    shares,
)
from .promql import MODEL, RATE, SELECTED, matching, of, of_model

UID = boards.CAPACITY
_CONFIG = 'config=~"$config"'
_LEARNING = "cannot be judged: no level of concurrency has had 100 requests within a day"
_KNEE = 0.9
"""Share of the best throughput from which on more concurrency buys next to nothing."""


def board() -> Dashboard:
    made = boards.begin(
        UID,
        "The capacity curve of production traffic: P99 and throughput at each level of concurrency, for each "
        "configuration: where throughput stops growing (the knee), and the highest level under the latency line (the "
        "limit). Of the last day.",
        since="now-6h",
        refresh="1m",
    )
    made = made.with_variable(
        boards.listed(
            "config",
            "Configuration",
            'label_values(stopline:throughput:by_concurrency{model=~"$model"}, config)',
        )
    )
    made = made.with_row(row("What each configuration carries"))
    made = made.with_panel(_verdict())
    made = made.with_row(row("By concurrency: configurations beside each other"))
    for panel in (_latency(), _throughput(), _table()):
        made = made.with_panel(panel)
    made = made.with_row(row("Where production is now"))
    for panel in (_where(), _limits(), _served()):
        made = made.with_panel(panel)
    return made


def _of(name: str) -> str:
    """Of the configurations that the selected replicas have run within the curve's day, also those they run no more."""
    ran = f"max_over_time({matching('stopline:config:info', SELECTED)}[1d:5m] @ end())"
    return f"({matching(name, MODEL, _CONFIG)} and on (config) {ran})"


def _throughput_of_levels() -> str:
    """Of the levels that had enough requests for a P99, so that bars and their best are of the same ones."""
    return f"({_of('stopline:throughput:by_concurrency')} and on (model, config, concurrency) {_of('stopline:concurrency:level')})"


def _named(expression: str) -> str:
    """With a label `name`: how the model is split, and the short hash of the whole configuration."""
    layout = matching("stopline:config:layout")
    laid = f'label_join({expression} * on (config) group_left (layout) {layout}, "name", " ", "layout", "config")'
    bare = f'label_replace({expression} unless on (config) {layout}, "name", "$1", "config", "(.*)")'
    return f"({laid} or {bare})"


def _numbered(expression: str) -> str:
    """The level above 1024 as a number, so that levels have an order."""
    return f'label_replace({expression}, "concurrency", "2048", "concurrency", "inf")'


def _knee() -> str:
    best = f"max by (model, config) ({_throughput_of_levels()})"
    near = f"{_throughput_of_levels()} >= on (model, config) group_left () {_KNEE} * {best}"
    reached = (
        f"min by (model, config) ({_of('stopline:concurrency:level')} and on (model, config, concurrency) ({near}))"
    )
    return f"{reached} < max by (model, config) ({_of('stopline:concurrency:level')})"


def _verdict() -> Shown:
    asked = {
        "limit": _of("stopline:concurrency_limit"),
        "knee": _knee(),
        "best throughput": f"max by (model, config) ({_throughput_of_levels()})",
        "baseline": _of("stopline:request_latency_seconds:p99_baseline"),
        "line": f"max by (model, config) ({_of('stopline:concurrency:line')})",
        "first over": _of("stopline:concurrency:first_over"),
        "calm requests": _of("stopline:request_latency_seconds:baseline_samples"),
    }
    by = "max by (model, config)"
    panel = joined(
        "Limit and knee",
        "Limit: the highest level of concurrency whose P99 is under the latency line. Knee: the lowest level with 90 % "
        "of the best throughput, where there are levels beyond it: there more concurrency only costs latency. Run at the "
        "lower of the two.",
        _named(f"group by (model, config) ({_of('stopline:throughput:by_concurrency')})"),
        [("layout", "layout"), ("model", "model"), ("config", "configuration")],
        {head: f"{by} ({each})" for head, each in asked.items()},
        empty=_LEARNING,
        height=5,
        sort="best throughput",
    ).decimals(0)
    panel = (
        panel.override_by_name("limit", colored(GREEN))
        .override_by_name("knee", colored(BLUE))
        .override_by_name("best throughput", cells("suffix: tok/s", decimals=0, optional=True))
    )
    for name in ("baseline", "line"):
        panel = panel.override_by_name(name, cells("s", decimals=2, optional=True))
    for name, width in (("limit", 90), ("knee", 90), ("first over", 110), ("calm requests", 130)):
        panel = panel.override_by_name(name, cells(optional=True, width=width))
    return panel.override_by_name("layout", cells(optional=True, width=130))


def _latency() -> Shown:
    return levels(
        "P99 by concurrency",
        "P99 of the requests that had so many in the engine, of the last day; levels with 100 requests or more. Where it "
        "turns up steeply, requests queue.",
        query(
            _numbered(
                _named(
                    f"max by (model, config, concurrency) ({_of('stopline:request_latency_seconds:p99_by_concurrency')})"
                )
            ),
            rows=True,
        ),
        unit="s",
        empty=_LEARNING,
        columns="name",
    )


def _throughput() -> Shown:
    return levels(
        "Throughput by concurrency",
        "Tokens of answers a second while the engine held so many requests, of the last day; levels with 100 requests or "
        "more. Where doubling the concurrency adds little, the knee is passed.",
        query(
            _numbered(_named(f"max by (model, config, concurrency) ({_throughput_of_levels()})")),
            rows=True,
        ),
        unit="suffix: tok/s",
        empty=_LEARNING,
        columns="name",
    ).decimals(0)


def _table() -> Shown:
    asked = {
        "P99": _of("stopline:request_latency_seconds:p99_by_concurrency"),
        "throughput": _throughput_of_levels(),
        "of the line": f"{_of('stopline:request_latency_seconds:p99_by_concurrency')} / on (model, config) group_left () {_of('stopline:concurrency:line')}",
        "of the best": f"{_throughput_of_levels()} / on (model, config) group_left () max by (model, config) ({_throughput_of_levels()})",
    }
    by = "max by (model, config, concurrency)"
    level = _of("stopline:concurrency:level")
    panel = joined(
        "Level by level",
        "The same as numbers: P99 as a share of the latency line, and throughput as a share of the best.",
        _named(f"{by} ({level})"),
        [("layout", "layout"), ("config", "configuration"), ("Value #A", "concurrency")],
        {head: f"{by} ({each}) and on (model, config, concurrency) {level}" for head, each in asked.items()},
        empty=_LEARNING,
        height=10,
        sort="concurrency",
        descending=False,
    )
    for name in ("layout", "concurrency"):
        panel = panel.override_by_name(name, cells(optional=True))
    panel = panel.override_by_name("of the line", shares(0.75, 1, 150))
    panel = panel.override_by_name(
        "of the best", [*cells("percentunit", decimals=0, optional=True), *gauge_column(BLUE)]
    )
    panel = panel.override_by_name("P99", cells("s", decimals=2, optional=True))
    return panel.override_by_name("throughput", cells("suffix: tok/s", decimals=0, optional=True))


def _where() -> Shown:
    limits = f"min({matching('stopline:concurrency_limit', MODEL)} and on (config) {of('stopline:config:info')})"
    return (
        lines(
            "Concurrency now, against the limit",
            "Requests in the engine, running and waiting, of the busiest selected replica, and the lowest limit of the "
            "configurations they run.",
            query(f"max({of('stopline:requests_in_engine:sum')})", "busiest replica"),
            query(f"avg({of('stopline:requests_in_engine:sum')})", "mean replica"),
            query(limits, "limit"),
            unit="short",
            empty="cannot be judged: the engine tells no running requests",
            fill=10,
        )
        .override_by_name("busiest replica", [color(BLUE)])
        .override_by_name("mean replica", line("#8ab8ff"))
        .override_by_name("limit", limit())
    )


def _limits() -> Shown:
    return lines(
        "Limit over time",
        "The highest level under the latency line, for each configuration, as traffic of the last day told it.",
        query(_named(f"max by (model, config) ({_of('stopline:concurrency_limit')})"), "{{name}}"),
        unit="short",
        empty=_LEARNING,
        fill=0,
    )


def _served() -> Shown:
    return (
        lines(
            "Throughput and P99 now",
            "Tokens of answers a second over all selected replicas, and P99 of the worst of them on the right.",
            query(f"sum(rate({of_model('stopline_tokens_total', window=RATE, kind='generation')}))", "tokens"),
            query(f"max({of_model('stopline:request_latency_seconds:p99_5m')})", "P99"),
            unit="suffix: tok/s",
            empty="cannot be judged: no tokens are told",
        )
        .override_by_name("tokens", [color(BLUE)])
        .override_by_name("P99", [*line(RED), *right("s", "P99", min=0)])
    )

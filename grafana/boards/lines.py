"""Stop lines: is a server over one of its three lines, by how much, why, and which lines are not judged at all."""

from grafana_foundation_sdk.builders import common as parts
from grafana_foundation_sdk.builders.dashboard import Dashboard
from grafana_foundation_sdk.models import common

from . import board as boards
from . import reasons, sidecars
from .panels import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    RED,
    STATES,
    UNJUDGED,
    Shown,
    cells,
    color,
    from_value,
    joined,
    limit,
    line,
    lines,
    query,
    right,
    row,
    rows,
    shares,
    states,
    values,
    words_column,
)
from .promql import (
    MODEL,
    REPLICA,
    alive,
    labelled,
    matching,
    of,
    of_model,
    replica,
    threshold,
    worst,
)

UID = boards.LINES
_INPUTS = "StoplineSidecarDown|StoplineEngineUnreachable|StoplineLogSilent|StoplineGpuUnreadable|StoplineBaselineMissing|StoplineInputMissing"
_LINES = {
    "latency": ("Latency", "P99 against twice the baseline"),
    "errors": ("Errors", "errors rise from zero"),
    "memory": ("Memory", "a GPU or the KV cache nears its limit"),
}
_P99 = reasons.P99
_LINE = "stopline:request_latency_seconds:line"
_CRITICAL, _WARNING = (of_model(_LINE, severity=severity) for severity in ("critical", "warning"))
_BASELINE = of_model("stopline:request_latency_seconds:p99_baseline_by_replica")
_SHARE = f"{of_model(_P99)} / on ({REPLICA}, model) {_CRITICAL}"
_OF_THE_WORST = f"and on ({REPLICA}, model) topk(1, {_SHARE})"
_FREE = alive(of("stopline:gpu_memory_headroom_bytes"))
_WATCHED = f"({of('stopline:judged', line='errors')} == 1)"


def board() -> Dashboard:
    made = boards.begin(
        UID,
        "Whether the selected replicas are over one of the three stop lines: latency, errors, memory; from the fleet "
        "down to one pod. Where a line is not judged, it says so and is never green.",
    )
    made = made.with_row(row("Now: green is calm, amber a warning, red over the line, purple not judged"))
    for name, (title, what) in _LINES.items():
        about = (
            f"State of this line ({what}) on the worst of the selected replicas, as the alert rules have it. Purple: the "
            "line is not judged, or not in full, on some replica and tripped on none; see the table below."
        )
        made = made.with_panel(boards.state(name, title, about))
    for why in (reasons.latency, reasons.errors, reasons.memory):
        made = made.with_panel(why(width=8, height=4, most=2))
    for panel in (_latency(), _errors(), _memory()):
        made = made.with_panel(panel)
    for panel in (_latency_over_time(), _errors_over_time(), _memory_over_time()):
        made = made.with_panel(panel)
    made = made.with_row(row("What fires, and what cannot be judged"))
    made = made.with_panel(_firing()).with_panel(_blind())
    made = made.with_row(row("Replicas"))
    made = made.with_panel(_replicas()).with_panel(_history())
    made = made.with_row(row("The sidecars themselves"))
    for panel in sidecars.panels():
        made = made.with_panel(panel)
    return made


# the three lines


def _latency() -> Shown:
    source = matching("stopline:request_latency_seconds:baseline_source", MODEL)
    since = matching("stopline:request_latency_seconds:baseline_since_timestamp_seconds", MODEL)
    age = (
        f"0 * {_BASELINE} + on (model, config) group_left (source) "
        f"((time() - {since}) * on (model, config) group_left (source) {source})"
    )
    return (
        values(
            "Latency: P99, its baseline and its line",
            "Of the replica that is nearest to its line: P99 of the last five minutes, the baseline (its own P99 at low "
            "concurrency), the line, and how old a learned baseline is.",
            query(f"({of_model(_P99)} {_OF_THE_WORST}) or on () topk(1, {of_model(_P99)})", "P99 now", instant=True),
            query(
                f"{_BASELINE} {_OF_THE_WORST}",
                "baseline",
                instant=True,
            ),
            query(f"{_CRITICAL} {_OF_THE_WORST}", "line", instant=True),
            query(
                f"{age} {_OF_THE_WORST}",
                "{{source}} for",
                instant=True,
            ),
            unit="s",
            empty="cannot be judged: the engine is down, no request was measured, or there is no baseline yet",
        )
        .decimals(2)
        .override_by_name("baseline", [color(GREY)])
        .override_by_name("line", [color(GREY)])
        .override_by_regexp("/.* for/", cells("s", decimals=0))
    )


def _errors() -> Shown:
    return (
        values(
            "Errors: how many, of what share",
            "Errors of the last five minutes on all selected replicas; the highest share of failed requests of one of "
            "them; the line for that share (the strictest setting); and how long ago the last error was.",
            query(f"sum({of('stopline:errors:recent')} or on ({REPLICA}) 0 * {_WATCHED})", "in 5 min", instant=True),
            query(f"max({of('stopline:errors:ratio5m')})", "failed", instant=True),
            query(threshold("error_ratio", of("stopline:errors:ratio5m")), "line", instant=True),
            query(f"time() - max({of('stopline_last_error_timestamp_seconds')})", "last error ago", instant=True),
            unit="short",
            empty="cannot be judged: neither a log nor a metrics page is read",
        )
        .decimals(0)
        .override_by_name("in 5 min", from_value(1, RED))
        .override_by_name("failed", cells("percentunit", decimals=1))
        .override_by_name("line", [*cells("percentunit", decimals=0), color(GREY)])
        .override_by_name("last error ago", cells("s", decimals=0))
    )


def _memory() -> Shown:
    line = threshold("memory_headroom_bytes", _FREE, "max")
    return (
        values(
            "Memory: what is left",
            "The least free memory of a GPU, its peaks taken off, red below the line for it; that line; and the fullest "
            "KV cache.",
            query(f"min({_FREE}) >= {line}", "least free", instant=True),
            query(f"min({_FREE}) < {line}", "least free: over", instant=True),
            query(line, "line", instant=True),
            query(f"max({of('stopline:kv_cache_usage_ratio:max')})", "KV cache", instant=True),
            unit="bytes",
            empty="cannot be judged: the engine is down, or neither a GPU nor the KV cache is seen",
        )
        .decimals(1)
        .override_by_name("least free: over", [color(RED)])
        .override_by_name("line", [color(GREY)])
        .override_by_name("KV cache", cells("percentunit", decimals=0))
    )


def _latency_over_time() -> Shown:
    warning = f"max({_WARNING} / on ({REPLICA}, model) {_CRITICAL})"
    return (
        lines(
            "P99 as a share of its line",
            "P99 of the last five minutes over the replica's line, of the ten replicas that came nearest. At 100 % the "
            "latency line trips, if there are enough requests. Each step of the axis doubles it.",
            query(replica(worst(10, _SHARE)), "{{replica}}"),
            query(f"1 + 0 * count({_CRITICAL})", "line"),
            query(warning, "warning"),
            unit="percentunit",
            empty="cannot be judged: no request was measured, or there is no baseline yet",
            fill=0,
            floor=None,
        )
        .scale_distribution(parts.ScaleDistributionConfig().type(common.ScaleDistribution.LOG).log(2))
        .override_by_name("line", limit())
        .override_by_name("warning", limit(AMBER))
    )


def _errors_over_time() -> Shown:
    return (
        lines(
            "Errors of the last five minutes, by kind",
            "As the alert rules count them, over all selected replicas; on the right the highest share of requests that "
            "failed on one of them, and its line.",
            query(f"sum by (kind) ({of('stopline:errors:recent')})", "{{kind}}"),
            query(f"0 * count({_WATCHED})", "errors are watched"),
            query(f"max({of('stopline:errors:ratio5m')})", "failed"),
            query(threshold("error_ratio", of("stopline:errors:ratio5m")), "line"),
            unit="short",
            empty="cannot be judged: neither a log nor a metrics page is read",
            fill=30,
        )
        .axis_soft_max(4)
        .override_by_name("errors are watched", line(GREEN))
        .override_by_name("failed", [*line(AMBER), *right("percentunit", "", min=0, max=1)])
        .override_by_name("line", [*limit(), *right("percentunit", "", min=0, max=1)])
    )


def _memory_over_time() -> Shown:
    return (
        lines(
            "Least free memory, and the KV cache",
            "Free memory of the fullest GPU of each of the ten replicas that had least, and the line; on the right the "
            "fullest KV cache and its line.",
            query(
                replica(worst(10, f"min by ({REPLICA}) ({_FREE})", "bottomk")),
                "{{replica}}",
            ),
            query(threshold("memory_headroom_bytes", _FREE, "max"), "line"),
            query(f"max({of('stopline:kv_cache_usage_ratio:max')})", "KV cache"),
            query(threshold("kv_cache_usage_ratio", of("stopline:kv_cache_usage_ratio:max")), "KV line"),
            unit="bytes",
            empty="cannot be judged: neither a GPU nor the KV cache is seen",
            fill=0,
        )
        .override_by_name("line", limit())
        .override_by_name("KV cache", [*line(BLUE), *right("percentunit", "", min=0, max=1)])
        .override_by_name("KV line", [*limit(BLUE), *right("percentunit", "", min=0, max=1)])
    )


# what fires


def _firing() -> Shown:
    alive = labelled(f"0 * count({of('stopline:tripped')})", alertname="none", severity="rules are evaluated")
    firing = f"max by (alertname, severity, {REPLICA}, kind, model) ({boards.FIRING})"
    return (
        rows(
            "Firing now",
            "Every alert of Stopline that fires for the selected replicas. One row that says none: the rules are "
            "evaluated, and nothing fires.",
            query(f"{replica(firing)} or on () {alive}", rows=True),
            empty="cannot be judged: no rule of Stopline has been evaluated",
            columns=[
                ("severity", "severity"),
                ("alertname", "alert"),
                ("replica", "replica"),
                ("kind", "kind"),
                ("model", "model"),
            ],
            width=12,
            height=7,
            sort="severity",
            descending=False,
        )
        .override_by_name(
            "severity", words_column({"critical": RED, "warning": AMBER, "rules are evaluated": GREEN}, 150)
        )
        .override_by_name("alert", cells(width=210))
        .override_by_name("kind", cells(optional=True, width=110))
        .override_by_name("model", cells(optional=True, width=90))
    )


def _blind() -> Shown:
    told = boards.alerts(_INPUTS, "firing|pending")
    why = f"max by ({REPLICA}, line, alertname, alertstate, input, source) ({told})"
    alive = labelled(f"0 * count({of('stopline:judged')} == 1)", line="all are judged")
    return (
        rows(
            "Not judged",
            "Lines that cannot be judged on a replica, or not in full, what is missing, and the alert that says so "
            "(pending: it waits, so that a start is no alarm). That too few ask for a P99 is no alarm at all.",
            query(f"{replica(f'({why} or on ({REPLICA}, line) {_unjudged()})')} or on () {alive}", rows=True),
            empty="cannot be judged: no rule of Stopline has been evaluated",
            columns=[
                ("line", "line"),
                ("replica", "replica"),
                ("input", "missing"),
                ("alertname", "alert"),
                ("alertstate", "state"),
            ],
            width=12,
            height=7,
        )
        .override_by_name(
            "line",
            words_column(
                {"all are judged": GREEN} | dict.fromkeys(("latency", "errors", "memory", "all"), UNJUDGED), 115
            ),
        )
        .override_by_name("replica", cells(width=125))
        .override_by_name("alert", cells(optional=True, width=215))
        .override_by_name("state", cells(optional=True, width=75))
        .override_by_name("missing", cells(optional=True))
    )


def _unjudged() -> str:
    """Lines without an alert yet, each with what is missing."""
    open_lines, on = of("stopline:judged"), f"and on ({REPLICA})"
    reasons = [
        ("the engine is not up", f"{open_lines} == 0 {on} {of('stopline:engine:down')}"),
        (
            "too few requests",
            f"{of('stopline:judged', line='latency')} == 0 {on} {_BASELINE}",
        ),
        ("no baseline, or no requests", f"{of('stopline:judged', line='latency')} == 0"),
        ("a GPU that was read", f"{of('stopline:judged', line='memory')} == 0 {on} {of('stopline:gpu:lost')}"),
        ("GPUs and KV cache", f"{of('stopline:judged', line='memory')} == 0"),
        ("a log or page that is read", f"{of('stopline:judged', line='errors')} == 0"),
    ]
    found = f" or on ({REPLICA}, line) ".join(
        labelled(f"({expression})", input=missing) for missing, expression in reasons
    )
    return f"max by ({REPLICA}, line, input) ({found})"


# one by one


def _replicas() -> Shown:
    by = f"max by ({REPLICA})"
    over = {"worst": f"{by} ({of('stopline:line:state')})"}
    over |= {name: f"{by} ({of('stopline:line:state', line=name)})" for name in _LINES}
    numbers = {
        "P99": f"{by} ({of_model(_P99)})",
        "baseline": f"{by} ({_BASELINE})",
        "of its line": f"{by} ({_SHARE})",
        "errors, 5 min": f"sum by ({REPLICA}) ({of('stopline:errors:recent')} or on ({REPLICA}) 0 * {_WATCHED})",
        "least free": f"min by ({REPLICA}) ({_FREE})",
        "KV cache": f"{by} ({of('stopline:kv_cache_usage_ratio:max')})",
    }
    panel = joined(
        "Each replica",
        "The three lines on each selected replica, with the values that they are judged by, the worst first. Click a "
        "replica to see it alone.",
        replica(of("stopline:replica:model", MODEL)),
        [("replica", "replica"), ("model", "model")],
        over | numbers,
        after=[("instance", "instance")],
        empty=boards.UNSEEN,
        height=9,
        sort="worst",
    )
    here = (
        "see it alone",
        f"/d/{UID}?${{datasource:queryparam}}&var-instance=${{__data.fields.instance}}&${{__url_time_range}}",
    )
    panel = panel.override_by_name("replica", cells(link=here, width=150))
    for name in over:
        panel = panel.override_by_name(name, cells(mapped=STATES, width=128))
    for name in ("P99", "baseline"):
        panel = panel.override_by_name(name, cells("s", decimals=2, width=95, optional=True))
    panel = panel.override_by_name("of its line", shares(0.75, 1, 100))
    panel = panel.override_by_name("errors, 5 min", cells("short", decimals=0, width=120, optional=True))
    panel = panel.override_by_name("least free", cells("bytes", decimals=1, width=100, optional=True))
    panel = panel.override_by_name("model", cells(optional=True, width=120))
    panel = panel.override_by_name("instance", cells(hidden=True))
    return panel.override_by_name("KV cache", cells("percentunit", decimals=0, width=90, optional=True))


def _history() -> Shown:
    return states(
        "The lines over time",
        "Each line on each replica, of the fifteen that were worst: green calm, amber a warning or a page that is still "
        "on, red over the line, purple not judged.",
        query(replica(worst(15, of("stopline:line:state"))), "{{replica}} {{line}}"),
        mapped=STATES,
        empty=boards.UNSEEN,
        height=10,
    )

"""Why a line is reached, in words that are read from afar: those of the live page, for what the rules have decided.

Each panel shows *most* reasons at once, those of most replicas.
"""

from exporter.catalog import ERROR_KINDS
from exporter.live.words import CAUSES

from .board import alerts
from .panels import GREEN, UNJUDGED, Shown, phrases
from .promql import REPLICA, counted, labelled, of, of_model

P99 = "stopline:request_latency_seconds:p99_5m"
WARNING = of_model("stopline:request_latency_seconds:line", severity="warning")
SLOW = f"{of_model(P99)} >= on ({REPLICA}, model) {WARNING}"
"""P99 of the replicas that are over their warning line: for others a cause would be that of nothing."""
_SAID = ("out_of_memory", "cuda", "collective", "engine_dead")
_ERRORS = (*ERROR_KINDS, "phase_dead", "silent", "stalled", "ratio")


def latency(*, width: int, height: int, most: int) -> Shown:
    """With what no P99 tells: the alerts that warn of communication and of uneven experts."""
    top = of_model("stopline:latency_cause:top")
    warned = [
        labelled(alerts(name, "firing"), cause=cause)
        for name, cause in (("StoplineCommunicationBound", "communication"), ("StoplineExpertImbalance", "experts"))
    ]
    found = [
        f"({top} and on ({REPLICA}, model) ({SLOW}))",
        labelled(f"(({SLOW}) unless on ({REPLICA}, model) {top})", cause="unknown"),
        *warned,
    ]
    return _phrases(
        "latency",
        "Latency: why",
        "What the alert names as the cause, and how many of the selected replicas have it now; of those alone that are "
        "over their warning line, or of which an alert says that they mostly communicate or that their experts are uneven.",
        " or ".join(found),
        "cause",
        _named("queue", "step", "kv_cache", "communication", "request_mix")
        | {
            "experts": ("one rank has most of the experts' work", "text"),
            "unknown": ("over the line, and the cause is not known", UNJUDGED),
            "calm": ("no replica is over its warning line", GREEN),
        },
        empty="cannot be judged: the engine is down, too few requests were measured, or there is no baseline yet",
        width=width,
        height=height,
        most=most,
    )


def errors(*, width: int, height: int, most: int) -> Shown:
    """Of an engine that has failed, what it said of that within an hour, or that it is dead; else every kind of error."""
    failed = f"({of('stopline:engine_failed:by_kind')} == 1)"
    last = of("stopline_last_error_timestamp_seconds", f'kind=~"{"|".join(_SAID)}"')
    said = f"({last} > time() - 3600 and on ({REPLICA}) {failed})"
    stalled = labelled(f"({of('stopline:engine:stalled')} == 1)", kind="stalled")
    ratio = labelled(of("stopline:errors:over_line"), kind="ratio")
    whole = [said, f"({failed} or {stalled})", of("stopline:errors:recent"), ratio]
    return _phrases(
        "errors",
        "Errors: of what kind",
        "What the engine failed of, or of what kinds the errors of the last five minutes are, and on how many of the "
        "selected replicas.",
        f" or on ({REPLICA}) ".join(whole),
        "kind",
        _named(*_ERRORS) | {"calm": ("no error within five minutes", GREEN)},
        empty="cannot be judged: neither a log nor a metrics page is read",
        width=width,
        height=height,
        most=most,
    )


def memory(*, width: int, height: int, most: int) -> Shown:
    return _phrases(
        "memory",
        "Memory: what is over",
        "By which of its rules the memory line is reached, and on how many of the selected replicas.",
        of("stopline:memory:over_line"),
        "reason",
        _named("headroom", "growth", "used_ratio", "kv_cache")
        | {"calm": ("no replica is over its memory line", GREEN)},
        empty="cannot be judged: the engine is down, or neither a GPU nor the KV cache is seen",
        width=width,
        height=height,
        most=most,
    )


def _named(*causes: str) -> dict[str, tuple[str, str]]:
    return {cause: (CAUSES[cause], "text") for cause in causes}


def _phrases(
    line: str,
    title: str,
    about: str,
    found: str,
    label: str,
    spoken: dict[str, tuple[str, str]],
    *,
    empty: str,
    width: int,
    height: int,
    most: int,
) -> Shown:
    """What was *found*; where that is nothing, how many replicas are judged, and calm."""
    calm = labelled(f"({of('stopline:judged', line=line)} == 1)", **{label: "calm"})
    expression = f"{counted(found, label, most)} or on () {counted(calm, label, most)}"
    return phrases(title, about, expression, label, spoken, empty=empty, width=width, height=height)

"""How the sidecars themselves are: what each reads, what it cannot and why, what it left out, and what it costs."""

from collections.abc import Iterator

from .panels import (
    AMBER,
    GREEN,
    RED,
    UNJUDGED,
    Shown,
    color,
    from_value,
    lines,
    query,
    right,
    rows,
    states,
    values,
)
from .promql import RATE, REPLICA, how_many, increase, labelled, of, per_second, replica, worst


def panels() -> Iterator[Shown]:
    """In their order on a board."""
    for panel in (_sources, _source_errors, _age, _log, _lag, _dropped, _cost, _reload):
        yield panel()


def _sources() -> Shown:
    return states(
        "What each sidecar reads",
        "Whether the last attempt to read the log, the metrics page and the GPUs worked, of the fifteen that failed most. No GPU in a pod is a usual "
        "state; then the memory line is judged by the KV cache, or by dcgm-exporter.",
        query(replica(worst(15, of("stopline_source_up"), "bottomk")), "{{replica}} {{source}}"),
        mapped={0: ("not read", RED), 1: ("read", GREEN)},
        empty="cannot be judged: no sidecar is scraped",
        width=12,
    )


def _source_errors() -> Shown:
    reasons = f"max by ({REPLICA}, source, reason) ({of('stopline_source_error')} == 1)"
    missing = labelled(
        f"max by ({REPLICA}, metric) ({of('stopline_upstream_metric_missing')} == 1)", reason="not on the page any more"
    )
    missing = f'label_replace({missing}, "source", "$1", "metric", "(.*)")'
    alive = labelled(f"0 * count({of('stopline_source_up')})", reason="nothing is missing")
    return rows(
        "What they cannot read, and why",
        "Sources that cannot be read now with the reason, and metrics that this engine should have and does not.",
        query(f"{replica(f'({reasons} or {missing})')} or on () {alive}", rows=True),
        empty="cannot be judged: no sidecar is scraped",
        columns=[("replica", "replica"), ("source", "source"), ("reason", "reason")],
        width=12,
    )


def _age() -> Shown:
    return lines(
        "Age of what is known",
        "Time since each source was last read with success, on the worst replica. It stays near the interval of "
        "polling; a rising line is a source that is lost.",
        query(f"max by (source) (time() - {of('stopline_source_last_success_timestamp_seconds')})", "{{source}}"),
        unit="s",
        empty="cannot be judged: no source was ever read",
        width=6,
    )


def _log() -> Shown:
    return lines(
        "Lines of the log",
        "Lines read, lines that a pattern understood, and lines that look as if a pattern should fit and does not: "
        "those should stay at 0, for they mean that the format has changed.",
        query(f"sum({per_second('stopline_log_lines_total')})", "read"),
        query(f"sum({per_second('stopline_log_matched_total')})", "understood"),
        query(f"sum({per_second('stopline_log_unparsed_total')})", "not understood any more"),
        unit="cps",
        empty="cannot be judged: no log is followed",
        width=6,
    ).override_by_name("not understood any more", [color(RED)])


def _lag() -> Shown:
    return lines(
        "Log not read yet",
        "Bytes of the log that are written and not read, and bytes that were left out (over-long lines).",
        query(f"max({of('stopline_log_lag_bytes')})", "not read yet"),
        query(f"sum({increase('stopline_log_dropped_bytes_total')})", "left out"),
        unit="bytes",
        empty="cannot be judged: no log is followed",
        width=6,
    )


def _dropped() -> Shown:
    watched = f"0 * count({of('stopline_build_info')})"
    return lines(
        "Values left out",
        "Values over the cap of label values, not a number, negative, or as large as an uptime, by the family that they "
        "were for.",
        query(f"sum by (family) ({increase('stopline_series_dropped_total')}) > 0", "{{family}}"),
        query(watched, "none"),
        unit="short",
        empty="cannot be judged: no sidecar is scraped",
        width=6,
    ).axis_soft_max(1)


def _cost() -> Shown:
    process = f"and on (job, instance) {of('stopline_build_info')}"
    return lines(
        "What the sidecars cost",
        "CPU of the busiest sidecar, in cores, and the memory of the largest one on the right.",
        query(f"max(rate(process_cpu_seconds_total[{RATE}]) {process})", "CPU"),
        query(f"max(process_resident_memory_bytes {process})", "memory"),
        unit="short",
        empty="cannot be judged: no sidecar is scraped",
        width=12,
    ).override_by_name("memory", right("bytes", "", min=0))


def _reload() -> Shown:
    return (
        values(
            "Sidecars",
            "How many answer, which versions of Stopline they run, and how many run with settings other than those on disk, "
            "as an edit of these could not be read.",
            query(f"count({of('stopline:replica:present')})", "answer", instant=True),
            query(f"count by (version) ({of('stopline_build_info')})", "version {{version}}", instant=True),
            query(
                how_many(f"{of('stopline_config_last_reload_successful')} == 0", of("stopline_build_info")),
                "with old settings",
                instant=True,
            ),
            query(
                how_many(f"{of('stopline:line:state')} == 2", of("stopline:line:state")),
                "lines not judged",
                instant=True,
            ),
            unit="short",
            empty="cannot be judged: no sidecar is scraped",
            width=12,
            height=8,
        )
        .override_by_name("lines not judged", from_value(1, UNJUDGED))
        .override_by_name("with old settings", from_value(1, AMBER))
    )

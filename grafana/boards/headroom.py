"""Headroom, live: how much memory each GPU has left, what holds the rest, and how full the KV cache is."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from . import board as boards
from . import reasons
from .panels import (
    AMBER,
    GREEN,
    GREY,
    RED,
    UNJUDGED,
    Shown,
    cells,
    color,
    from_value,
    joined,
    limit,
    line,
    lines,
    nearness,
    query,
    right,
    row,
    stacked,
    values,
)
from .promql import RATE, REPLICA, RULES_WINDOW, alive, how_many, labelled, of, of_model, replica, threshold, worst

UID = boards.HEADROOM
UNSEEN = "cannot be judged: no sidecar sees a GPU, and no dcgm-exporter tells of these pods"
_PARTS = {
    "weights": ("weights", "#3274d9"),
    "kv_used": ("KV cache, used", "#a352cc"),
    "kv_free": ("KV cache, free", "#c9a6e0"),
    "other": ("other", "#8e8e8e"),
}
_GPU = f"{REPLICA}, gpu, uuid"
_CHOSEN = 'uuid=~"$gpu"'


def board() -> Dashboard:
    made = boards.begin(
        UID,
        "What is left of each GPU's memory: what it holds, its resting use, its peaks and where the memory line is; and "
        "the KV cache, which fills inside memory that is taken already.",
    )
    made = made.with_variable(
        boards.listed(
            "gpu",
            "GPU",
            f"query_result({_named()})",
            regex='/text="(?<text>[^"]+)".*uuid="(?<value>[^"]+)"/',
        )
    )
    made = made.with_row(row("Now"))
    state = boards.state("memory", "Memory line", legend="memory", height=5)
    for panel in (state, reasons.memory(width=16, height=5, most=3), _least(), _lost(), _kv(), _evicted()):
        made = made.with_panel(panel)
    made = made.with_row(row("Each GPU: how near it is to its line"))
    made = made.with_panel(_table())
    made = made.with_row(row("Over time"))
    for panel in (_free(), _growth(), _effective(), _cache(), _preemptions(), _utilization()):
        made = made.with_panel(panel)
    made = made.with_row(row("Each GPU: what its memory holds"))
    return made.with_panel(_stack())


def _named() -> str:
    found = replica(of("stopline_gpu_memory_total_bytes"))
    return f'label_join({found}, "text", " GPU ", "replica", "gpu")'


def _gpu(name: str, /, **equal: str) -> str:
    return of(name, _CHOSEN, **equal)


def _grown() -> str:
    used, rest = _gpu("stopline_gpu_memory_used_bytes"), _gpu("stopline_gpu_memory_plateau_bytes")
    return alive(f"({used} - on ({_GPU}) {rest})")


def _free_now() -> str:
    return alive(_gpu("stopline:gpu_memory_headroom_bytes"))


def _line(name: str) -> str:
    return of("stopline:threshold:latest", line=name)


_AS_NEEDED = f"on ({REPLICA}) {of('stopline_engine_preallocates_memory')} == 0"
"""Of engines that take their memory as they need it; of others much use is the resting state."""


def _near() -> str:
    """How near each GPU is to its line, 1 there, by what it is nearest by: the label `measure`.

    The same three rules as those of stopline:memory:over_line; the line's share of what is free is 1 where it is all.
    """
    each = f"on ({REPLICA}) group_left ()"
    found = {
        "what is free": f"1 / (clamp_min({_free_now()}, 1) / {each} {_line('memory_headroom_bytes')})",
        "growth": f"clamp_min({_grown()} / {each} {_line('memory_growth_bytes')} unless {_AS_NEEDED}, 0)",
        "share in use": f"{alive(_gpu('stopline:gpu_memory_used_ratio'))} / {each} {_line('memory_used_ratio')} and {_AS_NEEDED}",
    }
    measured = (labelled(f"max by ({_GPU}) ({expression})", measure=measure) for measure, expression in found.items())
    return f"topk by ({_GPU}) (1, {' or '.join(measured)})"


# now


def _least() -> Shown:
    least = _by_gpu(f"bottomk(1, {_free_now()})")
    line = threshold("memory_headroom_bytes", alive(of("stopline:gpu_memory_headroom_bytes")), "max")
    return (
        values(
            "GPU with the least",
            "The GPU with the least free memory, its peaks of the last minute taken off, red below the line for it; and "
            "that line.",
            query(f"{least} >= on () group_left () {line}", "{{text}}", instant=True),
            query(f"{least} < on () group_left () {line}", "{{text}}: over", instant=True),
            query(line, "line", instant=True),
            unit="bytes",
            empty="cannot be judged: the engine is down, or no sidecar sees a GPU and no dcgm-exporter tells of these pods",
        )
        .decimals(1)
        .override_by_regexp("/: over$/", [color(RED)])
        .override_by_name("line", [color(GREY)])
    )


def _lost() -> Shown:
    told = _gpu("stopline_gpu_up")
    return values(
        "GPUs",
        "How many GPUs are seen, and how many of them do not answer any more.",
        query(f"count({told})", "seen", instant=True),
        query(how_many(f"{told} == 0", told), "lost", instant=True),
        unit="short",
        empty="cannot be judged: no sidecar sees a GPU",
        width=4,
    ).override_by_name("lost", from_value(1, RED))


def _kv() -> Shown:
    most, missed = f"max({of('stopline:kv_cache_usage_ratio:max')})", f"on () count({of('stopline:kv_cache:full')})"
    return (
        values(
            "KV cache",
            "Of the fullest one: how full it was in the last two minutes, red once it is over the line and requests wait "
            "or are evicted; that line; and how many tokens the smallest holds.",
            query(f"{most} unless {missed}", "used", instant=True),
            query(f"{most} and {missed}", "used: over", instant=True),
            query(threshold("kv_cache_usage_ratio", of("stopline:kv_cache_usage_ratio:max")), "line", instant=True),
            query(
                f"min({of_model('stopline_kv_cache_capacity_tokens')}) "
                f"and on () count({of('stopline:kv_cache_usage_ratio:max')})",
                "tokens",
                instant=True,
            ),
            unit="percentunit",
            empty="cannot be judged: the engine tells no use of its KV cache",
            width=6,
        )
        .decimals(0)
        .override_by_name("used: over", [color(RED)])
        .override_by_name("line", [color(GREY)])
        .override_by_name("tokens", cells("short", decimals=0))
    )


def _evicted() -> Shown:
    return values(
        "For lack of KV cache",
        "Requests that were preempted in the last five minutes, and requests that wait now, on all selected replicas.",
        query(
            f"sum(increase({of_model('stopline_preemptions_total', window='5m')})) "
            f"and on () count({of_model('stopline_requests_running')})",
            "preempted in 5 min",
            instant=True,
        ),
        query(f"sum({of_model('stopline_requests_waiting')})", "waiting", instant=True),
        unit="short",
        empty="cannot be judged: the engine tells neither preemptions nor waiting requests",
        width=6,
    ).decimals(0)


def _table() -> Shown:
    asked = {
        "of its line": _near(),
        "free": f"min by ({_GPU}) ({_free_now()})",
        "grown by": f"max by ({_GPU}) ({_grown()})",
        "at rest": f"max by ({_GPU}) ({_gpu('stopline_gpu_memory_plateau_bytes')})",
        "peak, 60 s": f"max by ({_GPU}) ({_gpu('stopline_gpu_memory_used_peak_bytes')})",
        "total": f"max by ({_GPU}) ({_gpu('stopline_gpu_memory_total_bytes')})",
        "free + KV free": f"min by ({_GPU}) ({alive(_gpu('stopline_gpu_memory_effective_headroom_bytes'))})",
    }
    panel = joined(
        "Each GPU, the nearest to its line first",
        "Memory of each GPU or MIG instance. At 100 % of its line a GPU trips the memory line: by what is free, by what "
        "it has grown by since the start (of an engine that takes its memory when it starts), or by the share in use (of "
        "any other). The last column adds the unused part of the KV cache to what is free: room for requests, but none "
        "for what grows beside the cache.",
        replica(f"max by ({_GPU}, name, mig) ({_gpu('stopline_gpu_info')})"),
        [
            ("replica", "replica"),
            ("gpu", "GPU"),
            ("name", "device"),
            ("mig", "MIG"),
            ("measure", "measured by"),
        ],
        asked,
        after=[("uuid", "uuid")],
        unit="bytes",
        empty=UNSEEN,
        height=11,
        sort="of its line",
    ).decimals(1)
    panel = panel.override_by_name("of its line", nearness(180))
    panel = panel.override_by_name("measured by", cells(width=120, optional=True))
    panel = panel.override_by_name("GPU", cells("string", width=60)).override_by_name("uuid", cells(hidden=True))
    for name in ("free", "grown by", "at rest", "peak, 60 s", "total"):
        panel = panel.override_by_name(name, cells(width=100, optional=True))
    panel = panel.override_by_name("free + KV free", cells(width=120, optional=True))
    panel = panel.override_by_name("replica", cells(width=150)).override_by_name("device", cells(width=130))
    return panel.override_by_name("MIG", cells(width=90, optional=True))


# over time: of each replica its worst GPU, for those of one server mostly lie on each other


def _effective() -> Shown:
    least = f"min by ({REPLICA}) ({alive(_gpu('stopline_gpu_memory_effective_headroom_bytes'))})"
    return lines(
        "Free, with the unused part of the KV cache",
        "Effective headroom: free memory and the unused part of the KV cache, on the GPU of each replica that has least; "
        "the six replicas that had least. Room for requests: it nears what is free as the cache fills. It is no room for "
        "a leak, which cannot take from the cache.",
        query(replica(worst(6, least, "bottomk")), "{{replica}}"),
        unit="bytes",
        empty=UNSEEN,
        fill=0,
    )


def _free() -> Shown:
    return lines(
        "Free memory of the fullest GPU",
        "As the memory line judges it, on the GPU of each replica that has least; the six replicas that had least: free "
        "memory less the highest use of the last minute over the use now. From dcgm-exporter where the sidecar sees no "
        "GPU.",
        query(replica(worst(6, f"min by ({REPLICA}) ({_free_now()})", "bottomk")), "{{replica}}"),
        query(threshold("memory_headroom_bytes", of("stopline:gpu_memory_headroom_bytes"), "max"), "line"),
        unit="bytes",
        empty=UNSEEN,
        fill=0,
    ).override_by_name("line", limit())


def _growth() -> Shown:
    return lines(
        "Grown since the start, on the GPU that grew most",
        "Use above the resting use that was found after the warm-up, on the GPU of each replica that grew most; the six "
        "replicas that grew most. More than the line, of an engine that takes its memory when it starts, is a leak.",
        query(replica(worst(6, f"max by ({REPLICA}) ({_grown()})")), "{{replica}}"),
        query(threshold("memory_growth_bytes", _gpu("stopline_gpu_memory_plateau_bytes")), "line"),
        unit="bytes",
        empty="cannot be judged: the resting use is not known yet (five minutes of serving after the warm-up)",
        fill=0,
        floor=None,
    ).override_by_name("line", limit())


def _cache() -> Shown:
    return (
        lines(
            "KV cache in use",
            "Of each replica and data-parallel rank, the six fullest; with the line, at which a queue or evictions mean "
            "that the cache is what is missing.",
            query(replica(worst(6, of_model("stopline_kv_cache_usage_ratio"))), "{{replica}} rank {{rank}}"),
            query(threshold("kv_cache_usage_ratio", of("stopline:kv_cache_usage_ratio:max")), "line"),
            unit="percentunit",
            empty="cannot be judged: the engine tells no use of its KV cache",
            fill=0,
        )
        .max(1)
        .override_by_name("line", limit())
    )


def _preemptions() -> Shown:
    return (
        lines(
            "Preempted, and waiting",
            "Requests a second that were preempted, retracted or evicted for lack of KV cache, on the six replicas with "
            "most; on the right the requests that wait.",
            query(
                replica(worst(6, f"sum by ({REPLICA}) (rate({of_model('stopline_preemptions_total', window=RATE)}))")),
                "{{replica}}",
            ),
            query(f"sum({of_model('stopline_requests_waiting')})", "waiting, all"),
            unit="reqps",
            empty="cannot be judged: the engine tells neither preemptions nor waiting requests",
        )
        .axis_soft_max(1)
        .override_by_name("waiting, all", [*line(GREY), *right("short", "waiting", min=0)])
    )


def _utilization() -> Shown:
    busy = of("stopline_gpu_utilization_ratio", _CHOSEN, over="avg_over_time", window=RULES_WINDOW)
    return lines(
        "How busy the GPUs are",
        "Share of time in which a kernel ran, of the last five minutes, over the GPUs of each replica; the six replicas "
        "that were idlest. Absent on MIG instances.",
        query(replica(worst(6, f"avg by ({REPLICA}) ({busy})", "bottomk")), "{{replica}}"),
        unit="percentunit",
        empty="cannot be judged: no sidecar sees a GPU, or the device tells no utilization",
        fill=0,
    ).max(1)


def _by_gpu(expression: str) -> str:
    return f'label_join({replica(expression)}, "text", " GPU ", "replica", "gpu")'


# each one


def _stack() -> Shown:
    """Repeated for each GPU that is chosen."""
    on = f"on ({REPLICA}) group_left ()"
    usable = f"{_gpu('stopline_gpu_memory_used_bytes')} + on ({_GPU}) {_gpu('stopline_gpu_memory_headroom_bytes')}"
    least, growth, share = map(_line, ("memory_headroom_bytes", "memory_growth_bytes", "memory_used_ratio"))
    panel = stacked(
        lines(
            "${gpu:text}",
            "What the memory of this GPU holds, from below: weights, the used and the free part of the KV cache, other "
            "(activations, graphs, the CUDA context, what is not known), free. Lines: the limit (red); where growth, or "
            "the share in use, trips the memory line before (amber); the peak of the last minute; the resting use.",
            *(
                query(f"max({_gpu('stopline_gpu_memory_part_bytes', part=part)})", name)
                for part, (name, _) in _PARTS.items()
            ),
            query(f"min({alive(_gpu('stopline_gpu_memory_headroom_bytes'))})", "free"),
            query(f"min({usable} - {on} {least})", "limit"),
            query(
                f"min({_gpu('stopline_gpu_memory_plateau_bytes')} + {on} {growth} unless {_AS_NEEDED})",
                "growth limit",
            ),
            query(f"min({_gpu('stopline_gpu_memory_total_bytes')} * {on} {share} and {_AS_NEEDED})", "share limit"),
            query(f"max({_gpu('stopline_gpu_memory_used_peak_bytes')})", "peak, 60 s"),
            query(f"max({_gpu('stopline_gpu_memory_plateau_bytes')})", "at rest"),
            unit="bytes",
            empty=UNSEEN,
            width=12,
            height=10,
        )
    )
    for name, tone in _PARTS.values():
        panel = panel.override_by_name(name, [color(tone)])
    panel = panel.override_by_name("free", [color(GREEN)])
    panel = panel.override_by_name("limit", limit())
    panel = panel.override_by_name("growth limit", limit(AMBER)).override_by_name("share limit", limit(AMBER))
    panel = panel.override_by_name("peak, 60 s", line("text")).override_by_name("at rest", limit(UNJUDGED))
    return panel.repeat("gpu").repeat_direction("h").max_per_row(4)

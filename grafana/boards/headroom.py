"""Headroom, live: how much memory each GPU has left, what holds the rest, and how full the KV cache is."""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from . import board as boards
from .panels import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    RED,
    UNJUDGED,
    Shown,
    cells,
    color,
    gauge_column,
    joined,
    limit,
    line,
    lines,
    query,
    right,
    row,
    stacked,
    values,
)
from .promql import RATE, REPLICA, alive, how_many, labelled, of, of_model, replica, threshold, worst

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
    state = boards.state("memory", "Memory line", legend="memory", width=6)
    for panel in (state, _least(), _kv(), _evicted()):
        made = made.with_panel(panel)
    made = made.with_panel(_table())
    made = made.with_row(row("Over time"))
    for panel in (_effective(), _free(), _cache(), _preemptions(), _growth(), _utilization()):
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


# now


def _least() -> Shown:
    return (
        values(
            "GPU with the least",
            "The least free memory of a GPU, its peaks of the last minute taken off; the line for it; and the least "
            "effective headroom: free memory and the unused part of the KV cache together.",
            query(f"min({alive(_gpu('stopline:gpu_memory_headroom_bytes'))})", "free", instant=True),
            query(
                threshold("memory_headroom_bytes", alive(of("stopline:gpu_memory_headroom_bytes")), "max"),
                "line",
                instant=True,
            ),
            query(f"min({alive(_gpu('stopline_gpu_memory_effective_headroom_bytes'))})", "effective", instant=True),
            unit="bytes",
            empty="cannot be judged: the engine is down, or no sidecar sees a GPU and no dcgm-exporter tells of these pods",
            width=6,
        )
        .decimals(1)
        .override_by_name("line", [color(RED)])
    )


def _kv() -> Shown:
    return (
        values(
            "KV cache",
            "Of the fullest one: how full it was in the last two minutes, and the line, which counts once requests wait "
            "or are evicted; and how many tokens the smallest holds.",
            query(f"max({of('stopline:kv_cache_usage_ratio:max')})", "used", instant=True),
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
        .override_by_name("line", [color(RED)])
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
        "used": f"max by ({_GPU}) ({_gpu('stopline:gpu_memory_used_ratio')})",
        "free": f"min by ({_GPU}) ({alive(_gpu('stopline:gpu_memory_headroom_bytes'))})",
        "effective": f"min by ({_GPU}) ({alive(_gpu('stopline_gpu_memory_effective_headroom_bytes'))})",
        "at rest": f"max by ({_GPU}) ({_gpu('stopline_gpu_memory_plateau_bytes')})",
        "grown by": f"max by ({_GPU}) ({_grown()})",
        "peak, 60 s": f"max by ({_GPU}) ({_gpu('stopline_gpu_memory_used_peak_bytes')})",
        "total": f"max by ({_GPU}) ({_gpu('stopline_gpu_memory_total_bytes')})",
    }
    panel = joined(
        "Each GPU",
        "Memory of each GPU or MIG instance. Of an engine that takes its memory when it starts, much use is its resting "
        "state, and what it has grown by since is what counts.",
        replica(f"max by ({_GPU}, name, mig) ({_gpu('stopline_gpu_info')})"),
        [("replica", "replica"), ("gpu", "GPU"), ("name", "device"), ("mig", "MIG")],
        asked,
        after=[("uuid", "uuid")],
        unit="bytes",
        empty=UNSEEN,
        height=9,
        sort="free",
        descending=False,
    ).decimals(1)
    panel = panel.override_by_name("used", [*cells("percentunit", decimals=0, width=150), *gauge_column(BLUE)])
    panel = panel.override_by_name("GPU", cells("string", width=60)).override_by_name("uuid", cells(hidden=True))
    for name in ("free", "effective", "at rest", "grown by", "peak, 60 s", "total"):
        panel = panel.override_by_name(name, cells(width=115, optional=True))
    panel = panel.override_by_name("replica", cells(width=160)).override_by_name("device", cells(width=130))
    return panel.override_by_name("MIG", cells(width=90, optional=True))


# over time


def _effective() -> Shown:
    return lines(
        "Effective headroom",
        "Free memory and the unused part of the KV cache, of the ten GPUs that had least. It nears what is free as "
        "the cache fills. Where the size of the cache is not known it is free memory only.",
        query(_by_gpu(worst(10, alive(_gpu("stopline_gpu_memory_effective_headroom_bytes")), "bottomk")), "{{text}}"),
        query(threshold("memory_headroom_bytes", of("stopline:gpu_memory_headroom_bytes"), "max"), "line"),
        unit="bytes",
        empty=UNSEEN,
        fill=0,
    ).override_by_name("line", limit())


def _free() -> Shown:
    return lines(
        "Free memory, peaks taken off",
        "As the memory line judges it, of the ten GPUs that had least: free memory less the highest use of the last "
        "minute over the use now. From dcgm-exporter where the sidecar sees no GPU.",
        query(_by_gpu(worst(10, alive(_gpu("stopline:gpu_memory_headroom_bytes")), "bottomk")), "{{text}}"),
        query(threshold("memory_headroom_bytes", of("stopline:gpu_memory_headroom_bytes"), "max"), "line"),
        unit="bytes",
        empty=UNSEEN,
        fill=0,
    ).override_by_name("line", limit())


def _growth() -> Shown:
    return lines(
        "Grown since the start",
        "Use above the resting use that was found after the warm-up, of the ten GPUs that grew most. More than the "
        "line, of an engine that takes its memory when it starts, is a leak.",
        query(_by_gpu(worst(10, _grown())), "{{text}}"),
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
            "Of each replica and data-parallel rank, the ten fullest; with the line, at which a queue or evictions mean "
            "that the cache is what is missing.",
            query(replica(worst(10, of_model("stopline_kv_cache_usage_ratio"))), "{{replica}} rank {{rank}}"),
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
            "Requests a second that were preempted, retracted or evicted for lack of KV cache; on the right the requests "
            "that wait.",
            query(
                replica(worst(10, f"sum by ({REPLICA}) (rate({of_model('stopline_preemptions_total', window=RATE)}))")),
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
    lost = labelled(how_many(f"{of('stopline_gpu_up')} == 0", of("stopline_gpu_up")), text="GPUs that are lost")
    return lines(
        "GPUs: busy, or lost",
        "Share of time in which a kernel ran, of the ten that were idlest (absent on MIG instances); and how many GPUs "
        "do not answer any more.",
        query(_by_gpu(worst(10, _gpu("stopline_gpu_utilization_ratio"), "bottomk")), "{{text}}"),
        query(lost, "{{text}}"),
        unit="percentunit",
        empty="cannot be judged: no sidecar sees a GPU",
        fill=0,
    ).override_by_name("GPUs that are lost", [*limit(RED), *right("short", "lost", min=0)])


def _by_gpu(expression: str) -> str:
    return f'label_join({replica(expression)}, "text", " GPU ", "replica", "gpu")'


# each one


def _stack() -> Shown:
    """Repeated for each GPU that is chosen."""
    on = f"on ({REPLICA}) group_left ()"
    usable = f"{_gpu('stopline_gpu_memory_used_bytes')} + on ({_GPU}) {_gpu('stopline_gpu_memory_headroom_bytes')}"
    takes_as_needed = f"on ({REPLICA}) {of('stopline_engine_preallocates_memory')} == 0"
    least, growth, share = (
        of("stopline:threshold:latest", line=name)
        for name in ("memory_headroom_bytes", "memory_growth_bytes", "memory_used_ratio")
    )
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
            query(f"min({_gpu('stopline_gpu_memory_headroom_bytes')})", "free"),
            query(f"min({usable} - {on} {least})", "limit"),
            query(
                f"min({_gpu('stopline_gpu_memory_plateau_bytes')} + {on} {growth} unless {takes_as_needed})",
                "growth limit",
            ),
            query(
                f"min({_gpu('stopline_gpu_memory_total_bytes')} * {on} {share} and {takes_as_needed})", "share limit"
            ),
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

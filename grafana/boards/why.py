"""Why is it slow: do requests wait, is the step slower, is the KV cache full, or does communication eat the step?

The order of the questions is that of the two documents the stop lines come from: queue wait against step latency first,
then the step against its batch, then memory, then the share of communication.
"""

from grafana_foundation_sdk.builders.dashboard import Dashboard

from . import board as boards
from . import reasons
from .panels import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    RED,
    Shown,
    bars,
    cells,
    color,
    from_value,
    heat,
    limit,
    line,
    lines,
    markdown,
    query,
    right,
    row,
    rows,
    steps,
    values,
)
from .promql import (
    RATE,
    REPLICA,
    how_many,
    labelled,
    of,
    of_config,
    of_model,
    quantile,
    replica,
    threshold,
    worst,
)

UID = boards.WHY
_OF_SLOW = f"and on ({REPLICA}, model) ({reasons.SLOW})"
_IDLE = "cannot be judged: no request was measured in this time"
_UNTOLD = "cannot be judged: this engine does not tell it"
_GUIDE = """\
| what you see | bottleneck | what helps |
|---|---|---|
| the queue grows, the step stays | **scheduling** | replicas, or more places |
| the step grows with the batch | **compute** | a smaller batch, faster cards |
| the KV cache is full, and a queue | **memory** | a larger cache, shorter contexts |
| communication eats the step | **links** | less TP, TP within NVLink |
| more tokens in a request | none: **other requests** | a baseline for these |
"""


def board() -> Dashboard:
    made = boards.begin(
        UID,
        "What makes requests slow: the wait in the queue or the step, and what is behind the step: the batch, the KV "
        "cache, communication, or other requests than before.",
    )
    made = made.with_row(row("The answer: which part grew against its own baseline"))
    state = boards.state("latency", "Latency line", legend="latency", height=5)
    for panel in (state, reasons.latency(width=16, height=5, most=3), _scores(), _guide()):
        made = made.with_panel(panel)
    for panel in (_queue_times(), _step_times(), _cache(), _communication_now(), _mix()):
        made = made.with_panel(panel)
    made = made.with_row(row("Queue wait, step and first token: quantiles"))
    for panel in (
        _quantiles("Queue wait", "request_queue_wait_seconds", "From arrival to the first time it is scheduled."),
        _quantiles(
            "Step",
            "step_latency_seconds",
            "One forward pass; where the engine tells only that, the time between tokens.",
        ),
        _quantiles(
            "First token", "request_time_to_first_token_seconds", "From arrival to the first token, the queue included."
        ),
    ):
        made = made.with_panel(panel)
    made = made.with_row(row("The same as heat maps: each column how long the requests of that moment took"))
    for panel in (
        _heat("Queue wait", "stopline_request_queue_wait_seconds_bucket"),
        _heat("Step", "stopline_step_latency_seconds_bucket"),
        _heat("First token", "stopline_request_time_to_first_token_seconds_bucket"),
    ):
        made = made.with_panel(panel)
    made = made.with_row(row("Behind the step: batch, phases, communication"))
    for panel in (_load(), _batch(), _phases(), _communication(), _operations(), _tokens()):
        made = made.with_panel(panel)
    made = made.with_row(row("Experts and layout"))
    for panel in (_balance(), _experts(), _layout(), _weights()):
        made = made.with_panel(panel)
    return made


# the answer


def _scores() -> Shown:
    calm = labelled(f"0 * count({of('stopline:judged', line='latency')} == 1)", cause="nothing grew")
    return (
        bars(
            "What explains the growth",
            "The share of the growth of P99 that a part explains, on the replica where it explains most. A full KV cache "
            "and communication stand above the parts (more than 100 %), for they are behind them.",
            query(
                f"max by (cause) ({of_model('stopline:latency_cause:score')} {_OF_SLOW}) or on () {calm}",
                "{{cause}}",
                instant=True,
            ),
            unit="percentunit",
            empty="cannot be judged: the engine is down, too few requests were measured, or there is no baseline yet",
            width=8,
            height=8,
        )
        .min(0)
        .max(1)
        .decimals(0)
        .thresholds(steps((None, GREY), (0.3, AMBER), (0.6, RED)))
    )


def _guide() -> Shown:
    return markdown("How to read it", "What each pattern means, and what helps.", _GUIDE, 16, 8)


def _times(now: str, then: str) -> str:
    """How many times its baseline a part takes, on the replica where that is most."""
    configured = f"{of_model(now)} * on ({REPLICA}) group_left (config) {of('stopline:config:info')}"
    return f"max({configured} / on (model, config) group_left () {of_config(then)})"


def _baseline(then: str, now: str) -> str:
    """Not where there is nothing to hold against it."""
    return f"max({of_config(then)}) and on () count({of_model(now)})"


def _queue_times() -> Shown:
    wait = "stopline:request_queue_wait_seconds:p99_5m"
    return (
        values(
            "1  Do requests wait?",
            "P99 of the queue wait on the worst replica, its baseline, and how much it grew. A wait that grows while the "
            "step stays is scheduling.",
            query(f"max({of_model(wait)})", "P99 now", instant=True),
            query(_baseline("stopline:request_queue_wait_seconds:p99_baseline", wait), "baseline", instant=True),
            query(
                f"max({of_model('stopline:latency_cause:score', cause='queue')} {_OF_SLOW})", "explains", instant=True
            ),
            unit="s",
            empty=_IDLE,
            width=5,
            height=5,
        )
        .override_by_name("baseline", [color(GREY)])
        .override_by_name("explains", [*cells("percentunit", decimals=0), *from_value(0.5, RED)])
    )


def _step_times() -> Shown:
    mean = "stopline:step_latency_seconds:mean_5m"
    grown = _times(mean, "stopline:step_latency_seconds:mean_baseline")
    return (
        values(
            "2  Is the step slower?",
            "The mean step on the worst replica, its baseline, and how many times that it is. A step that grows with the "
            "batch is compute.",
            query(f"max({of_model(mean)})", "mean now", instant=True),
            query(_baseline("stopline:step_latency_seconds:mean_baseline", mean), "baseline", instant=True),
            query(grown, "times", instant=True),
            unit="s",
            empty=_IDLE,
            width=5,
            height=5,
        )
        .override_by_name("baseline", [color(GREY)])
        .override_by_name("times", [*cells("suffix:x", decimals=1), *from_value(1.5, RED)])
    )


def _cache() -> Shown:
    return (
        values(
            "3  Is the KV cache full?",
            "The fullest KV cache of the last two minutes, its line, and on how many replicas it is what is missing: it "
            "is full, and requests wait or were evicted.",
            query(f"max({of('stopline:kv_cache_usage_ratio:max')})", "used", instant=True),
            query(threshold("kv_cache_usage_ratio", of("stopline:kv_cache_usage_ratio:max")), "line", instant=True),
            query(
                how_many(of("stopline:kv_cache:full"), of("stopline:kv_cache_usage_ratio:max")),
                "missing on",
                instant=True,
            ),
            unit="percentunit",
            empty="cannot be judged: the engine tells no use of its KV cache",
            width=5,
            height=5,
        )
        .decimals(0)
        .override_by_name("line", [color(GREY)])
        .override_by_name("missing on", [*cells("short", decimals=0), *from_value(1, RED)])
    )


def _communication_now() -> Shown:
    line_of_each = of("stopline:threshold:latest", line="communication_ratio")
    over = f"{of_model('stopline:communication:share_5m')} > on ({REPLICA}) group_left () {line_of_each}"
    return (
        values(
            "4  Communication?",
            "The largest share of the step that a replica spends communicating between GPUs, its baseline, the line, and on how many replicas it is over it.",
            query(f"max({of_model('stopline:communication:share_5m')})", "share", instant=True),
            query(
                _baseline("stopline:communication:share_baseline", "stopline:communication:share_5m"),
                "baseline",
                instant=True,
            ),
            query(threshold("communication_ratio", of_model("stopline:communication:share_5m")), "line", instant=True),
            query(how_many(over, of_model("stopline:communication:share_5m")), "over on", instant=True),
            unit="percentunit",
            empty=_UNTOLD,
            width=5,
            height=5,
        )
        .decimals(0)
        .override_by_name("baseline", [color(GREY)])
        .override_by_name("line", [color(GREY)])
        .override_by_name("over on", [*cells("short", decimals=0), *from_value(1, RED)])
    )


def _mix() -> Shown:
    return (
        values(
            "5  Other requests?",
            "Tokens of a request, prompt and answer, as a multiple of what they were in the week before.",
            query(f"max by (kind) ({of_model('stopline:tokens_per_request:ratio')})", "{{kind}}", instant=True),
            unit="suffix:x",
            empty="cannot be judged: no tokens are told, or there is no week before to compare with",
            width=4,
            height=5,
        )
        .decimals(1)
        .thresholds(steps((None, "text"), (1.5, AMBER)))
    )


# quantiles and heat maps


def _quantiles(title: str, signal: str, about: str) -> Shown:
    return (
        lines(
            title,
            f"{about} P50 and P95 over all selected replicas; P99 of the worst replica and its baseline as the rules "
            "have them. All of the last five minutes.",
            query(quantile(0.5, f"stopline_{signal}_bucket"), "P50"),
            query(quantile(0.95, f"stopline_{signal}_bucket"), "P95"),
            query(f"max({of_model(f'stopline:{signal}:p99_5m')})", "P99, worst replica"),
            query(f"max({of_config(f'stopline:{signal}:p99_baseline')})", "baseline of P99"),
            unit="s",
            empty=_IDLE,
            fill=0,
        )
        .override_by_name("P50", line("#8ab8ff"))
        .override_by_name("P95", line(BLUE))
        .override_by_name("P99, worst replica", line(RED))
        .override_by_name("baseline of P99", limit(GREEN))
    )


def _heat(title: str, bucket: str) -> Shown:
    return heat(
        title,
        "How many took how long at each moment, over all selected replicas; the darker, the fewer.",
        query(f"sum by (le) (increase({of_model(bucket, window=RATE)}))", "{{le}}"),
        unit="s",
        empty=_IDLE,
    )


# behind the step


def _load() -> Shown:
    return (
        lines(
            "Running and waiting",
            "Requests that are worked on and requests that wait, over all selected replicas; and the places there are "
            "for running ones.",
            query(f"sum({of_model('stopline_requests_running')})", "running"),
            query(f"sum({of_model('stopline_requests_waiting')})", "waiting"),
            query(f"sum({of('stopline_engine_limit', name='max_running_requests')})", "places"),
            unit="short",
            empty=_UNTOLD,
        )
        .override_by_name("running", [color(BLUE)])
        .override_by_name("waiting", [color(AMBER)])
        .override_by_name("places", limit())
    )


def _batch() -> Shown:
    return (
        lines(
            "The step against its batch",
            "The mean step and the requests that run, both of the mean replica. If they rise together the step is bound "
            "by compute; if the step rises alone, something else slows it.",
            query(f"avg({of_model('stopline:step_latency_seconds:mean_5m')})", "mean step"),
            query(f"avg(sum by ({REPLICA}) ({of_model('stopline_requests_running')}))", "running"),
            unit="s",
            empty=_UNTOLD,
            fill=0,
        )
        .override_by_name("mean step", line(RED))
        .override_by_name("running", [*line(BLUE), *right("short", "running", min=0)])
    )


def _phases() -> Shown:
    return lines(
        "Step by phase: P50 and P99",
        "Prefill reads prompts, decode writes answers; mixed steps do both. An engine that tells only the time between "
        "tokens has decode alone.",
        query(quantile(0.5, "stopline_step_latency_seconds_bucket", by="phase"), "{{phase}} P50"),
        query(quantile(0.99, "stopline_step_latency_seconds_bucket", by="phase"), "{{phase}} P99"),
        unit="s",
        empty=_IDLE,
        fill=0,
    )


def _communication() -> Shown:
    return (
        lines(
            "Share of the step spent communicating",
            "Of the ten replicas where it is largest, with its line and its baseline. Only engines whose log or page "
            "tells both times are seen.",
            query(replica(worst(10, of_model("stopline:communication:share_5m"))), "{{replica}}"),
            query(threshold("communication_ratio", of_model("stopline:communication:share_5m")), "line"),
            query(f"max({of_config('stopline:communication:share_baseline')})", "baseline"),
            unit="percentunit",
            empty=_UNTOLD,
            fill=0,
        )
        .max(1)
        .override_by_name("line", limit())
        .override_by_name("baseline", limit(GREEN))
    )


def _operations() -> Shown:
    return lines(
        "Time in communication, by operation",
        "Seconds a second in each collective operation, over all selected replicas.",
        query(f"sum by (op) (rate({of_model('stopline_communication_seconds_total', window=RATE)}))", "{{op}}"),
        unit="percentunit",
        empty=_UNTOLD,
        fill=30,
    )


def _tokens() -> Shown:
    return lines(
        "Tokens",
        "Tokens of prompts read and of answers generated, a second, over all selected replicas.",
        query(f"sum by (kind) (rate({of_model('stopline_tokens_total', window=RATE)}))", "{{kind}}"),
        unit="short",
        empty=_UNTOLD,
    )


# experts


def _balance() -> Shown:
    return (
        lines(
            "Balance of experts",
            "The mean load of the ranks over that of the busiest, of the ten replicas that are most uneven; 1 is even. "
            "The step lasts as long as the busiest rank needs.",
            query(replica(worst(10, of_model("stopline_expert_balance_ratio"), "bottomk")), "{{replica}}"),
            query(threshold("expert_balance_ratio", of_model("stopline_expert_balance_ratio"), "max"), "line"),
            unit="percentunit",
            empty=_UNTOLD,
            fill=0,
        )
        .max(1)
        .override_by_name("line", limit())
    )


def _experts() -> Shown:
    return values(
        "Experts",
        "Experts of the model in all, on each rank, and redundant copies; a dense model has none.",
        query(f"max by (scope) ({of('stopline_experts')})", "{{scope}}", instant=True),
        unit="short",
        empty="none is told: a dense model, or an engine that does not tell it",
        width=4,
        height=8,
    )


def _layout() -> Shown:
    return values(
        "Parallelism",
        "Ways in which the model is split over devices.",
        query(f"max by (dimension) ({of('stopline_parallelism')})", "{{dimension}}", instant=True),
        unit="short",
        empty=_UNTOLD,
        width=4,
        height=8,
    )


def _weights() -> Shown:
    return rows(
        "Parameters on each rank",
        "Memory of the parameters on each rank, from the start-up log: how the experts and layers were split.",
        query(replica(f"max by ({REPLICA}, rank) ({of('stopline_rank_weights_bytes')})"), rows=True),
        unit="bytes",
        empty=_UNTOLD,
        columns=[("replica", "replica"), ("rank", "rank"), ("Value", "parameters")],
        width=8,
        sort="rank",
        descending=False,
    ).override_by_name("rank", cells("string"))

"""Every family Stopline exports, once: name, kind, help, labels, histogram bounds.

Sources, profiles, the collector, the documentation and the tests are all checked against this table.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

PREFIX = "stopline_"

ERROR_KINDS = (  # in order of precedence: a line that fits two kinds is the earlier one
    "out_of_memory",
    "cuda",
    "collective",
    "timeout",
    "connection",
    "kv_cache",
    "engine_dead",
    "hang",
    "rejected",
    "server_error",
    "other",
)
OUTCOMES = ("ok", "error", "aborted", "rejected")
PHASES = ("starting", "loading", "warming", "serving", "stopping", "dead")
TOKEN_KINDS = ("prompt", "generation")
LEVELS = (*(str(1 << n) for n in range(11)), "inf")
"""Of concurrency: requests in the engine, up to so many."""
SIGNALS = ("request", "time_to_first_token", "queue_wait", "step")
"""Of which a baseline can be pinned."""


@cache
def geometric(low: float, high: float, factor: float) -> tuple[float, ...]:
    """Ascending bounds from *low* to *high*, each about *factor* times the one before.

    Rounded to five significant digits, so that the ``le`` labels stay short and the same everywhere.
    """
    steps = round(math.log(high / low) / math.log(factor))
    return tuple(float(f"{low * (high / low) ** (k / steps):.5g}") for k in range(steps + 1))


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One exported family. *name* carries the base unit and, for counters, ``_total``.

    *bounds* are the lowest and the highest upper bound of a histogram; what lies between follows from the
    configured factor, or from its own *factor* if that is larger. *closed* maps a label to the only values it can
    have.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, float] | None = None
    closed: tuple[tuple[str, tuple[str, ...]], ...] = ()
    factor: float = 1.0

    @property
    def short(self) -> str:
        """The name as profiles and settings write it: without the prefix."""
        return self.name.removeprefix(PREFIX)


_REQUEST = (0.001, 600.0)
_STEP = (0.0001, 60.0)
_COARSE = 1.25
_MODEL_SOURCE = ("model", "source")
_BY_CONCURRENCY = ("model", "config", "concurrency")
_GPU = ("gpu", "uuid")
_DIMENSIONS = ("tensor", "pipeline", "data", "expert")
_LIMITS = ("max_running_requests", "max_batched_tokens", "max_model_len", "gpu_memory_utilization")


def _family(
    name: str,
    kind: Literal["gauge", "counter", "histogram"],
    help: str,
    /,
    *labels: str,
    bounds: tuple[float, float] | None = None,
    factor: float = 1.0,
    **closed: tuple[str, ...],
) -> Family:
    return Family(PREFIX + name, kind, help, labels, bounds, tuple(closed.items()), factor)


QUEUE_WAIT = _family(
    "request_queue_wait_seconds",
    "histogram",
    "From arrival of a request to its first scheduling. source=metrics is refined from the engine's own buckets.",
    *_MODEL_SOURCE,
    bounds=_REQUEST,
)
FIRST_TOKEN = _family(
    "request_time_to_first_token_seconds",
    "histogram",
    "From arrival of a request to its first token, the wait in the queue included.",
    *_MODEL_SOURCE,
    bounds=_REQUEST,
)
LATENCY = _family(
    "request_latency_seconds",
    "histogram",
    "From arrival of a request to its last token.",
    *_MODEL_SOURCE,
    bounds=_REQUEST,
)
STEP_LATENCY = _family(
    "step_latency_seconds",
    "histogram",
    "One step of the engine (a forward pass). Where an engine tells only the time between tokens, decode is that.",
    "model",
    "phase",
    "source",
    bounds=_STEP,
    phase=("prefill", "decode", "mixed"),
)
LATENCY_BY_CONCURRENCY = _family(
    "request_latency_by_concurrency_seconds",
    "histogram",
    "Latency by the mean number of requests in the engine during the request, up to the power of two that "
    "concurrency is. Without the warm-up: the first 20 requests and 60 s after each start.",
    *_BY_CONCURRENCY,
    bounds=(0.01, 600.0),
    factor=_COARSE,
    concurrency=LEVELS,
)
REQUESTS = _family(
    "requests_total",
    "counter",
    "Finished requests by outcome. A client's mistake is rejected, a client that went away is aborted.",
    "model",
    "outcome",
    outcome=OUTCOMES,
)
LONG_ANSWERS = _family(
    "long_answers_total",
    "counter",
    "Answers to requests for tokens that took over a second, as the engine's HTTP server counts them: when they end or "
    "their client goes away, whatever came of them.",
    "model",
)
TOKENS = _family(
    "tokens_total",
    "counter",
    "Tokens of prompts read and of answers generated.",
    "model",
    "kind",
    kind=TOKEN_KINDS,
)
TOKENS_BY_CONCURRENCY = _family(
    "tokens_by_concurrency_total",
    "counter",
    "Tokens of answers generated, by the number of requests in the engine meanwhile.",
    *_BY_CONCURRENCY,
    concurrency=LEVELS,
)
SECONDS_BY_CONCURRENCY = _family(
    "seconds_by_concurrency_total",
    "counter",
    "Time in which the engine held so many requests; tokens by concurrency over this is its throughput then.",
    *_BY_CONCURRENCY,
    concurrency=LEVELS,
)
PREEMPTIONS = _family(
    "preemptions_total",
    "counter",
    "Requests preempted, retracted or evicted for lack of KV cache.",
    "model",
)
ERRORS = _family(
    "errors_total",
    "counter",
    "Failures of the engine, one for each event however many lines or ranks told it.",
    "kind",
    "source",
    kind=ERROR_KINDS,
    source=("log", "metrics"),
)
LAST_ERROR = _family(
    "last_error_timestamp_seconds",
    "gauge",
    "Unix time of the last error of this kind; absent until the first.",
    "kind",
    kind=ERROR_KINDS,
)
RUNNING = _family(
    "requests_running",
    "gauge",
    "Requests being worked on now.",
    "model",
    "rank",
)
WAITING = _family(
    "requests_waiting",
    "gauge",
    "Requests waiting to be scheduled now.",
    "model",
    "rank",
)
KV_USAGE = _family(
    "kv_cache_usage_ratio",
    "gauge",
    "Share of the KV cache in use, 0 to 1.",
    "model",
    "rank",
)
KV_TOKENS = _family(
    "kv_cache_capacity_tokens",
    "gauge",
    "Tokens that fit into the KV cache. From the start-up log or an info metric.",
    "model",
    "rank",
)
KV_BYTES = _family(
    "kv_cache_capacity_bytes",
    "gauge",
    "Memory set aside for the KV cache. From the start-up log or an info metric.",
    "model",
    "rank",
)
COMMUNICATION = _family(
    "communication_seconds_total",
    "counter",
    "Time spent in collective operations, or waiting for them, where the log or the page tells it.",
    "model",
    "op",
)
STEP_SECONDS = _family(
    "step_seconds_total",
    "counter",
    "Time spent in steps, where the log or the page tells it; from the same source as the time of communication.",
    "model",
    "phase",
    phase=("prefill", "decode", "mixed"),
)
GPU_TOTAL = _family(
    "gpu_memory_total_bytes",
    "gauge",
    "Memory of the device: reserved + used + free. Source: NVML memory info version 2.",
    *_GPU,
)
GPU_USED = _family(
    "gpu_memory_used_bytes",
    "gauge",
    "Memory in use on the device, without what the driver reserves.",
    *_GPU,
)
GPU_RESERVED = _family(
    "gpu_memory_reserved_bytes",
    "gauge",
    "Memory reserved by the driver; absent where NVML tells version 1 only.",
    *_GPU,
)
GPU_HEADROOM = _family(
    "gpu_memory_headroom_bytes",
    "gauge",
    "Free memory of the device, as NVML tells it.",
    *_GPU,
)
GPU_PEAK = _family(
    "gpu_memory_used_peak_bytes",
    "gauge",
    "Highest use seen in the samples of the last 60 s, so that a peak between two scrapes is not lost.",
    *_GPU,
)
GPU_PLATEAU = _family(
    "gpu_memory_plateau_bytes",
    "gauge",
    "Resting use: the median of the first 5 minutes of serving that Stopline saw after the warm-up (60 s and 20 "
    "requests). Absent until they are over; the same until the engine starts again.",
    *_GPU,
)
GPU_EFFECTIVE = _family(
    "gpu_memory_effective_headroom_bytes",
    "gauge",
    "Free memory of the device and the unused part of the KV cache set aside on it. Where the size of that cache, its "
    "use or the GPUs it is on are unknown, free memory only.",
    *_GPU,
)
GPU_PART = _family(
    "gpu_memory_part_bytes",
    "gauge",
    "Memory in use by what it holds; the parts add up to it. A part that is not known is absent and in other.",
    *_GPU,
    "part",
    part=("weights", "kv_used", "kv_free", "other"),
)
GPU_UTILIZATION = _family(
    "gpu_utilization_ratio",
    "gauge",
    "Share of time in which a kernel ran, 0 to 1; absent on MIG instances.",
    *_GPU,
)
GPU_UP = _family(
    "gpu_up",
    "gauge",
    "1 while the device answers; 0 when it is lost or does not answer in time.",
    *_GPU,
)
GPU_INFO = _family(
    "gpu_info",
    "gauge",
    "1, with what the device is; mig is its MIG profile, empty for a whole GPU.",
    *_GPU,
    "name",
    "driver",
    "mig",
)
PARALLELISM = _family(
    "parallelism",
    "gauge",
    "Ways in which the model is split over devices. From the start-up log or an info metric.",
    "dimension",
    dimension=_DIMENSIONS,
)
EXPERTS = _family(
    "experts",
    "gauge",
    "Experts of a mixture-of-experts model: in all, on each rank, and redundant copies.",
    "scope",
    scope=("total", "per_rank", "redundant"),
)
EXPERT_BALANCE = _family(
    "expert_balance_ratio",
    "gauge",
    "Mean load of the ranks over the load of the busiest; 1 is even.",
    "model",
)
RANK_WEIGHTS = _family(
    "rank_weights_bytes",
    "gauge",
    "Memory of the parameters on each rank, from the start-up log.",
    "rank",
)
ENGINE_LIMIT = _family(
    "engine_limit",
    "gauge",
    "A limit the engine was started with.",
    "name",
    name=_LIMITS,
)
ENGINE_PREALLOCATES = _family(
    "engine_preallocates_memory",
    "gauge",
    "1 if the engine takes the memory of its GPUs when it starts, so that high use is normal and growth is not; 0 if "
    "it takes memory as it needs it. Absent while unknown.",
)
ENGINE_INFO = _family(
    "engine_info",
    "gauge",
    "1, with what the engine is; config is a short hash of what makes two runs comparable.",
    "engine",
    "version",
    "model",
    "config",
    "dtype",
    "quantization",
)
ENGINE_UP = _family(
    "engine_up",
    "gauge",
    "1 while the engine answers and has not said that it is dead.",
)
ENGINE_START = _family(
    "engine_start_timestamp_seconds",
    "gauge",
    "Unix time at which the engine started; absent while unknown.",
)
ENGINE_PHASE = _family(
    "engine_phase",
    "gauge",
    "1 for the phase the engine is in, 0 for the others.",
    "state",
    state=PHASES,
)
BASELINE = _family(
    "baseline_latency_seconds",
    "gauge",
    "A quantile pinned as the baseline by the configuration; absent where the recording rules learn it.",
    "model",
    "signal",
    "quantile",
    signal=SIGNALS,
)
THRESHOLD = _family(
    "threshold",
    "gauge",
    "A threshold of the stop lines, from the configuration, for alert rules to compare with.",
    "line",
)
SOURCE_UP = _family(
    "source_up",
    "gauge",
    "1 if the last attempt to read this source worked.",
    "source",
)
SOURCE_SUCCESS = _family(
    "source_last_success_timestamp_seconds",
    "gauge",
    "Unix time of the last attempt that worked; absent until the first.",
    "source",
)
SOURCE_SECONDS = _family(
    "source_poll_duration_seconds",
    "gauge",
    "How long the last attempt took.",
    "source",
)
SOURCE_ERROR = _family(
    "source_error",
    "gauge",
    "1 with the reason for which the source cannot be read now.",
    "source",
    "reason",
)
LOG_LINES = _family(
    "log_lines_total",
    "counter",
    "Complete lines read while following the log.",
    "source",
)
LOG_BYTES = _family(
    "log_bytes_total",
    "counter",
    "Bytes read while following the log.",
    "source",
)
LOG_MATCHED = _family(
    "log_matched_total",
    "counter",
    "Lines that a pattern of the profile understood.",
    "source",
    "pattern",
)
LOG_UNPARSED = _family(
    "log_unparsed_total",
    "counter",
    "Lines that carry what a pattern looks for and yet do not fit it: a sign that the format changed.",
    "source",
)
LOG_ROTATIONS = _family(
    "log_rotations_total",
    "counter",
    "Times the path led to a new file.",
    "source",
)
LOG_TRUNCATIONS = _family(
    "log_truncations_total",
    "counter",
    "Times the file was cut or overwritten in place.",
    "source",
)
LOG_DROPPED = _family(
    "log_dropped_bytes_total",
    "counter",
    "Bytes left out: the rest of over-long lines and of lines flushed before their end.",
    "source",
)
LOG_LAG = _family(
    "log_lag_bytes",
    "gauge",
    "Bytes of the file not read yet.",
    "source",
)
LOG_LAST_LINE = _family(
    "log_last_line_timestamp_seconds",
    "gauge",
    "Unix time at which the last line was read; absent until the first.",
    "source",
)
METRIC_MISSING = _family(
    "upstream_metric_missing",
    "gauge",
    "1 for a metric that this engine should have and its page does not.",
    "metric",
)
SERIES_DROPPED = _family(
    "series_dropped_total",
    "counter",
    "Values left out, by the family they were for: over the cap of label values, not a number, negative, as large "
    "as an uptime, more of the KV cache than there is, or of a request that ended in an unknown way.",
    "family",
)
RELOAD_OK = _family(
    "config_last_reload_successful",
    "gauge",
    "1 if the configuration in use is the one on disk; 0 after an edit that could not be read.",
)
BUILD_INFO = _family(
    "build_info",
    "gauge",
    "1, with the version of Stopline.",
    "version",
)

FAMILIES: tuple[Family, ...] = tuple(f for f in list(globals().values()) if isinstance(f, Family))
EVENTS = (REQUESTS, PREEMPTIONS, ERRORS)
"""What may never happen, and is to be seen when it happens for the first time."""
DOING = (RUNNING, WAITING, KV_USAGE)
"""What an engine is doing at this moment."""
BY_SHORT = {f.short: f for f in FAMILIES}

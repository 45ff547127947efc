"""vLLM 0.32's /metrics page for the simulated engine: names, labels, bounds and moments of observation.

As recorded from a real server (tests/fixtures/vllm/0.32.0-hy3/metrics-queueing.txt), traps included:

- tokens and the time to first token count while a request runs, everything else per request at its end;
- a request that was aborted or lost to an error is in no success counter and no per-request histogram;
- the gauges are those of the end of the last step, and stay so when the engine is dead;
- the prompt counts once, at its first token; computing it again after a preemption does not count.

Left out: process_* but the start time, python_*, and the HTTP families but the number and the duration of requests.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from .config import EngineConfig
from .engine import Engine
from .exposition import Family, Histogram, Series
from .records import Event, Observer, RequestRecord

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"

REQUEST_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
HTTP_BOUNDS = (0.1, 0.5, 1.0)
STEP_TOKEN_BOUNDS = (1.0, *(float(2**power) for power in range(3, 15)))


class _Scalar(NamedTuple):
    """A counter or gauge; the name without vllm: and _total, *values* those of the extra *label*."""

    kind: str
    name: str
    documentation: str
    label: str = ""
    values: tuple[str, ...] = ("",)


_REASONS = ("stop", "length", "abort", "error", "repetition")
_REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
_TIERS = ("device", "host", "p2p", "disk", "external_unspecified")

_SCALARS = (
    _Scalar("counter", "estimated_flops_per_gpu", "Estimated number of floating point operations per GPU."),
    _Scalar("counter", "estimated_read_bytes_per_gpu", "Estimated number of bytes read from memory per GPU."),
    _Scalar("counter", "estimated_write_bytes_per_gpu", "Estimated number of bytes written per GPU."),
    _Scalar("gauge", "num_requests_running", "Number of requests in model execution batches."),
    _Scalar("gauge", "num_requests_waiting", "Number of requests waiting to be processed."),
    _Scalar(
        "gauge",
        "num_requests_waiting_by_reason",
        "Waiting requests by reason.",
        "reason",
        ("capacity", "deferred"),
    ),
    _Scalar("gauge", "engine_sleep_state", "awake = 1 means engine is awake.", "sleep_state", _SLEEP_STATES),
    _Scalar("gauge", "kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage."),
    _Scalar("counter", "prefix_cache_queries", "Prefix cache queries, in number of queried tokens."),
    _Scalar("counter", "prefix_cache_hits", "Prefix cache hits, in number of cached tokens."),
    _Scalar("counter", "external_prefix_cache_queries", "Queries from the KV connector, in tokens."),
    _Scalar("counter", "external_prefix_cache_hits", "Hits from the KV connector, in tokens."),
    _Scalar("counter", "mm_cache_queries", "Multi-modal cache queries, in number of queried items."),
    _Scalar("counter", "mm_cache_hits", "Multi-modal cache hits, in number of cached items."),
    _Scalar("counter", "num_preemptions", "Cumulative number of preemption from the engine."),
    _Scalar("counter", "prompt_tokens", "Number of prefill tokens processed."),
    _Scalar("counter", "prompt_tokens_by_source", "Number of prompt tokens by source.", "source", _SOURCES),
    _Scalar("counter", "prompt_tokens_cached", "Number of cached prompt tokens (local + external)."),
    _Scalar("counter", "prompt_tokens_cached_by_source", "Cached tokens by cache tier.", "source", _TIERS),
    _Scalar("counter", "generation_tokens", "Number of generation tokens processed."),
    _Scalar("counter", "request_success", "Successfully processed requests.", "finished_reason", _REASONS),
    _Scalar("counter", "admission_rejections", "Rejected by a queue limit.", "reason", _REJECTIONS),
)


def token_bounds(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to *most*."""
    bounds = (float(digit * 10**power) for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= most)


class Page(Observer):
    """Attaches itself to *engine*.  *epoch* is the Unix time at which the engine's clock was 0.

    *request_bounds* are those of the times of a request but its first token: another engine's, if need be.
    """

    def __init__(self, engine: Engine, epoch: float = 0.0, request_bounds: Sequence[float] = REQUEST_BOUNDS) -> None:
        self._engine, self._epoch, self._request_bounds = engine, epoch, request_bounds
        self._reset()
        engine.attach(self)

    def _reset(self) -> None:
        """A new process: everything that is known beforehand exists at 0."""
        self._families: list[Family] = []
        self._labels = {"engine": "0", "model_name": self._engine.config.model}
        self._started = self._epoch + self._engine.now
        self._scalars: dict[tuple[str, str], Series] = {}
        self._prompt_tokens_this_step = 0
        start = self._family("gauge", "process_start_time_seconds", "Start time since unix epoch in seconds.")
        start.series().value = self._started
        self._add_scalars()
        self._add_histograms()
        info = self._family("gauge", "vllm:cache_config_info", "Information of the LLMEngine CacheConfig")
        info.series(**_cache_config(self._engine.config)).value = 1.0
        self._http = self._family("counter", "http_requests_total", "Total number of requests by handler.")
        self._http_series: dict[tuple[str, str, int], Series] = {}
        self._http_seconds = self._family("histogram", "http_request_duration_seconds", "Duration of HTTP requests.")
        self._http_durations: dict[str, Histogram] = {}

    def _family(self, kind: str, name: str, documentation: str) -> Family:
        family = Family(name, kind, documentation, self._started)
        self._families.append(family)
        return family

    def _add_scalars(self) -> None:
        for kind, name, documentation, label, values in _SCALARS:
            full_name = f"vllm:{name}_total" if kind == "counter" else f"vllm:{name}"
            family = self._family(kind, full_name, documentation)
            labels = dict(self._labels)
            if name == "admission_rejections":
                del labels["engine"]  # counted by the API server, before any engine
            for value in values:
                extra = {label: value} if label else {}
                self._scalars[name, value] = family.series(**labels, **extra)
        self._scalars["engine_sleep_state", "awake"].value = 1.0

    def _add_histograms(self) -> None:
        def add(name: str, documentation: str, bounds: Sequence[float]) -> Histogram:
            return self._family("histogram", f"vllm:{name}", documentation).histogram(bounds, **self._labels)

        tokens = token_bounds(self._engine.config.max_model_len)
        bounds = self._request_bounds
        few = (1.0, 2.0, 5.0, 10.0, 20.0)
        self._prompt = add("request_prompt_tokens", "Number of prefill tokens processed.", tokens)
        self._generation = add("request_generation_tokens", "Number of generation tokens.", tokens)
        self._iteration = add("iteration_tokens_total", "Number of tokens per engine_step.", STEP_TOKEN_BOUNDS)
        self._most = add("request_max_num_generation_tokens", "Maximum number of requested tokens.", tokens)
        self._n = add("request_params_n", "Histogram of the n request parameter.", few)
        self._max_tokens = add("request_params_max_tokens", "The max_tokens request parameter.", tokens)
        self._first = add("time_to_first_token_seconds", "Time to first token in seconds.", FIRST_TOKEN_BOUNDS)
        self._gap = add("inter_token_latency_seconds", "Inter-token latency in seconds.", TOKEN_GAP_BOUNDS)
        self._mean_gap = add(
            "request_time_per_output_token_seconds", "Time per output token per request.", TOKEN_GAP_BOUNDS
        )
        self._latency = add("e2e_request_latency_seconds", "E2e request latency in seconds.", bounds)
        self._queue = add("request_queue_time_seconds", "Time spent in WAITING phase.", bounds)
        self._inference = add("request_inference_time_seconds", "Time spent in RUNNING phase.", bounds)
        self._prefill = add("request_prefill_time_seconds", "Time spent in PREFILL phase.", bounds)
        self._decode = add("request_decode_time_seconds", "Time spent in DECODE phase.", bounds)
        self._preemptions = add("request_num_preemptions", "Preemptions per request.", (1, 2, 3, 4, 5, 10, 20))
        self._computed = add("request_prefill_kv_computed_tokens", "KV tokens computed in prefill.", tokens)

    def count_http(self, path: str, status: int, method: str = "POST") -> None:
        """Called for each answer that was no request to the engine; the others are counted as they end."""
        key = (path, method, status // 100)
        if key not in self._http_series:
            labels = {"handler": path, "method": method, "status": f"{status // 100}xx"}
            self._http_series[key] = self._http.series(**labels)
        self._http_series[key].value += 1

    def _time_http(self, record: RequestRecord) -> None:
        path = record.request.path
        if path not in self._http_durations:
            self._http_durations[path] = self._http_seconds.histogram(HTTP_BOUNDS, handler=path, method="POST")
        self._http_durations[path].observe((record.finished or record.arrival) - record.arrival)

    def count_broken(self) -> None:
        """Called for a stream that ended early, after its 200, and is not one of the engine's."""
        self._scalars["request_success", "error"].value += 1

    def render(self) -> str:
        gauges = self._engine.published
        self._scalars["num_requests_running", ""].value = gauges.running
        self._scalars["num_requests_waiting", ""].value = gauges.waiting
        self._scalars["num_requests_waiting_by_reason", "capacity"].value = gauges.waiting
        self._scalars["kv_cache_usage_perc", ""].value = gauges.kv_usage
        return "\n".join(line for family in self._families for line in family.lines()) + "\n"

    def on_scheduled(self, record: RequestRecord) -> None:
        self._scalars["prefix_cache_queries", ""].value += record.prompt_tokens

    def on_first_token(self, record: RequestRecord) -> None:
        self._first.observe(record.time_to_first_token or 0.0)
        self._scalars["prompt_tokens", ""].value += record.prompt_tokens
        self._scalars["prompt_tokens_by_source", "local_compute"].value += record.prompt_tokens
        self._prompt_tokens_this_step += record.prompt_tokens

    def on_tokens(self, records: Sequence[RequestRecord], gaps: Sequence[float]) -> None:
        self._scalars["generation_tokens", ""].value += len(records)
        self._iteration.observe(self._prompt_tokens_this_step + len(records))
        self._prompt_tokens_this_step = 0
        for gap, times in Counter(gaps).items():  # nearly all are the step's
            self._gap.observe(gap, times)

    def on_preempt(self, record: RequestRecord) -> None:
        self._scalars["num_preemptions", ""].value += 1

    def on_finish(self, record: RequestRecord) -> None:
        self.count_http(record.request.path, record.http_status)
        self._time_http(record)
        if record.finish_reason == "queue_full":
            self._scalars["admission_rejections", "max_num_queued_reqs"].value += 1
        if record.completed:
            self._completed(record)

    def on_event(self, event: Event) -> None:
        if event == "start":
            self._reset()

    def _completed(self, record: RequestRecord) -> None:
        self._scalars["request_success", record.finish_reason or ""].value += 1
        decode = record.decode_seconds or 0.0
        self._latency.observe(record.latency or 0.0)
        self._queue.observe(record.queue_wait or 0.0)
        self._inference.observe(record.inference_seconds or 0.0)
        self._prefill.observe(record.prefill_seconds or 0.0)
        self._decode.observe(decode)
        self._mean_gap.observe(decode / max(record.generated_tokens - 1, 1))
        self._prompt.observe(record.prompt_tokens)
        self._computed.observe(record.prompt_tokens)
        self._generation.observe(record.generated_tokens)
        self._most.observe(record.max_tokens)
        self._max_tokens.observe(record.max_tokens)
        self._n.observe(1)
        self._preemptions.observe(record.preemptions)


def _cache_config(config: EngineConfig) -> dict[str, str]:
    """The labels of vllm:cache_config_info that say something; the real one has twenty more."""
    return {
        "block_size": str(config.block_size),
        "cache_dtype": "auto",
        "enable_prefix_caching": "True",
        "engine": "0",
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
        "kv_cache_max_concurrency": f"{config.kv_tokens / config.max_model_len:.2f}",
        "kv_cache_memory_bytes": str(config.kv_bytes),
        "kv_cache_size_tokens": str(config.kv_tokens),
        "num_cpu_blocks": "None",
        "num_gpu_blocks": str(config.kv_blocks),
        "num_gpu_blocks_override": "None",
    }

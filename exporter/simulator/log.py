"""vLLM's log for the simulated engine, a line at a time as things happen.

Exact shapes, with the traps that go with them: the stats line comes every 10 s only while something is going
on (and once more after), preemptions and queueing never reach it, an abort leaves a line only with
`--enable-log-requests`, and a request's prompt can put any text into the file.
"""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from .engine import Engine
from .failures import failing, hanging, output_handler_failed, stream_broken
from .lines import Line, api, bare, physical, pids
from .records import Event, Observer, RequestRecord, StepRecord
from .startup import starting, stopping

STATS_SECONDS = 10.0  # VLLM_LOG_STATS_INTERVAL
HANG_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """vLLM's flags that decide what is logged."""

    requests: bool = False  # --enable-log-requests
    prompts: bool = False  # the same at log level DEBUG
    iterations: bool = False  # --enable-logging-iteration-details
    access: bool = True  # not --disable-uvicorn-access-log
    host: str = "127.0.0.1"
    port: int = 8000


class Log(Observer):
    """Attaches itself to *engine* and begins with the start-up lines.

    *write* gets text ending in a newline; *epoch* is the Unix time at which the engine's clock was 0.
    """

    def __init__(
        self,
        engine: Engine,
        write: Callable[[str], object],
        options: LogOptions | None = None,
        epoch: float = 0.0,
    ) -> None:
        self._engine, self._write, self._epoch = engine, write, epoch
        self._options = options or LogOptions()
        self._pids = pids(engine.config)
        self._prompt_tokens = self._generated_tokens = 0  # since the last stats line
        self._was_active = False
        engine.attach(self)
        engine.call_at(engine.now + STATS_SECONDS, self._stats)
        self._say(starting(engine.config, self._options.host, self._options.port))

    def access(self, client: str, method: str, path: str, status: int) -> None:
        """uvicorn's line; called for each answer that was no request to the engine."""
        if self._options.access:
            phrase = HTTPStatus(status).phrase
            self._say([bare(f'INFO:     {client} - "{method} {path} HTTP/1.1" {status} {phrase}')])

    def on_arrival(self, record: RequestRecord) -> None:
        if self._options.prompts:
            prompt = f"prompt: {record.request.prompt!r}, prompt_token_ids: None, prompt_embeds shape: None."
            self._say([api("request_logger.py:53", f"Request {record.id} details: {prompt}", "DEBUG")])
        if self._options.requests:
            params = _sampling_params(record)
            text = f"Received request {record.id}: params: {params}, lora_request: None."
            self._say([api("request_logger.py:65", text)])
        if record.request.stream:
            self._answered(record)
        if self._options.requests:
            self._say([api("async_llm.py:578", f"Added request {_internal_id(record)}.")])

    def on_first_token(self, record: RequestRecord) -> None:
        self._prompt_tokens += record.prompt_tokens

    def on_tokens(self, records: Sequence[RequestRecord], gaps: Sequence[float]) -> None:
        self._generated_tokens += len(records)

    def on_finish(self, record: RequestRecord) -> None:
        if self._engine.state == "stopped":
            return  # nobody is there to say it
        streaming = record.accepted and record.request.stream
        if record.finish_reason == "abort":
            if self._options.requests:
                self._say([api("async_llm.py:922", f"Aborted request(s) {_internal_id(record)}.")])
                self._say([api("async_llm.py:783", f"Request {record.id} aborted.")])
        elif not streaming:
            self._answered(record)
        elif record.finish_reason == "error":
            self._say([stream_broken(record.request.path)])

    def on_step(self, step: StepRecord) -> None:
        if self._options.iterations:
            text = (
                f"Engine 000: Iteration({step.index}): {step.prefill_requests} context requests, "
                f"{step.prefill_tokens} context tokens, {step.decode_requests} generation requests, "
                f"{step.decode_requests} generation tokens, "
                f"iteration elapsed time: {step.seconds * 1e3:.2f} ms, "
                f"GPU KV cache usage: {self._engine.published.kv_usage:.1%}"
            )
            self._say([api("loggers.py:199", text)])

    def on_event(self, event: Event) -> None:
        config = self._engine.config
        if event == "start":
            self._say(starting(config, self._options.host, self._options.port))
        elif event == "stop":
            self._say(stopping(config, output_handler_failed()))
        elif event == "hang":
            self._engine.call_at(self._engine.now + HANG_SECONDS, self._still_hanging)
        elif event != "kv_small":
            self._say(failing(event, config, self._engine.published))

    def _still_hanging(self) -> None:
        if self._engine.state == "hung":
            self._say([hanging()])
            self._engine.call_at(self._engine.now + HANG_SECONDS, self._still_hanging)

    def _stats(self) -> None:
        """Silent when idle for two intervals, and when there is no server."""
        active = bool(self._prompt_tokens or self._generated_tokens)
        if (active or self._was_active) and self._engine.state != "stopped":
            gauges = self._engine.published
            text = (
                f"Engine 000: Avg prompt throughput: {self._prompt_tokens / STATS_SECONDS:.1f} tokens/s, "
                f"Avg generation throughput: {self._generated_tokens / STATS_SECONDS:.1f} tokens/s, "
                f"Running: {gauges.running} reqs, Waiting: {gauges.waiting} reqs, "
                f"GPU KV cache usage: {gauges.kv_usage:.1%}, Prefix cache hit rate: 0.0%"
            )
            self._say([api("loggers.py:335", text)])
        self._was_active = active
        self._prompt_tokens = self._generated_tokens = 0
        self._engine.call_at(self._engine.now + STATS_SECONDS, self._stats)

    def _answered(self, record: RequestRecord) -> None:
        self.access(record.request.client, "POST", record.request.path, record.http_status)

    def _say(self, lines: Iterable[Line]) -> None:
        now = self._epoch + self._engine.now
        texts = [text for line in lines for text in physical(line, now, self._pids)]
        self._write("\n".join(texts) + "\n")


def _internal_id(record: RequestRecord) -> str:
    """The id the engine uses: the client's and eight digits."""
    return f"{record.id}-{zlib.crc32(record.id.encode()):08x}"


def _sampling_params(record: RequestRecord) -> str:
    ignores_eos = record.request.output_tokens >= record.max_tokens
    return (
        "SamplingParams(n=1, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, "
        "temperature=1.0, watermarking=None, top_p=1.0, top_k=0, min_p=0.0, seed=None, stop=[], "
        "stop_token_ids=[], bad_words=[], thinking_token_budget=None, include_stop_str_in_output=False, "
        f"ignore_eos={ignores_eos}, max_tokens={record.max_tokens}, min_tokens=0, logprobs=None, "
        "prompt_logprobs=None, skip_special_tokens=True, spaces_between_special_tokens=True, "
        "structured_outputs=None, extra_args=None)"
    )

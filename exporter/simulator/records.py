"""The words of the simulator: what is asked, what became of it, and who is told.

Times are seconds on the engine's clock, which starts at 0; None is "never happened".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error", "queue_full", "too_long"]
Phase = Literal["prefill", "decode", "mixed"]
Event = Literal[
    "out_of_memory",
    "cuda",
    "collective",
    "timeout",
    "engine_dead",
    "worker_dead",
    "hang",
    "kv_small",
    "stop",
    "start",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a client asks.  *output_tokens* is where the model would end by itself."""

    prompt_tokens: int
    output_tokens: int
    max_tokens: int | None = None  # None: whatever the model's length leaves
    abort_after: float | None = None  # the client hangs up so many seconds after arrival
    stream: bool = True
    path: str = "/v1/completions"
    prompt: str = ""  # only ever logged; may hold anything
    client: str = "127.0.0.1:40000"

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1 or (self.max_tokens or 1) < 1:
            raise ValueError("a request has at least one prompt token and one output token")


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The truth about one request; complete once finish_reason is set.

    *queued* is when the engine core took the request, between two steps.  vLLM measures its queue time from
    there: what is left of the step during which a request arrives is in its time to first token and its
    latency, but not in its queue wait.  An unloaded vLLM shows 20 to 40 us (its spans, time_in_queue).
    """

    request: Request
    id: str
    model: str
    max_tokens: int
    arrival: float
    accepted: bool = False
    queued: float | None = None
    scheduled: float | None = None  # the first time
    first_token: float | None = None
    finished: float | None = None
    generated_tokens: int = 0  # final only when finished
    finish_reason: FinishReason | None = None
    preemptions: int = 0

    @property
    def prompt_tokens(self) -> int:
        return self.request.prompt_tokens

    @property
    def completed(self) -> bool:
        """It ran to its end: what vLLM counts as a success and enters into its per-request histograms."""
        return self.finish_reason in ("stop", "length")

    @property
    def queue_wait(self) -> float | None:
        return _between(self.queued, self.scheduled)

    @property
    def time_to_first_token(self) -> float | None:
        return _between(self.arrival, self.first_token)

    @property
    def prefill_seconds(self) -> float | None:
        return _between(self.scheduled, self.first_token)

    @property
    def decode_seconds(self) -> float | None:
        return _between(self.first_token, self.finished)

    @property
    def inference_seconds(self) -> float | None:
        return _between(self.scheduled, self.finished)

    @property
    def latency(self) -> float | None:
        return _between(self.arrival, self.finished)

    @property
    def http_status(self) -> int:
        """What the client was answered.  A stream that breaks has said 200 already."""
        if self.finish_reason == "too_long":
            return 400
        if self.finish_reason == "queue_full":
            return 503
        if self.finish_reason == "error" and not (self.accepted and self.request.stream):
            return 500
        return 200


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The truth about one engine step; the requests and tokens are those it was planned with."""

    index: int
    start: float
    seconds: float
    prefill_requests: int
    prefill_tokens: int
    decode_requests: int

    @property
    def phase(self) -> Phase:
        if not self.prefill_requests:
            return "decode"
        return "mixed" if self.decode_requests else "prefill"


@dataclass(frozen=True, slots=True)
class Gauges:
    """The scheduler's own view, which vLLM publishes at the end of a step and not in between."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # ratio 0..1


class Observer:
    """Told everything as it happens, in the order it happens; overrides what it needs.

    Within one step: first tokens, tokens, finishes, the step.
    """

    def on_arrival(self, record: RequestRecord) -> None:
        """It was accepted; a refused request is only told to on_finish."""

    def on_scheduled(self, record: RequestRecord) -> None:
        """For the first time."""

    def on_first_token(self, record: RequestRecord) -> None: ...

    def on_tokens(self, records: Sequence[RequestRecord], gaps: Sequence[float]) -> None:
        """Each of *records* got one token; *gaps* are the seconds since their last, where there was one."""

    def on_preempt(self, record: RequestRecord) -> None: ...

    def on_finish(self, record: RequestRecord) -> None:
        """Exactly once for every request, refused ones included."""

    def on_step(self, step: StepRecord) -> None: ...

    def on_event(self, event: Event) -> None:
        """A fault, a planned stop or a new start; before what it does to the requests in flight."""


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start

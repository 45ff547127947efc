"""What really happened: every request and every step, exact quantiles, JSON lines."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import IO, Literal

from .engine import Engine
from .records import Observer, RequestRecord, StepRecord

Signal = Literal["queue_wait", "time_to_first_token", "latency"]


class Truth(Observer):
    """Attaches itself to *engine*; of a request that is there already it cannot tell the concurrency."""

    def __init__(self, engine: Engine) -> None:
        self.requests: list[RequestRecord] = []  # finished, in the order they finished
        self.steps: list[StepRecord] = []
        self._engine = engine
        self._concurrency: dict[str, float] = {}
        self._area = 0.0  # requests in the engine, integrated over time
        self._since = engine.now
        self._present = 0
        self._began: dict[str, float] = {}
        engine.attach(self)

    def on_arrival(self, record: RequestRecord) -> None:
        self._count(+1)
        self._began[record.id] = self._area

    def on_finish(self, record: RequestRecord) -> None:
        self.requests.append(record)
        if record.id in self._began:
            self._count(-1)
            area = self._area - self._began.pop(record.id)
            if record.latency:
                self._concurrency[record.id] = area / record.latency

    def on_step(self, step: StepRecord) -> None:
        self.steps.append(step)

    def concurrency(self, record: RequestRecord) -> float | None:
        """Requests in the engine, itself included, averaged over its life; None if it had no length."""
        return self._concurrency.get(record.id)

    def values(self, signal: Signal) -> list[float]:
        """Seconds, of the completed requests in the order they finished: what the engine's histograms hold.

        The time to first token is that of every request which had one.
        """
        chosen = (r for r in self.requests if r.completed or signal == "time_to_first_token")
        return [value for record in chosen if (value := getattr(record, signal)) is not None]

    def quantile(self, signal: Signal, q: float) -> float:
        return exact_quantile(self.values(signal), q)

    def write(self, file: IO[str]) -> None:
        """One JSON object a line: the requests by arrival, then the steps."""
        for record in sorted(self.requests, key=lambda record: record.arrival):
            print(json.dumps(self._row(record)), file=file)
        for step in self.steps:
            print(json.dumps({"type": "step"} | asdict(step) | {"phase": step.phase}), file=file)

    def _row(self, record: RequestRecord) -> dict[str, object]:
        row = {name: getattr(record, name) for name in _FIELDS}
        return {"type": "request"} | row | {"concurrency": self.concurrency(record)}

    def _count(self, change: int) -> None:
        now = self._engine.now
        self._area += self._present * (now - self._since)
        self._since = now
        self._present += change


_FIELDS = (
    *("id", "model", "arrival", "queued", "scheduled", "first_token", "finished"),
    *("queue_wait", "time_to_first_token", "latency"),
    *("prompt_tokens", "generated_tokens", "finish_reason", "preemptions"),
)


def exact_quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least the ratio *q* of all values do not exceed; nan without values."""
    if not values:
        return math.nan
    return sorted(values)[max(math.ceil(q * len(values)) - 1, 0)]

"""A ramp's verdict as metrics, for the textfile collector of node_exporter: ``--collector.textfile.directory``."""

import math
import time
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, write_to_textfile

from exporter.load.result import Run

LINES = ("latency", "errors", "memory")


def write(path: Path, run: Run, now: float | None = None) -> None:
    """Replace the file at *path* at once; *now* is Unix time. Raises OSError."""
    registry = CollectorRegistry(auto_describe=False)
    model = run.identity.get("model") or str(run.conditions.get("model", ""))

    def gauge(name: str, help: str, *labels: str) -> Gauge:
        return Gauge(f"stopline_ramp_{name}", help, ("model", *labels), registry=registry)

    verdict = run.verdict
    moment = gauge("timestamp_seconds", "Unix time at which the ramp ended.")
    moment.labels(model).set(time.time() if now is None else now)
    limit = gauge("concurrency_limit", "Highest concurrency that crossed no stop line; 0 if none did not.")
    limit.labels(model).set((verdict.good if verdict else None) or 0)
    finished = gauge("finished", "1 if the ramp came to an answer, 0 if it was ended before.")
    finished.labels(model).set(verdict is not None and verdict.finished)
    tripped = gauge("tripped", "1 for the stop line that ended the ramp, 0 for the others.", "line")
    for line in LINES:
        crossed = verdict is not None and verdict.tripped is not None and verdict.tripped.line == line
        tripped.labels(model, line).set(crossed)
    latency = gauge("latency_seconds", "Latency of a request by concurrency.", "concurrency", "percentile")
    rate = gauge("requests_per_second", "Answers by concurrency.", "concurrency")
    tokens = gauge("tokens_per_second", "Generated tokens by concurrency.", "concurrency")
    failed = gauge("errors", "Failed requests by concurrency.", "concurrency")
    for level in run.levels:
        at = str(level.concurrency)
        for q, value in (("50", level.latency.p50), ("95", level.latency.p95), ("99", level.latency.p99)):
            if value is not None:
                latency.labels(model, at, q).set(value)
        for family, value in ((rate, level.requests_per_second), (tokens, level.tokens_per_second)):
            if value is not None and math.isfinite(value):
                family.labels(model, at).set(value)
        failed.labels(model, at).set(sum(level.errors.values()))
    write_to_textfile(str(path), registry)

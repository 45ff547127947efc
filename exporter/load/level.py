"""Many requests of one level of concurrency as one row of numbers."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from exporter.load.result import Client, Engine, Level, Quantiles, Request


@dataclass(slots=True)
class Pass:
    """One measurement of a level."""

    concurrency: int
    requests: list[Request]
    """Measured, in any order."""
    others: list[Request] = field(default_factory=list)
    """Before and after them: they count for the throughput where they ended in the time it is of."""
    engine: Engine | None = None
    client: Client | None = None
    complete: bool = True


def summary(passes: Sequence[Pass]) -> Level:
    """All *passes* of one level together. A failed request counts as infinite in the quantiles of its latency.

    The throughput is of the time from the first measured request's begin to the last one's end, in which all clients
    are busy: what was answered then, whoever it was for.
    """
    requests = [request for p in passes for request in p.requests]
    latencies = [r.latency if not r.error else math.inf for r in requests]
    windows = [_window(p) for p in passes]
    seconds = math.fsum(window.seconds for window in windows)
    generated = sum(window.tokens for window in windows)
    return Level(
        concurrency=passes[0].concurrency,
        requests=len(requests),
        passes=len(passes),
        seconds=seconds,
        latency=Quantiles.of(latencies),
        first_token=Quantiles.of(_known([r.first_token for r in requests], requests)),
        inter_token=Quantiles.of([r.inter_token for r in requests if r.inter_token is not None]),
        requests_per_second=sum(window.answers for window in windows) / seconds if seconds else None,
        tokens_per_second=generated / seconds if seconds and generated else None,
        errors=dict(Counter(r.error for r in requests if r.error)),
        engine=passes[-1].engine,
        client=_client([p.client for p in passes if p.client is not None]),
        complete=all(p.complete for p in passes),
        latencies=latencies,
    )


def steady(passes: Sequence[Pass]) -> Level:
    """The one of *passes* with the middle P99, of two the lower one's; all of them if a request of the last failed.

    A stall of the machine in one of several passes is in its own P99 only, and in that of all of them together.
    """
    if any(request.error for request in passes[-1].requests):
        return summary(passes)
    levels = sorted((summary([p]) for p in passes), key=lambda level: level.latency.p99 or 0.0)
    return msgspec.structs.replace(levels[(len(levels) - 1) // 2], passes=len(passes))


@dataclass(frozen=True, slots=True)
class _Window:
    seconds: float
    answers: int
    tokens: int


def _window(measured: Pass) -> _Window:
    """What was answered while all clients were busy."""
    if not measured.requests:
        return _Window(0.0, 0, 0)
    begin, end = min(r.start for r in measured.requests), max(r.end for r in measured.requests)
    ended = [r for r in (*measured.requests, *measured.others) if begin < r.end <= end and not r.error]
    return _Window(end - begin, len(ended), sum(r.generated_tokens for r in ended))


def _known(values: Sequence[float | None], requests: Sequence[Request]) -> list[float]:
    """*values* with infinity for a request that failed before it had one; nothing if no request has one."""
    if all(value is None for value in values):
        return []
    pairs = zip(values, requests, strict=True)
    return [math.inf if value is None else value for value, request in pairs if value is not None or request.error]


def _client(clients: Sequence[Client]) -> Client | None:
    """The worst of all passes."""
    if not clients:
        return None
    return Client(max(c.cpu_share for c in clients), max(c.lag_p99 for c in clients), any(c.limited for c in clients))

"""Why latency grew: requests wait in the queue, or the step itself got slower.

Told by the sidecar where there is one. Without it by what the client sees: the time to the first token for the queue,
the time between tokens for the step.
"""

from exporter.load.result import Level, Quantiles

_QUEUE_GREW = 0.2  # by so much of the baseline's P99
_STEP_GREW = 1.2  # times the baseline's


def cause(level: Level, baseline: Level) -> str:
    """In words, such as ``queue grows, step flat``; empty where nothing tells."""
    queue, step = _queue(level, baseline), _step(level, baseline)
    if queue is None and step is None:
        return ""
    told = [] if queue is None else ["queue grows" if queue >= _QUEUE_GREW else "queue flat"]
    told += [] if step is None else ["step grows" if step >= _STEP_GREW else "step flat"]
    seen = "" if level.engine is not None and level.engine.queue_wait.p99 is not None else " (seen by the client)"
    return ", ".join(told) + seen


def _queue(level: Level, baseline: Level) -> float | None:
    """By how much of the baseline's latency the waits grew, the longest or the usual ones, whichever is more.

    Few wait first, and they make the P99; but one stall at the baseline makes its P99, and then the median tells.
    """
    now, then, whole = _wait(level), _wait(baseline), baseline.latency
    grown = [
        (after - before) / of
        for after, before, of in ((now.p99, then.p99, whole.p99), (now.p50, then.p50, whole.p50))
        if after is not None and before is not None and of
    ]
    return max(grown, default=None)


def _wait(level: Level) -> Quantiles:
    if level.engine is not None and level.engine.queue_wait.p99 is not None:
        return level.engine.queue_wait
    return level.first_token


def _step(level: Level, baseline: Level) -> float | None:
    """A typical step over the baseline's."""
    now, then = _typical(level), _typical(baseline)
    return now / then if now is not None and then else None


def _typical(level: Level) -> float | None:
    if level.engine is not None:
        for phase in ("decode", "mixed"):
            if phase in level.engine.steps:
                return level.engine.steps[phase].p50
    return level.inter_token.p50

"""Why latency grew: requests wait in the queue, or the step itself got slower.

Told by the sidecar where there is one. Without it by what the client sees: the time to the first token for the queue,
the time between tokens for the step.
"""

from exporter.load.result import Level

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
    """By how much of the baseline's P99 the longest waits grew: few wait first, and they make the P99."""
    now, then, whole = _wait(level), _wait(baseline), baseline.latency.p99
    return (now - then) / whole if now is not None and then is not None and whole else None


def _wait(level: Level) -> float | None:
    if level.engine is not None and level.engine.queue_wait.p99 is not None:
        return level.engine.queue_wait.p99
    return level.first_token.p99


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

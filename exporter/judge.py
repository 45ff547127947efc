"""The three stop lines as the live page judges them: the rules of deploy/rules, by this replica's own numbers.

*tripped* here is what `stopline:tripped` is there: the same thresholds, windows, floors and quantiles, and like it
without the alerts' "for". The page adds *rising*, a line that is near or not yet confirmed, and *unknown*, for which
the rules have alerts of their own. What differs: increases are exact where Prometheus extrapolates between scrapes,
the baseline is this process' own (learned.py), and what Prometheus has from others (replicas together, dcgm-exporter)
is not here.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from exporter import catalog, remedies
from exporter.config import Thresholds
from exporter.history import STEP_SECONDS, Moments
from exporter.learned import NEEDED, Baseline
from exporter.remedies import Advice
from exporter.signals import Gauges, Labels, Reading

State = Literal["ok", "rising", "tripped", "unknown"]
Line = Literal["latency", "errors", "memory"]

FAST, SLOW, RECENT, HOLD = 300.0, 1800.0, 120.0, 60.0
"""Windows of the rules: to notice, to confirm, whether it is still so, and how long that is held."""
_EVALUATED = 30.0
_STALLED = 120.0
_UNANSWERED = 360.0
_SILENT = 180.0
_APPEARED = 3600.0
_LONGER = 4.0
_FAILED = ("out_of_memory", "cuda", "collective", "engine_dead")
_SERVER_SILENT = ("timeout", "unreachable", "broken", "refused")

_WORST: tuple[State, ...] = ("ok", "unknown", "rising", "tripped")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line. *value* and *threshold* are in *unit*; None where there is none.

    *says* is a sentence with the numbers; *reasons* are the rules that say so, in the words of the rules' labels.
    *model* or *gpu* is the worst one, which the numbers are of; *remedy* is what to do where it cannot be judged.
    *alert* is the rule's alert that fires if it stays so.
    """

    line: Line
    state: State
    says: str
    unit: Literal["seconds", "errors", "bytes", "ratio"]
    value: float | None = None
    threshold: float | None = None
    warning: float | None = None
    baseline: float | None = None
    baseline_source: Literal["pinned", "learned", "provisional", ""] = ""
    model: str = ""
    gpu: str = ""
    cause: str = ""
    reasons: tuple[str, ...] = ()
    alert: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is judged on. *now* is of the moments' clock, *wall* Unix time; *pace* divides every window.

    *calm* is how many calm requests of each model were seen; *gpus* is what GPUs told within two minutes;
    *last_success* and *last_error* are Unix times by source and by kind. *answers_told* and *work_told* say that this
    engine tells of answered requests, and of tokens or steps, at all; *served*, that it was up once. Of what was more
    than *watched* seconds ago nothing is known.
    """

    moments: Moments
    gauges: Gauges
    thresholds: Thresholds
    now: float
    wall: float
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    calm: Mapping[str, int] = field(default_factory=dict)
    gpus: Gauges = field(default_factory=dict)
    readings: Mapping[str, Reading] = field(default_factory=dict)
    last_error: Mapping[str, float] = field(default_factory=dict)
    last_success: Mapping[str, float] = field(default_factory=dict)
    answers_told: bool = True
    work_told: bool = True
    served: bool = True
    watched: float = math.inf
    pace: float = 1.0

    @property
    def up(self) -> bool:
        """Whether the engine is, or was a step ago and is not said to be dead: one missed answer is no outage."""
        return self.phase != "dead" and any(moment.up for moment in self.moments.all[-2:])

    def unread(self, *origins: str) -> list[Reading]:
        """Sources of these kinds that cannot be read, and could not for a step."""
        return [
            reading
            for reading in self.readings.values()
            if reading.origin in origins
            and not reading.ok
            and self.wall - self.last_success.get(reading.source, -math.inf) > STEP_SECONDS / self.pace
        ]

    @property
    def phase(self) -> str:
        return self.moments.all[-1].phase

    def quantile(self, model: str, q: float, window: float, ago: float = 0.0) -> float | None:
        """Of the request latency, in seconds."""
        until = self.now - ago / self.pace
        return self.moments.spread(catalog.LATENCY, model, window / self.pace, until).quantile(q)

    def requests(self, model: str, window: float, ago: float = 0.0) -> int:
        until = self.now - ago / self.pace
        return self.moments.spread(catalog.LATENCY, model, window / self.pace, until).count

    def increase(self, family: catalog.Family, window: float, **labels: str) -> float:
        return self.moments.increase(family, window / self.pace, self.now, **labels)


def judge(evidence: Evidence) -> tuple[Verdict, Verdict, Verdict]:
    """The lines, in the order latency, errors, memory."""
    return _latency(evidence), _errors(evidence), _memory(evidence)


# latency


def _latency(evidence: Evidence) -> Verdict:
    verdicts = [_latency_of(evidence, model) for model in evidence.moments.models(catalog.LATENCY)]
    if verdicts:
        return max(verdicts, key=lambda v: (_WORST.index(v.state), (v.value or 0.0) / (v.threshold or 1.0)))
    silent = Verdict("latency", "unknown", "", "seconds")
    if not evidence.up:
        return _unknown(silent, _not_up(evidence))
    if not evidence.phase:
        return replace(silent, says="No engine is watched.", remedy="Give engine.url and log.paths.")
    says = f"No request has ended {_during(evidence, SLOW, 'within the last half hour')}."
    return replace(silent, says=says, remedy="Nothing to do if nobody asks; else see the sources below.")


def _latency_of(evidence: Evidence, model: str) -> Verdict:
    limits, base = evidence.thresholds, evidence.baselines.get(model)
    p99 = evidence.quantile(model, 0.99, FAST)
    few = evidence.requests(model, SLOW)
    verdict = Verdict("latency", "unknown", "", "seconds", value=p99, model=model)
    if base is None:
        return replace(
            verdict,
            says=f"There is no baseline yet: {evidence.calm.get(model, 0)} of {NEEDED} requests at low concurrency "
            "were seen.",
            remedy="Wait, or pin one: baseline.pins. Prometheus may know one of the days before.",
        )
    line, warning = (
        max(base.seconds * times, base.seconds + limits.latency_floor_seconds)
        for times in (limits.latency_ratio, limits.latency_warning_ratio)
    )
    verdict = replace(
        verdict, threshold=line, warning=warning, baseline=base.seconds, baseline_source=base.source, says=""
    )
    tripped, rising = _over(evidence, model, line), evidence.up and _rising(evidence, model, line, warning)
    if tripped or rising:
        value = p99 if p99 is not None else evidence.quantile(model, 0.99, SLOW) or 0.0
        times = f"P99 is {value / base.seconds:.1f} times its baseline"
        return replace(
            verdict,
            state="tripped" if tripped else "rising",
            value=value,
            says=f"{times}; the line is at {line / base.seconds:.3g}." if tripped else f"{times} and rises.",
            cause=_cause(evidence, model, base, value),
            alert="StoplineLatencyDoubled" if tripped else "StoplineLatencyRising",
        )
    if not evidence.up:
        return _unknown(replace(verdict, value=None), _not_up(evidence))
    if few < limits.min_requests:
        return replace(
            verdict,
            says=f"Too few requests: {few} {_during(evidence, SLOW, 'within half an hour')}, "
            f"{limits.min_requests:g} are needed.",
            remedy="Nothing to do: it is judged as soon as there are enough.",
        )
    if p99 is None:
        return replace(verdict, state="ok", says="No request has ended within five minutes; the half hour was calm.")
    return replace(verdict, state="ok", says=f"P99 is {p99 / base.seconds:.1f} times its baseline.")


def _over(evidence: Evidence, model: str, line: float) -> bool:
    """Both windows say so, with enough requests, and it is still so; of few requests, a tenth of them say so."""

    def reaches(q: float, window: float, ago: float = 0.0) -> bool:
        value = evidence.quantile(model, q, window, ago)
        return value is not None and value >= line

    if _enough(evidence, model):
        return reaches(0.99, FAST) and reaches(0.99, SLOW) and _still(evidence, model) >= line
    many = evidence.requests(model, SLOW) >= evidence.thresholds.min_requests
    return many and reaches(0.9, FAST) and reaches(0.9, SLOW)


def _still(evidence: Evidence, model: str) -> float:
    """P99 of two minutes, the highest of the last one; where work is there and none ends, the last that was seen."""
    told = [evidence.quantile(model, 0.99, RECENT, n * _EVALUATED) for n in range(int(FAST / _EVALUATED) + 1)]
    held = [value for value in told[: int(HOLD / _EVALUATED) + 1] if value is not None]
    if held:
        return max(held)
    minute = evidence.moments.last(HOLD / evidence.pace, evidence.now)
    busy = all(moment.in_engine for moment in minute)
    return next((value for value in told if busy and value is not None), 0.0)


def _rising(evidence: Evidence, model: str, line: float, warning: float) -> bool:
    fast, slow = (evidence.quantile(model, 0.99, window) or 0.0 for window in (FAST, SLOW))
    return _enough(evidence, model) and (fast >= line or (fast >= warning and slow >= warning))


def _enough(evidence: Evidence, model: str) -> bool:
    """Requests for a P99 of five minutes, now or in the last five minutes."""
    times = range(int(FAST / _EVALUATED) + 1)
    return any(evidence.requests(model, FAST, n * _EVALUATED) >= evidence.thresholds.min_requests for n in times)


def _cause(evidence: Evidence, model: str, base: Baseline, value: float) -> str:
    """Which part of a request grew most; empty if none is known to."""
    scores = dict(_scores(evidence, model, base, value))
    return max(scores, key=lambda cause: scores[cause]) if scores else ""


def _scores(evidence: Evidence, model: str, base: Baseline, value: float) -> Iterator[tuple[str, float]]:
    """Each is the share of the growth that the part explains, 0 to 1; a full KV cache and communication stand above."""
    growth, times = value - base.seconds, value / base.seconds - 1
    if growth <= 0:
        return
    moments, window, now = evidence.moments, FAST / evidence.pace, evidence.now
    wait = moments.spread(catalog.QUEUE_WAIT, model, window, now).quantile(0.99)
    if wait is not None:
        yield "queue", _clamp((wait - (base.queue_wait or 0.0)) / growth)
    steps = moments.spread(catalog.STEP_LATENCY, model, window, now)
    mean, p99 = steps.mean, steps.quantile(0.99)
    slower = None
    if mean and base.step_mean:
        slower = mean / base.step_mean
    elif p99 and base.step:
        slower = p99 / base.step
    if slower is not None:
        step = _clamp((slower - 1) / times)
        yield "step", step
        seconds = moments.increase(catalog.STEP_SECONDS, window, now, model=model)
        share = moments.communicating(model, window, now) / seconds if seconds else 0.0
        grew = (
            mean is not None
            and base.step_mean is not None
            and base.communication is not None
            and share * mean - base.communication * base.step_mean > 0.5 * (mean - base.step_mean)
        )
        if share and (grew or share > evidence.thresholds.communication_ratio):
            yield "communication", 0.5 + step
    if ended := moments.increase(catalog.REQUESTS, window, now, model=model, outcome="ok"):
        tokens = {
            kind: moments.increase(catalog.TOKENS, window, now, model=model, kind=kind) / ended for kind in base.tokens
        }
        more = [tokens[kind] / base.tokens[kind] for kind in tokens if base.tokens[kind]]
        if more:
            explained = (max(more) - 1) / times
            yield "request_mix", 0.8 * _clamp(explained) + 0.4 * _clamp(explained - 1) * (max(more) >= _LONGER)
    if (_kv_full(evidence) or evidence.increase(catalog.PREEMPTIONS, FAST) >= 3) and not _no_place(evidence):
        yield "kv_cache", 2.0


def _no_place(evidence: Evidence) -> bool:
    """A place among the running requests is what is missing; more cache would not help."""
    most = evidence.gauges.get(catalog.ENGINE_LIMIT, {}).get(("max_running_requests",))
    running = evidence.moments.all[-1].running
    return most is not None and running is not None and running >= 0.95 * most


def _clamp(value: float) -> float:
    return min(1.0, max(0.0, value))


# errors


def _errors(evidence: Evidence) -> Verdict:
    limits = evidence.thresholds
    recent = _recent(evidence)
    failed5, failed30 = _failed(evidence, FAST, recent), _failed(evidence, SLOW, recent)
    answered5, answered30 = _answered(evidence, FAST), _answered(evidence, SLOW)
    over = _many_fail(limits, failed5, failed30, answered5, answered30)
    dead = [kind for kind in _FAILED if kind in recent] + list(_engine_failed(evidence))
    unanswered = _unanswered(evidence, failed5)
    stalled = _stalled(evidence, recent) or unanswered > 0
    appeared = _APPEARED / evidence.pace
    verdict = Verdict("errors", "ok", "", "errors", value=0.0, threshold=1.0)
    reasons = (*dict.fromkeys([*recent, *dead, *(["stalled"] if stalled else []), *(["ratio"] if over else [])]),)
    if reasons:
        said = [
            kind for kind in _FAILED if dead and evidence.wall - evidence.last_error.get(kind, -math.inf) < appeared
        ]
        return replace(
            verdict,
            state="tripped",
            value=failed5,
            says=_tells_errors(
                recent,
                said + dead,
                stalled=stalled,
                unanswered=unanswered,
                over=over,
                failed=failed5,
                answered=answered5,
            ),
            cause=(said or dead or (["stalled"] if stalled else []) or list(recent) or ["ratio"])[0],
            reasons=reasons,
            alert="StoplineEngineFailed"
            if dead
            else "StoplineEngineStalled"
            if stalled
            else "StoplineErrorRateHigh"
            if over
            else "StoplineErrorsAppeared",
        )
    if blind := evidence.unread("log", "metrics", "trace"):
        return _unknown(replace(verdict, value=None), _unread(blind, evidence))
    if not [r for r in evidence.readings.values() if r.origin != "gpu"]:
        says = "Neither a log nor a page has been read yet."
        return replace(verdict, state="unknown", value=None, says=says, remedy="Give engine.url and log.paths.")
    since = [at for at in evidence.last_error.values() if evidence.wall - at < appeared]
    if since:
        minutes = (evidence.wall - max(since)) / 60
        return replace(
            verdict,
            state="rising",
            says=f"None within five minutes; the last one was {minutes:.0f} minutes ago.",
            reasons=(*sorted(kind for kind, at in evidence.last_error.items() if at in since),),
            alert="StoplineErrorsAppeared",
        )
    alone = "" if any(r.origin == "log" for r in evidence.readings.values()) else ", by the page alone: no log is read"
    return replace(verdict, state="ok", says=f"None {_during(evidence, _APPEARED, 'within an hour')}{alone}.")


def _recent(evidence: Evidence) -> dict[str, float]:
    """Errors of the last five minutes by kind."""
    grown = {kind: evidence.increase(catalog.ERRORS, FAST, kind=kind) for kind in catalog.ERROR_KINDS}
    return {kind: amount for kind, amount in grown.items() if amount > 0}


def _failed(evidence: Evidence, window: float, recent: Mapping[str, float]) -> float:
    """Requests counted as failed, or errors told, whichever is more."""
    told = evidence.increase(catalog.ERRORS, window) or sum(recent.values())
    return max(told, evidence.increase(catalog.REQUESTS, window, outcome="error"))


def _answered(evidence: Evidence, window: float) -> float | None:
    """None where this engine does not tell."""
    if not evidence.answers_told:
        return None
    ok = evidence.increase(catalog.REQUESTS, window, outcome="ok")
    if ok:
        return ok
    spread = evidence.moments.spread(catalog.LATENCY, None, window / evidence.pace, evidence.now)
    return float(spread.count)


def _many_fail(
    limits: Thresholds, failed5: float, failed30: float, answered5: float | None, answered30: float | None
) -> bool:
    if answered5 is None or answered30 is None:
        return False
    ratio5, ratio30 = (
        failed / (failed + answered) if failed + answered else 0.0
        for failed, answered in ((failed5, answered5), (failed30, answered30))
    )
    enough = failed5 + answered5 >= limits.min_requests
    return failed5 + answered5 > 0 and (
        (ratio5 >= limits.error_ratio <= ratio30 and enough and failed5 >= limits.min_errors)
        or (ratio5 >= 2 * limits.error_ratio and enough and failed5 >= 3 * limits.min_errors)
        or (failed5 >= limits.min_errors and answered5 == 0)
        or (failed30 >= limits.min_errors and failed5 > 0 and answered30 == 0)
    )


def _engine_failed(evidence: Evidence) -> Iterator[str]:
    """Dead without a word for a minute, or it served and has not answered for three."""
    moments, pace = evidence.moments, evidence.pace
    minute = moments.last(HOLD / pace, evidence.now)
    if all(moment.phase == "dead" for moment in minute):
        yield "phase_dead"
    silent = moments.last(_SILENT / pace, evidence.now)
    page = evidence.readings.get("metrics")
    if (
        evidence.served
        and evidence.phase == "serving"
        and not any(moment.up for moment in silent)
        and page is not None
        and (page.reason in _SERVER_SILENT or page.reason.startswith("http_5"))
        and not evidence.increase(catalog.TOKENS, _SILENT)
    ):
        yield "silent"


def _stalled(evidence: Evidence, recent: Mapping[str, float]) -> bool:
    """Work is in the engine and nothing comes out of it; or it says itself that it hangs."""
    window = _STALLED / evidence.pace
    during = evidence.moments.last(window, evidence.now)
    held = [moment.in_engine for moment in during if moment.in_engine is not None]
    tokens = evidence.increase(catalog.TOKENS, _STALLED)
    if "hang" in recent and not tokens:
        return True
    seen = [
        evidence.moments.spread(family, None, window, evidence.now).count
        for family in (catalog.STEP_LATENCY, catalog.LATENCY)
    ]
    whole = evidence.moments.all[0].at <= evidence.now - window
    busy = during[-1].in_engine is not None and bool(held) and min(held) > 0
    return (
        whole
        and busy
        and evidence.work_told
        and not tokens
        and not any(seen)
        and not evidence.increase(catalog.REQUESTS, _STALLED, outcome="ok")
    )


def _unanswered(evidence: Evidence, failed: float) -> float:
    """Requests that ended after more than a second while nothing came out of the engine; 0 where these are few."""
    ended = evidence.increase(catalog.LONG_ANSWERS, FAST) - failed
    ended -= evidence.increase(catalog.REQUESTS, FAST, outcome="rejected")
    window = _UNANSWERED / evidence.pace
    came = (
        evidence.increase(catalog.TOKENS, _UNANSWERED)
        or evidence.increase(catalog.REQUESTS, _UNANSWERED, outcome="ok")
        or any(
            evidence.moments.spread(family, None, window, evidence.now).count
            for family in (catalog.STEP_LATENCY, catalog.LATENCY)
        )
    )
    renamed = evidence.gauges.get(catalog.METRIC_MISSING)  # it works, and tells nothing of it
    return 0.0 if came or renamed or ended < evidence.thresholds.min_errors else ended


def _tells_errors(
    recent: Mapping[str, float],
    dead: list[str],
    *,
    stalled: bool,
    unanswered: float,
    over: bool,
    failed: float,
    answered: float | None,
) -> str:
    told = ", ".join(f"{amount:g} × {kind}" for kind, amount in recent.items())
    if dead:
        why = {"phase_dead": "it is dead without a word", "silent": "it does not answer any more"}
        before = "" if dead[0] in recent else why.get(dead[0], f"{dead[0]}, and it is down since")
        return f"The engine has failed: {'; '.join(filter(None, [before, told]))}."
    if unanswered:
        return (
            f"{unanswered:g} requests ended without an answer within five minutes, and nothing came out of the engine."
        )
    if stalled:
        return "Requests are in the engine, and nothing has come out of it for two minutes."
    if over and answered is not None:
        return f"{failed / (failed + answered):.0%} of the requests of the last five minutes failed: {told}."
    return f"Within five minutes: {told}."


# memory


def _memory(evidence: Evidence) -> Verdict:
    limits = evidence.thresholds
    free, ratio, growth = (dict(part) for part in (_free(evidence), _used_ratio(evidence), _growth(evidence)))
    reserves = evidence.gauges.get(catalog.ENGINE_PREALLOCATES, {}).get(())
    usage = _kv_usage(evidence)
    least = min(free.values(), default=None)
    verdict = Verdict(
        "memory",
        "ok",
        "",
        "bytes" if free else "ratio",
        value=least if free else usage,
        threshold=float(limits.memory_headroom_bytes) if free else limits.kv_cache_usage_ratio,
        gpu=min(free, key=lambda labels: free[labels])[0] if free else "",
    )
    over = {}
    if least is not None and least < limits.memory_headroom_bytes:
        over["headroom"] = f"a GPU has only {gib(least)} free"
    if reserves == 0 and max(ratio.values(), default=0.0) > limits.memory_used_ratio:
        over["used_ratio"] = f"{max(ratio.values()):.0%} of a GPU's memory is in use"
    if reserves != 0 and max(growth.values(), default=0.0) > limits.memory_growth_bytes:
        over["growth"] = f"a GPU uses {gib(max(growth.values()))} more than at rest"
    if evidence.phase != "dead" and _kv_full(evidence):
        over["kv_cache"] = f"the KV cache is {usage or 0.0:.0%} full while requests wait or are evicted"
    if over:
        return replace(
            verdict,
            state="tripped",
            says=f"{_sentence(', and '.join(over.values()))}.",
            cause=next(iter(over)),
            reasons=tuple(over),
            alert="StoplineMemoryNearLimit",
        )
    if not evidence.up:
        return _unknown(replace(verdict, value=None), _not_up(evidence))
    gpu = next(iter(evidence.unread("gpu")), None)
    if gpu is not None and gpu.source in evidence.last_success:
        return _unknown(verdict, _no_gpu("The GPUs cannot be read any more", gpu))
    if any(value == 0 for value in evidence.gauges.get(catalog.GPU_UP, {}).values()):
        lost = Advice("A GPU that was read does not answer any more.", "Look for Xid in the kernel's log.")
        return _unknown(verdict, lost)
    if not free and usage is None:
        return _unknown(verdict, _no_gpu("Neither a GPU nor the KV cache is seen", gpu))
    near = list(_near(evidence, free, ratio, growth, reserves))
    if near:
        return replace(
            verdict,
            state="rising",
            says=f"{_sentence(near[0])}.",
            alert="StoplineKvCachePressure" if "evicted" in near[0] else "",
        )
    if least is None:
        return replace(verdict, state="ok", says=_by_cache(gpu, usage or 0.0))
    return replace(verdict, state="ok", says=f"The fullest GPU has {gib(least)} free.")


def _near(
    evidence: Evidence,
    free: Mapping[Labels, float],
    ratio: Mapping[Labels, float],
    growth: Mapping[Labels, float],
    reserves: float | None,
) -> Iterator[str]:
    """Less than half as much again as the line is free, most of the growth is there, or requests are evicted."""
    limits = evidence.thresholds
    if (evicted := evidence.increase(catalog.PREEMPTIONS, FAST)) >= 3:
        yield f"{evicted:g} requests were evicted within five minutes"
    if (least := min(free.values(), default=None)) is not None and least < 1.5 * limits.memory_headroom_bytes:
        yield f"a GPU has only {gib(least)} free"
    if reserves != 0 and max(growth.values(), default=0.0) > 0.75 * limits.memory_growth_bytes:
        yield f"a GPU uses {gib(max(growth.values()))} more than at rest"
    if reserves == 0 and max(ratio.values(), default=0.0) > limits.memory_used_ratio - 0.05:
        yield f"{max(ratio.values()):.0%} of a GPU's memory is in use"


def _free(evidence: Evidence) -> Iterator[tuple[Labels, float]]:
    """Free bytes, with the peaks of the last minute taken off."""
    used, peak = (evidence.gpus.get(family, {}) for family in (catalog.GPU_USED, catalog.GPU_PEAK))
    for labels, value in evidence.gpus.get(catalog.GPU_HEADROOM, {}).items():
        yield labels, max(0.0, value - max(0.0, peak.get(labels, 0.0) - used.get(labels, 0.0)))


def _used_ratio(evidence: Evidence) -> Iterator[tuple[Labels, float]]:
    used = {**evidence.gpus.get(catalog.GPU_USED, {}), **evidence.gpus.get(catalog.GPU_PEAK, {})}
    for labels, total in evidence.gpus.get(catalog.GPU_TOTAL, {}).items():
        if total > 0 and labels in used:
            yield labels, used[labels] / total


def _growth(evidence: Evidence) -> Iterator[tuple[Labels, float]]:
    """Bytes above the resting use."""
    for labels, plateau in evidence.gpus.get(catalog.GPU_PLATEAU, {}).items():
        if labels in (used := evidence.gpus.get(catalog.GPU_USED, {})):
            yield labels, used[labels] - plateau


def _kv_usage(evidence: Evidence) -> float | None:
    """The highest of two minutes: a cache that is too small empties a little whenever a request ends."""
    during = evidence.moments.last(RECENT / evidence.pace, evidence.now)
    return max((m.kv_usage for m in during if m.kv_usage is not None), default=None)


def _kv_full(evidence: Evidence) -> bool:
    usage = _kv_usage(evidence)
    if usage is None or usage < evidence.thresholds.kv_cache_usage_ratio:
        return False
    waiting = [m.waiting for m in evidence.moments.last(HOLD / evidence.pace, evidence.now) if m.waiting is not None]
    return (bool(waiting) and min(waiting) > 0) or evidence.increase(catalog.PREEMPTIONS, FAST) > 0


# words


def gib(value: float) -> str:
    """Bytes for a person, never apart at the end of a line."""
    return f"{value / 2**30:.1f}\u00a0GiB"


def _during(evidence: Evidence, window: float, phrase: str) -> str:
    """*phrase*, which names the *window*; or since when Stopline looks, where that is shorter."""
    watched = evidence.watched * evidence.pace
    if watched >= window:
        return phrase
    minutes = int(watched // 60)
    ago = f"{minutes} minute{'s' if minutes > 1 else ''} ago" if minutes else "less than a minute ago"
    return f"since Stopline started {ago}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _unknown(verdict: Verdict, told: Advice) -> Verdict:
    return replace(verdict, state="unknown", says=told.cause, remedy=told.remedy)


def _not_up(evidence: Evidence) -> Advice:
    """The engine is not there to be judged: why, and what to do."""
    page = evidence.readings.get("metrics")
    says = f"The engine is not up (phase: {evidence.phase})."
    if page is not None and not page.ok:
        cause, remedy = advise(page)
        if evidence.phase == "dead":
            remedy = "it has served: see in its log why it ended, and whether it is being started again"
        return Advice(f"{says} {_sentence(cause)}.", f"{_sentence(remedy)}.")
    return Advice(says, "Normal while it loads; else read its log.")


def _unread(blind: list[Reading], evidence: Evidence) -> Advice:
    """Something that tells errors is not read."""
    cause, remedy = advise(blind[0])
    every = len(blind) == sum(reading.origin != "gpu" for reading in evidence.readings.values())
    says = f"Errors are not seen{' at all' if every else ' in full'}: {blind[0].source}: {cause}."
    return Advice(says, f"{_sentence(remedy)}.")


def _no_gpu(says: str, gpu: Reading | None) -> Advice:
    if gpu is None:
        return Advice(f"{says}.", "Let Stopline see the GPUs: README, three ways.")
    cause, remedy = advise(gpu)
    return Advice(f"{says}: {cause}.", f"{_sentence(remedy)}.")


def _by_cache(gpu: Reading | None, usage: float) -> str:
    why = f": {advise(gpu).cause}" if gpu is not None else ""
    return f"The KV cache is {usage:.0%} in use; it is the measure, for no GPU is read{why}."


def advise(reading: Reading) -> Advice:
    """Why *reading* failed and what to do, in plain words."""
    tables = {"gpu": remedies.GPU, "log": remedies.LOG}
    table = tables.get(reading.origin, remedies.PAGE)
    try:
        cause, remedy = remedies.of(table, reading.reason)
    except KeyError:
        return Advice(reading.reason, "the log and stopline doctor tell the detail")
    return Advice(remedies.plain(cause), remedies.plain(remedy))

"""Runs that differ in one variable beside each other: what each step brought, and where to stop.

The rules are four, each with its threshold: memory, gain, tail and communication. The first step for which one of them
holds is the one not to take.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from exporter.config import Thresholds
from exporter.load import table
from exporter.load.result import Condition, Level, Quantiles, Run
from exporter.load.sweep import CONCURRENCY
from exporter.strictyaml import ConfigError

PARALLELISM = "parallelism"


@dataclass(frozen=True, slots=True)
class Rules:
    """The thresholds, all as shares: set them by what a card costs you."""

    memory: float = Thresholds().memory_used_ratio
    """Memory line. More cards: one whose peak stays under this share of the card is enough. Anything else: the next
    step must stay under it."""
    gain: float = 0.20
    """Throughput must grow by so much, unless P99 falls by as much."""
    tail: float = 0.10
    """P99 may rise by so much, and by no more than the throughput."""
    communication: float = Thresholds().communication_ratio
    """Share of a step that may go into communication, where it rises from step to step."""


@dataclass(frozen=True, slots=True)
class Step:
    """One run at one level, beside the one before."""

    value: str
    """Of the variable."""
    level: Level
    gain: float | None = None
    """ΔT: of the throughput, relative to the step before."""
    tail: float | None = None
    """ΔP99, relative to the step before."""
    certain: bool = True
    """The two P99 differ by more than chance may make them."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A rule that holds against going on from one step to the next."""

    rule: str
    column: str
    why: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the table shows and the verdict says."""

    variable: str
    steps: tuple[Step, ...]
    stay: str | None
    """Value of the variable at which to stay; None if no rule stops before the last step."""
    stops: tuple[Stop, ...]
    conditions: dict[str, Condition]
    """What is alike in all runs."""
    untold: tuple[str, ...] = ()
    """Conditions that only some of the runs tell."""

    @property
    def verdict(self) -> str:
        if self.stay is None:
            return f"go on: no rule stops before {self.variable} {self.steps[-1].value}"
        reasons = "; ".join(f"column {stop.column}: {stop.why}" for stop in self.stops)
        return f"stay at {self.variable} {self.stay}, because of {reasons}"


def compare(
    runs: Sequence[tuple[str, Run]], rules: Rules, *, concurrency: int | None = None, ignore: Sequence[str] = ()
) -> Comparison:
    """*runs*, each with its name, at one level: *concurrency*, or the highest that all of them have.

    Raises ConfigError if they differ in more than one variable, have no whole level in common, or if the first of them
    failed or a step cannot be judged.
    """
    if len(runs) < 2:
        raise ConfigError(["nothing to compare: give two results or more"])
    levels = _levels(runs, concurrency)
    told = [
        dict(run.conditions) | {CONCURRENCY: level.concurrency} for (_, run), level in zip(runs, levels, strict=True)
    ]
    differing = _differing(told, ignore)
    if len(differing) > 1:
        lines = [f"{key}: " + ", ".join(f"{n} has {_value(t, key)}" for (n, _), t in zip(runs, told, strict=True))
                 for key in differing]  # fmt: skip
        raise ConfigError(
            [
                f"the runs differ in {len(differing)} variables, and only one may: {', '.join(differing)}",
                *lines,
                "make the runs anew with all but one alike, or name what makes no difference with --ignore",
            ]
        )
    variable = differing[0] if differing else "run"
    values = [str(t[variable]) if differing else name for (name, _), t in zip(runs, told, strict=True)]
    order = sorted(range(len(runs)), key=lambda n: _order(values[n])) if differing else range(len(runs))
    steps: list[Step] = []
    for n in order:
        steps.append(stepped(values[n], levels[n], steps[-1].level if steps else None))
    stay, stops = _judge(variable, steps, rules)
    if problems := list(_not_judged(variable, steps, stay)):
        raise ConfigError(problems)
    keys = set().union(*told)
    untold = tuple(sorted(key for key in keys - set(ignore) if not all(key in t for t in told)))
    alike = {k: v for k, v in told[0].items() if k != variable and all(t.get(k) == v for t in told)}
    return Comparison(variable, tuple(steps), stay, tuple(stops), alike, untold)


def _levels(runs: Sequence[tuple[str, Run]], concurrency: int | None) -> list[Level]:
    """The level of each run that is compared."""
    for name, run in runs:
        if not run.levels:
            raise ConfigError([f"{name}: holds no level"])
    if concurrency is None:
        whole = [[level for level in run.levels if _whole(level)] for _, run in runs]
        common = set.intersection(*({level.concurrency for level in levels} for levels in whole))
        if not common and all(len(levels) == 1 for levels in whole):
            return [level for (level,) in whole]
        if not common:
            told = ", ".join(
                f"{name} has {', '.join(str(level.concurrency) for level in levels) or 'none'}"
                for (name, _), levels in zip(runs, whole, strict=True)
            )
            raise ConfigError([f"no concurrency is whole in all results: {told}"])
        concurrency = max(common)
    found = [(name, run.level(concurrency)) for name, run in runs]
    missing = [name for name, level in found if level is None]
    if missing:
        raise ConfigError([f"{', '.join(missing)}: has no level of concurrency {concurrency}"])
    if cut := [name for name, level in found if level is not None and not _whole(level)]:
        raise ConfigError([f"{', '.join(cut)}: concurrency {concurrency} was cut short; make it anew, or give another"])
    return [level for _, level in found if level is not None]


def _whole(level: Level) -> bool:
    """Whether it says something: measured to its end, or ended by what failed."""
    return level.complete or bool(level.errors)


def _differing(told: Sequence[Mapping[str, Condition]], ignore: Sequence[str]) -> list[str]:
    """Conditions that two runs tell differently."""
    keys = dict.fromkeys(key for conditions in told for key in conditions)
    return [key for key in keys if key not in ignore and len({_alike(t[key]) for t in told if key in t}) > 1]


def _alike(value: Condition) -> str:
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _value(told: Mapping[str, Condition], key: str) -> str:
    return _alike(told[key]) if key in told else "nothing"


def _order(value: str) -> tuple[tuple[int, float, str], ...]:
    """Numbers in *value* by size, as in ``TP 2 / PP 1``."""
    parts = value.replace("/", " ").split()
    return tuple((0, float(p), "") if p.replace(".", "", 1).isdigit() else (1, 0.0, p) for p in parts)


def stepped(value: str, level: Level, before: Level | None) -> Step:
    if before is None:
        return Step(value, level)
    pair = before.latency, level.latency
    if in_tokens(before, level):
        rates = before.tokens_per_second, level.tokens_per_second
    else:
        rates = before.requests_per_second, level.requests_per_second
    return Step(value, level, _change(*rates), _change(pair[0].p99, pair[1].p99), _sure(*pair))


def _sure(*pair: Quantiles) -> bool:
    """Whether the interval of the larger P99 ends above the smaller one; a failed request is no noise."""
    small, large = sorted(pair, key=lambda quantiles: quantiles.p99 or 0.0)
    if large.p99 == math.inf or small.p99 is None or large.p99_low is None:
        return True
    return large.p99_low > small.p99


def _change(before: float | None, now: float | None) -> float | None:
    return (now - before) / before if before and now is not None and before != math.inf else None


def _judge(variable: str, steps: Sequence[Step], rules: Rules) -> tuple[str | None, list[Stop]]:
    """The first step not to take: the value to stay at, and the rules that say so."""
    for before, after in itertools.pairwise(steps):
        if stops := list(_stops(variable, before, after, rules)):
            return before.value, stops
    return None, []


def _not_judged(variable: str, steps: Sequence[Step], stay: str | None) -> Iterator[str]:
    """Why a verdict would say nothing: there is nothing sound to begin with, or no rule could have held."""
    first = steps[0]
    if failed := sum(first.level.errors.values()):
        yield f"{variable} {first.value}: {failed} requests failed, so nothing can be compared with it; make it anew"
    if stay is None:
        for step in steps[1:]:
            if step.gain is None and step.tail is None:
                yield f"{variable} {step.value}: neither throughput nor P99 can be compared with the step before"


def _stops(variable: str, before: Step, after: Step, rules: Rules) -> Iterator[Stop]:
    if failed := sum(after.level.errors.values()):
        yield Stop("errors", "errors", f"{failed} requests failed at {variable} {after.value}")
    if variable == PARALLELISM:
        used = filled(before.level)
        if used is not None and used < rules.memory:
            yield Stop(
                "memory",
                "memory per GPU",
                f"{used:.0%} of the fullest GPU is needed at {variable} {before.value}, under {rules.memory:.0%}: "
                "it holds this concurrency as it is",
            )
    else:
        used = filled(after.level)
        if used is not None and used >= rules.memory:
            yield Stop("memory", "memory per GPU", f"{used:.0%} of the fullest GPU, the line is {rules.memory:.0%}")
    gain, tail = after.gain, after.tail
    if gain is not None and gain < rules.gain and not (tail is not None and tail <= -rules.gain):
        yield Stop("gain", "ΔT", f"{gain:+.1%} throughput, under {rules.gain:.0%}")
    if tail is not None and tail > rules.tail and (gain is None or tail > gain):
        more = f"more than the throughput ({gain:+.1%})" if gain is not None else "the line"
        yield Stop("tail", "ΔP99", f"P99 {table.change(tail)}, above {rules.tail:.0%} and {more}")
    shares = before.level.engine, after.level.engine
    talked = [engine.communication_share if engine else None for engine in shares]
    if talked[1] is not None and talked[1] > rules.communication and talked[1] > (talked[0] or 0.0):
        yield Stop(
            "communication",
            "communication",
            f"{talked[1]:.0%} of a step, up from {table.share(talked[0])}, above {rules.communication:.0%}",
        )


def filled(level: Level) -> float | None:
    """How full the fullest GPU is, without the unused part of a KV cache that was set aside whole; None if unknown."""
    if level.engine is None or not level.engine.memory:
        return None
    return max((m.needed if m.needed is not None else m.peak) / m.total for m in level.engine.memory.values())


def in_tokens(*levels: Level) -> bool:
    """Whether the throughput of all of them can be told in tokens."""
    return all(level.tokens_per_second is not None for level in levels)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """For programs: what the table and the verdict say."""
    return {
        "variable": comparison.variable,
        "conditions": comparison.conditions,
        "steps": [
            {"value": s.value, "gain": s.gain, "p99_change": s.tail, "p99_certain": s.certain, "level": s.level}
            for s in comparison.steps
        ],
        "stay": comparison.stay,
        "stops": [{"rule": s.rule, "column": s.column, "why": s.why} for s in comparison.stops],
        "verdict": comparison.verdict,
        "not_told_by_all": comparison.untold,
    }

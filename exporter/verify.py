"""Proof that a profile does what it says: its samples give what stands beside them, its rejects give nothing.

Ran by ``stopline check`` on what a user wrote, and by the tests on what ships.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from exporter import catalog
from exporter.engines.profile import ErrorSample, LogRules, Pattern, Profile, shared
from exporter.lifecycle import Lifecycle
from exporter.signals import Labels
from exporter.sources.lines import Lines
from exporter.store import Store

_SETTLED = 10.0  # seconds after which no line is waited for any more


class Trial:
    """One log read by *profile*: text in, what it told out. The clock goes on only by hand."""

    def __init__(self, profile: Profile) -> None:
        self.now = 0.0
        self.store = Store(clock=lambda: self.now, wall=lambda: self.now)
        self.lifecycle = Lifecycle(has_page=False)
        self.lines = Lines("log", profile, self.store, self.lifecycle, clock=lambda: self.now)

    def feed(self, text: str) -> "Trial":
        """Lines as an engine prints them, then silence."""
        self.lines.feed(text.rstrip("\n").encode() + b"\n", history=False)
        self.now += _SETTLED
        self.told = told(self.store, self.lines)
        self.lines.flush()
        return self

    def matched(self, pattern: str) -> bool:
        return self.store.counters[catalog.LOG_MATCHED].get(("log", pattern), 0.0) > 0

    def errors(self) -> dict[str, int]:
        """Events by kind."""
        return {kind: int(n) for (kind, _), n in self.store.counters.get(catalog.ERRORS, {}).items() if n}


def told(store: Store, lines: Lines) -> dict[str, float]:
    """What is known, as ``family{label=value}: number``, a histogram by its sum; without the sidecar's own figures."""
    out: dict[str, float] = {}
    families = {family: dict(series) for family, series in (*store.counters.items(), *store.gauges().items())}
    for sample in lines.samples():
        families.setdefault(sample.family, {})[sample.labels] = sample.value
    for family, series in families.items():
        if not family.short.startswith("log_"):
            out |= {name_of(family, labels): value for labels, value in series.items()}
    for family, histograms in store.histograms.items():
        out |= {name_of(family, labels): buckets.sum for labels, buckets in histograms.items()}
    return out


def patterns(profile: Profile, chosen: Iterable[Pattern] | None = None) -> Iterator[str]:
    """What is wrong with the samples and rejects of *chosen* patterns, of all by default; nothing if all is well."""
    for pattern in profile.log.patterns if chosen is None else chosen:
        for sample in pattern.samples:
            trial = Trial(profile).feed(sample.line)
            if not trial.matched(pattern.name):
                yield f"pattern {pattern.name}: does not match its sample {sample.line!r}"
                continue
            for name, wanted in sample.gives.items():
                if not math.isclose(trial.told.get(name, math.nan), wanted, rel_tol=1e-6):
                    yield f"pattern {pattern.name}: {sample.line!r} gives {trial.told}, not {name}: {wanted:g}"
        for line in pattern.rejects:
            if Trial(profile).feed(line).matched(pattern.name):
                yield f"pattern {pattern.name}: matches what it should reject, {line!r}"


def errors(profile: Profile, samples: Iterable[ErrorSample]) -> Iterator[str]:
    """What is wrong with the counting of errors in *samples* by *profile*."""
    gates = (*profile.log.errors.gates, *shared().gates)
    for sample in samples:
        counted = Trial(profile).feed(sample.lines).errors()
        if counted != dict.fromkeys(sample.kinds, 1):
            wanted = ", ".join(sample.kinds) or "no error"
            if not counted and not any(gate in sample.lines for gate in gates):
                wanted += " (no line holds one of log.errors.gates, so none is looked at)"
            yield f"errors: {sample.lines!r} counts {counted or 'no error'}, not {wanted}"


def with_patterns(profile: Profile, own: tuple[Pattern, ...]) -> Profile:
    """*profile* as it is read together with a user's *own* patterns."""
    log: LogRules = replace(profile.log, patterns=(*profile.log.patterns, *own))
    return replace(profile, log=log)


def name_of(family: catalog.Family, labels: Labels) -> str:
    """``family{label=value}``, without ``source``."""
    pairs = [f"{k}={v}" for k, v in zip(family.labels, labels, strict=False) if k != "source"]
    return family.short + (f"{{{','.join(pairs)}}}" if pairs else "")

"""What a matched line says, put where it belongs: into the store, among the facts, or among the gauges."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from exporter.catalog import Family
from exporter.engines.profile import GROUP, UNITS, Signal, is_number
from exporter.lifecycle import LABEL, Lifecycle
from exporter.signals import Labels, Origin, Sample
from exporter.sources.fields import number
from exporter.sources.peel import NO_RANKS
from exporter.store import Store

_MAX_GAUGES = 4096
_BEYOND = 1e18  # of any unit; more than an engine can do, and sums of it stay numbers
_LONGEST = 86400.0  # seconds
_HEAVIEST = 1_000_000  # observations one line can stand for


class Effects:
    """Facts hold until the engine's next start; gauges go *expire* seconds after the last line that told them.

    *model* is the value of the model label, empty to take what the engine says.
    """

    def __init__(
        self,
        store: Store,
        lifecycle: Lifecycle,
        clock: Callable[[], float],
        *,
        model: str,
        origin: Origin = "log",
    ) -> None:
        self._store = store
        self._lifecycle = lifecycle
        self._clock = clock
        self._model = model
        self._origin = origin
        self._facts: dict[tuple[Family, Labels], float] = {}
        self._gauges: dict[tuple[Family, Labels], tuple[float, float]] = {}
        self._known: dict[Signal, Labels] = {}
        self._known_for = ""
        self._totals: dict[tuple[Signal, str], float] = {}
        self._fresh = False
        self._voided = lifecycle.voided

    @property
    def facts(self) -> dict[tuple[Family, Labels], float]:
        """What the engine told of itself at its start."""
        if self._voided != self._lifecycle.voided:
            self._voided = self._lifecycle.voided
            self._facts.clear()
        return self._facts

    def recall(self, facts: dict[tuple[Family, Labels], float]) -> None:
        """Facts from before the sidecar was restarted, unless the log tells them too."""
        self._facts = facts | self._facts

    def restart(self, at: float | None) -> None:
        """The engine starts (Unix time *at*): what was known of it holds no longer."""
        self._lifecycle.begin(at)
        self._facts.clear()
        self._gauges.clear()
        self._totals.clear()
        self._fresh = at is not None
        self._store.claims.reset()

    def apply(
        self,
        signal: Signal,
        value: float,
        weight: float | None = 1,
        match: re.Match[str] | None = None,
        *,
        ranks: Mapping[str, str] = NO_RANKS,
        fact: bool = False,
        ago: float | None = 0.0,
    ) -> None:
        """One signal of a line, *value* in base units, true *ago* seconds ago, None: nobody knows.

        What cannot be is dropped and counted.
        """
        family = signal.family
        labels = self._labels(signal, match, ranks)
        most = _LONGEST if family.kind == "histogram" else _BEYOND
        if labels is None or not 0 <= value < most or weight is None or not 0 <= weight <= _HEAVIEST:
            self._store.drop(family)
            return
        if signal.total:
            value = self._increase(signal, rank_of(match, ranks), value)
        if fact:
            if family.kind == "gauge" and _has_room(self.facts, (family, labels)):
                self._facts[family, labels] = value
        elif weight:
            self._lifecycle.worked(finished=family.kind != "gauge")
            if family.kind == "histogram":
                self._store.observe(family, labels, value, int(weight), origin=self._origin, ago=ago)
            elif family.kind == "counter":
                self._store.count(family, labels, value * weight, origin=self._origin)
            elif _has_room(self._gauges, (family, labels)):
                self._gauges[family, labels] = (value, self._clock())

    def apply_all(self, signals: Iterable[Signal], told: Sequence[str | None]) -> None:
        """The same for many lines at once: each of *told* is the value of all *signals* that have none of their own.

        The labels of *signals* are fixed, and none is a gauge.
        """
        values: dict[str, list[float]] = {}
        for signal in signals:
            family = signal.family
            labels = self._labels(signal, None, NO_RANKS)
            if is_number(signal.value or "1"):
                known = [float(signal.value or "1") * UNITS[signal.unit]] * len(told)
            else:
                known = values.get(signal.unit) or values.setdefault(signal.unit, _numbers(told, signal.unit))
            most = _LONGEST if family.kind == "histogram" else _BEYOND
            good = known if _all_within(known, most) else [value for value in known if 0 <= value < most]
            if labels is None:
                self._store.drop(family, len(known))
            elif good:
                self._lifecycle.worked(len(good))
                if family.kind == "histogram":
                    self._store.observe_all(family, labels, good, origin=self._origin)
                else:
                    self._store.count_all(family, labels, good, origin=self._origin)
            if labels is not None and len(good) < len(known):
                self._store.drop(family, len(known) - len(good))

    def expire(self, seconds: float) -> None:
        """Forget gauges that no line told for so long."""
        oldest = self._clock() - seconds
        self._gauges = {key: told for key, told in self._gauges.items() if told[1] >= oldest}

    def samples(self) -> tuple[Sample, ...]:
        """Facts and gauges as they are now."""
        told = {**self.facts, **{key: value for key, (value, _) in self._gauges.items()}}
        return tuple(Sample(family, labels, value) for (family, labels), value in told.items())

    def _increase(self, signal: Signal, rank: str, total: float) -> float:
        """What a total grew by; the first one told counts whole if the engine's start was seen."""
        key = (signal, rank)
        if not _has_room(self._totals, key):
            return 0.0
        last = self._totals.get(key, 0.0 if self._fresh else total)
        self._totals[key] = total
        return total - last if total >= last else total

    def _labels(self, signal: Signal, match: re.Match[str] | None, ranks: Mapping[str, str]) -> Labels | None:
        """The label values of *signal*, without ``source``; None if the line has one that cannot be a label."""
        model = self._model or self._lifecycle.info.get("model", "")
        if model != self._known_for:
            self._known_for = model
            self._known.clear()
        if (known := self._known.get(signal)) is not None:
            return known
        values, fixed = [], True
        for label in signal.family.labels:
            if label == "source":
                continue
            value = signal.labels.get(label)
            if value is None and label == "rank":
                fixed, value = False, rank_of(match, ranks)
            elif value is None:
                value = model
            elif "$" in value:
                fixed, value = False, _filled(value, match, ranks)
            if not (value == model or LABEL.fullmatch(value)):
                return None
            if not fixed and label == "rank" and value.isdecimal():
                value = str(int(value))
            values.append(value)
        labels = tuple(values)
        if fixed:
            self._known[signal] = labels
        return labels


def _numbers(texts: Sequence[str | None], unit: str) -> list[float]:
    """*texts* in base units, without those that are no numbers."""
    scale = UNITS[unit]
    try:
        return [float(text) * scale for text in texts if text is not None]
    except ValueError:
        return [value for text in texts if text is not None and (value := number(text, unit)) is not None]


def _all_within(values: Sequence[float], most: float) -> bool:
    return not values or (min(values) >= 0 and max(values) < most and sum(values) >= 0)  # a sum with NaN is none


def _has_room(known: Mapping[Any, object], key: object) -> bool:
    return key in known or len(known) < _MAX_GAUGES


def rank_of(match: re.Match[str] | None, ranks: Mapping[str, str]) -> str:
    """The data-parallel rank of who wrote a line, by the line itself or by what stands before it."""
    told = match["rank"] if match is not None and "rank" in match.re.groupindex else None
    return told or ranks.get("rank", "0")


def _filled(text: str, match: re.Match[str] | None, ranks: Mapping[str, str]) -> str:
    """*text* with the groups of the line put in; dots that stood between parts which are not there are left out."""

    def part(name: re.Match[str]) -> str:
        groups = match.groupdict() if match is not None else {}
        return (groups.get(name[1]) or ranks.get(name[1])) or ""

    return re.sub(r"\.{2,}", ".", GROUP.sub(part, text)).strip(".") or "0"

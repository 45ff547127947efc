"""From lines to signals, by the rules of a profile.

Works on whole chunks: one pass finds all literals of all rules, and only lines that hold one are cut out and matched.
While an error or an echo is open every line is looked at, for it may belong to it.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from ahocorasick_rs import BytesAhoCorasick

from exporter import catalog
from exporter.catalog import Family
from exporter.engines.literal import literals_of
from exporter.engines.profile import GENERIC, Echo, Pattern, Profile, Signal, bundled, shared
from exporter.lifecycle import Lifecycle
from exporter.signals import Labels, Sample
from exporter.sources.bounded import LIMIT_SECONDS, Bounded, TooSlow
from exporter.sources.chunks import HEAD_BYTES
from exporter.sources.effects import Effects, rank_of
from exporter.sources.errors import Errors
from exporter.sources.fields import Fields, number
from exporter.sources.pairs import Orphan, Pairs
from exporter.sources.peel import ERROR, MARKS, NO_RANKS, Peeler, Record, Shape, Unwrapper, seconds_of
from exporter.sources.tally import Tally
from exporter.store import Store

log = logging.getLogger(__name__)

_LONG_LINE = 2000
_ECHO_LINES = 200  # of an echo whose end cannot be told
_ECHO_SECONDS = 2.0
_ECHO_END = 500  # characters in which the end of an echo is looked for
_ECHO_FAILURES = 3  # echoes without an end, one after the other, that show a changed format
_MAX_PROCESSES = 10_000
_MAX_PLANS = 1000

_Rule = Echo | Tally | Pattern | Fields | None
"""What a literal leads to; None stands for the errors."""


class _Plan(NamedTuple):
    """What lines that hold the same literals are tried for, in this order."""

    peel: Callable[[bytes, int, int], Record]
    echoes: tuple[Echo, ...]
    tallies: tuple[Tally, ...]
    patterns: tuple[Pattern, ...]
    fields: tuple[Fields, ...]
    errors: bool


class Lines:
    """One log's lines, turned into counts, observations and gauges in the *store*.

    *patterns* and *fields* are the user's, beside those of the profile. *counted* is when each kind of error was,
    shared by the logs of one engine, which may tell one failure each.
    """

    def __init__(
        self,
        source: str,
        profile: Profile,
        store: Store,
        lifecycle: Lifecycle,
        *,
        clock: Callable[[], float],
        patterns: Iterable[Pattern] = (),
        fields: dict[str, Signal | tuple[Signal, ...]] | None = None,
        window: float = 10.0,
        counted: dict[str, tuple[float | None, float]] | None = None,
        model: str = "",
    ) -> None:
        self.source = source
        self._store = store
        self._lifecycle = lifecycle
        self._clock = clock
        self._patterns = tuple(patterns)
        self._own_fields = fields or {}
        self._window = window
        self._counted = {} if counted is None else counted
        self._unwrapper = Unwrapper()
        self._effects = Effects(store, lifecycle, clock, model=model)
        self._pairs = Pairs()
        self._processes: set[str] = set()
        self._ranks: dict[str, Mapping[str, str]] = {}
        self._sound: set[tuple[str, str]] = set()
        self._echo: Echo | None = None
        self._echo_lines = 0
        self._echo_at = 0.0
        self._echo_failures = 0
        self._bounded = Bounded(clock)
        self._slow: set[str] = set()
        self._history = False
        self._shaped = False
        self._now = clock()
        self.use(profile)

    def configure(
        self, patterns: Iterable[Pattern], fields: dict[str, Signal | tuple[Signal, ...]], window: float
    ) -> None:
        """Take the user's own rules anew."""
        self._patterns, self._own_fields, self._window = tuple(patterns), fields, window
        self.use(self._profile)

    def use(self, profile: Profile) -> None:
        """Read by *profile* from here on."""
        self._profile = profile
        log = profile.log
        self._shapes = [Shape(regex) for regex in log.records or bundled(GENERIC).log.records]
        before = getattr(self, "_errors", None)
        self._errors = Errors(
            log.errors, shared(), self._lifecycle, self._error, window=self._window, last=self._counted
        )
        if before is not None:
            self._errors.remember(before)
        self._ranks.clear()
        self._spoilt = {name for pattern in log.patterns for name in pattern.spoils}
        self._literals: dict[bytes, list[_Rule]] = {}
        self._always: list[_Rule] = []
        self._tallies: list[Tally] = []
        self._last: dict[tuple[object, ...], tuple[Tally, re.Match[str], Mapping[str, str]]] = {}
        for echo in log.echoes:
            self._add(echo, literals_of(echo.regex))
        for pattern in log.patterns:
            self._add(self._tally(pattern) or pattern, pattern.literals)
        for pattern in self._patterns:
            self._add(pattern, pattern.literals)
        for pattern in (*log.patterns, *self._patterns):
            self._store.set_total(catalog.LOG_MATCHED, (self.source, pattern.name), self._matched(pattern.name))
        if fields := self._own_fields | {n: s for n, s in log.fields.items() if n not in self._own_fields}:
            self._add(Fields(fields), fields)
            self._store.set_total(catalog.LOG_MATCHED, (self.source, "fields"), self._matched("fields"))
        self._add(None, self._errors.gates)
        for mark in MARKS:
            self._literals.setdefault(mark, [])
        self._marks = {n for n, literal in enumerate(self._literals) if literal in MARKS}
        self._search = BytesAhoCorasick(list(self._literals)).find_matches_as_indexes
        self._plans: dict[int, _Plan] = {}
        self._peelers = [Peeler(self._shapes) for _ in (*self._literals, None)]

    def feed(self, data: bytes, *, history: bool) -> None:
        """*data* are whole lines, oldest first. Of *history* only facts about the engine are taken."""
        data, found = self._read(data)
        self._history = history
        self._now = self._clock()
        cursor = 0
        for start, end, plan in self._hits(data, found):
            if cursor < start and (self._echo is not None or self._errors.following or self._always):
                self._between(data, cursor, start)
            self._line(data, start, end, plan)
            cursor = end + 1
        self._between(data, cursor, len(data))
        self._settle()

    def flush(self) -> None:
        """Judge errors that no further line completes, and forget gauges and openings that are too old."""
        self._now = self._clock()
        self._errors.flush(self._now)
        self._effects.expire(self._profile.log.gauges_expire)

    @property
    def in_echo(self) -> bool:
        """Whether the next line may still be a client's words."""
        return self._echo is not None

    @property
    def facts(self) -> dict[tuple[Family, Labels], float]:
        """Of the start, by family and labels; they hold until the next one."""
        return self._effects.facts

    def recall(self, facts: dict[tuple[Family, Labels], float]) -> None:
        """Facts from before this sidecar was restarted."""
        self._effects.recall(facts)

    def samples(self) -> tuple[Sample, ...]:
        """Facts of the start and the gauges that recent lines told."""
        return self._effects.samples()

    # finding lines

    def _add(self, rule: _Rule, literals: Iterable[str]) -> None:
        literals = tuple(literals)
        for literal in literals:
            self._literals.setdefault(literal.encode(), []).append(rule)
        if not literals:
            self._always.append(rule)

    def _read(self, data: bytes) -> tuple[bytes, list[tuple[int, int, int]]]:
        """*data* without what a container runtime put around it, and where which literals are in it."""
        if self._unwrapper.wrapped:
            data = self._unwrapper.feed(data)
            return data, self._search(data, overlapping=True)
        found = self._search(data, overlapping=True)
        bare = self._unwrapper.feed(data, marked=not self._marks.isdisjoint(literal for literal, _, _ in found))
        return bare, found if bare is data else self._search(bare, overlapping=True)

    def _hits(self, data: bytes, found: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, _Plan]]:
        """Where lines begin and end that hold a literal, with what the literals lead to; in their order."""
        held, start, end = 0, 0, -1
        for literal, at, _ in found:
            if at > end:
                if held:
                    yield start, end, self._plans.get(held) or self._plan(held)
                start = data.rfind(b"\n", 0, at) + 1
                end = data.find(b"\n", at)
                end = len(data) if end < 0 else end
                held = 0
            held |= 1 << literal
        if held:
            yield start, end, self._plans.get(held) or self._plan(held)

    def _plan(self, held: int) -> _Plan:
        """For lines that hold the literals whose bits are set."""
        rules = [rule for n, rules in enumerate(self._literals.values()) if held >> n & 1 for rule in rules]
        rules = list(dict.fromkeys((*rules, *self._always)))
        if len(self._plans) >= _MAX_PLANS:
            self._plans.clear()
        plan = self._plans[held] = _Plan(
            self._peelers[(held & -held).bit_length() - 1].peel,  # the same for all whose first literal is the same
            tuple(rule for rule in rules if isinstance(rule, Echo)),
            tuple(rule for rule in rules if isinstance(rule, Tally)),
            tuple(rule for rule in rules if isinstance(rule, Pattern)),
            tuple(rule for rule in rules if isinstance(rule, Fields)),
            None in rules,
        )
        return plan

    @property
    def _wary(self) -> bool:
        """Whether lines without a literal are to be looked at, too."""
        return self._echo is not None or self._errors.following > 0 or bool(self._always)

    def _between(self, data: bytes, cursor: int, stop: int) -> None:
        """Lines without a literal, as long as they matter."""
        while cursor < stop and self._wary:
            end = data.find(b"\n", cursor)
            end = len(data) if end < 0 else end
            self._line(data, cursor, end, self._plans.get(0) or self._plan(0))
            cursor = end + 1

    # reading a line

    def _line(self, data: bytes, start: int, end: int, plan: _Plan) -> None:
        record = plan.peel(data, start, end)
        if self._echo is not None and self._echoing(self._echo, record):
            return
        if record.shaped and record.process not in self._processes:
            self._shaped = True
            if len(self._processes) < _MAX_PROCESSES:
                self._processes.add(record.process)
        text = record.text
        for echo in plan.echoes:
            if not (echo.spares_errors and record.level == ERROR) and echo.regex.match(text):
                self._begin_echo(echo, record)
                return
        understood = False
        for tally in plan.tallies:
            match = tally.match(text) if len(text) <= _LONG_LINE else self._match(tally.pattern, text)
            if match is not None:
                understood = True
                tally.told.append(match[tally.group])
                if tally.gauges:
                    ranks = record.ranks or self._ranks_of(record.process)
                    rank = tally.rank(match, ranks)
                    self._last.pop(rank, None)  # so that the order is that of the lines
                    self._last[rank] = tally, match, ranks
        if plan.patterns or plan.fields or plan.errors or self._errors.following:
            for pattern in plan.patterns:
                understood |= self._pattern(pattern, record)
            for fields in plan.fields:
                understood |= self._fields(fields, record)
            if not self._history and (plan.errors or self._errors.following):
                self._errors.line(record, self._now)
                return
        if not understood and not self._history and (plan.tallies or plan.patterns or plan.fields):
            self._count(catalog.LOG_UNPARSED, (self.source,))

    def _begin_echo(self, echo: Echo, record: Record) -> None:
        whole = len(record.text) < HEAD_BYTES // 2  # else it was cut, and its end with it
        if record.fields or not whole or echo.ends.search(record.text[-_ECHO_END:]):
            self._echo_failures = 0
            return
        self._echo, self._echo_lines, self._echo_at = echo, 0, self._now

    def _echoing(self, echo: Echo, record: Record) -> bool:
        """Whether *record* still belongs to what a client sent.

        A server writes a record at once, so its end is near, and until it comes nothing is believed. Where the ends
        of echoes are not found any more (the format changed), a line whose process is known is believed again:
        errors must not go unseen.
        """
        if self._now - self._echo_at > _ECHO_SECONDS:
            self._echo = None
            self._echo_failures += 1
            self._count(catalog.LOG_UNPARSED, (self.source,))
            return False
        if self._echo_failures < _ECHO_FAILURES:
            if echo.ends.search(record.text[-_ECHO_END:]):
                self._echo, self._echo_failures = None, 0
            return True
        self._echo_lines += 1
        known = record.shaped and record.process in self._processes
        if known or self._echo_lines > _ECHO_LINES:
            self._echo = None
            return False
        return True

    def _pattern(self, pattern: Pattern, record: Record) -> bool:
        match = self._match(pattern, record.text)
        if match is None:
            return False
        if self._history and not (pattern.startup or pattern.phase):
            return True
        if pattern.phase == "stopping" and not record.shaped and self._shaped:
            return False  # whoever writes a line of their own into the log must not silence it
        if pattern.phase or pattern.info or any(signal.family.kind == "gauge" for signal in pattern.signals):
            self._settle()
        if pattern.phase:
            self._enter(pattern.phase)
        for label, group in pattern.info.items():
            self._lifecycle.tell(label, match[group])
        elapsed = self._pair(pattern, match, record) if pattern.begin or pattern.end else None
        ranks = record.ranks or self._ranks_of(record.process)
        chained = pattern.spoils or pattern.name in self._spoilt
        if not (chained and self._spoils(pattern, rank_of(match, ranks))):
            for signal in pattern.signals:
                self._signal(signal, match, elapsed, ranks, fact=pattern.startup)
        if not self._history:
            self._count(catalog.LOG_MATCHED, (self.source, pattern.name))
        return True

    def _signal(
        self,
        signal: Signal,
        match: re.Match[str],
        elapsed: float | None,
        ranks: Mapping[str, str],
        *,
        fact: bool = False,
    ) -> None:
        value = _value(signal, match, elapsed)
        if value is not None:
            weight = number(_text(signal.weight, match) or "1", "") if signal.weight else 1.0
            self._effects.apply(signal, value, weight, match, ranks=ranks, fact=fact)

    def _match(self, pattern: Pattern, text: str) -> re.Match[str] | None:
        """Bounded where a regex is not ours, or a line is longer than any that ours were tried on."""
        if len(text) <= _LONG_LINE and pattern not in self._patterns:
            return pattern.regex.match(text)
        try:
            return self._bounded.match(pattern.regex, text)
        except TooSlow:
            self._given_up(pattern)
            return None

    def _given_up(self, pattern: Pattern) -> None:
        if pattern.name not in self._slow:
            self._slow.add(pattern.name)
            log.warning(
                "a line took too long to match and was passed over, as such lines will be: source=%s pattern=%s "
                "limit_seconds=%g remedy='make the regex of log.patterns simpler: no repetition within a repetition'",
                self.source, pattern.name, LIMIT_SECONDS,
            )  # fmt: skip

    def _spoils(self, pattern: Pattern, rank: str) -> bool:
        """Whether a line before has spoilt this one of *rank*; what this one spoils is remembered."""
        for name in pattern.spoils:
            self._sound.discard((name, rank))
        if pattern.name not in self._spoilt or (pattern.name, rank) in self._sound:
            return False
        if len(self._sound) < _MAX_PROCESSES:
            self._sound.add((pattern.name, rank))
        return True

    def _ranks_of(self, process: str) -> Mapping[str, str]:
        """The parts of the rank that the name of a process tells."""
        if not process or not self._profile.log.processes:
            return NO_RANKS
        known = self._ranks.get(process)
        if known is None:
            matches = (regex.match(process) for regex in self._profile.log.processes)
            match = next((m for m in matches if m), None)
            known = {name: text for name, text in match.groupdict().items() if text} if match else NO_RANKS
            if len(self._ranks) < _MAX_PROCESSES:
                self._ranks[process] = known
        return known

    def _fields(self, fields: Fields, record: Record) -> bool:
        if self._history:
            return True
        found = list(fields.find(record))
        if found:
            self._settle()
        if found and record.level != ERROR:  # a request that failed says nothing of how long one takes
            self._lifecycle.engine = self._lifecycle.engine or self._profile.engine
            for signal, value in found:
                self._effects.apply(signal, value, ranks=record.ranks or self._ranks_of(record.process))
            self._count(catalog.LOG_MATCHED, (self.source, "fields"))
        return bool(found)

    def _pair(self, pattern: Pattern, match: re.Match[str], record: Record) -> float | None:
        """Seconds between the two lines with the same id, by the log's own clock if it has one."""
        if self._history:
            return None
        at = seconds_of(record.time) if record.time else None
        at = self._now if at is None else at
        try:
            if pattern.begin:
                self._pairs.begin(pattern, match[pattern.begin], at)
            else:
                return self._pairs.end(pattern, match[pattern.end], at)
        except Orphan:
            self._store.drop(catalog.LATENCY)
        return None

    def _enter(self, phase: str) -> None:
        self._errors.settle()
        if phase == "starting":
            self._effects.restart(None if self._history else self._store.wall())
            self._sound.clear()
            self._pairs.clear()
        else:
            self._lifecycle.enter(phase)

    # counting

    def _tally(self, pattern: Pattern) -> Tally | None:
        """What only adds up numbers is gathered; nothing if *pattern* does more."""
        if pattern.name in self._spoilt or not Tally.fits(pattern):
            return None
        tally = Tally(pattern)
        self._tallies.append(tally)
        return tally

    def _settle(self) -> None:
        """Let what was gathered count, before a later line tells a phase, an identity or a gauge."""
        for tally in self._tallies:
            if tally.told:
                told = tally.empty()
                if not self._history:
                    self._effects.apply_all(tally.added, told)
                    self._count(catalog.LOG_MATCHED, (self.source, tally.pattern.name), len(told))
        for tally, match, ranks in self._last.values() if not self._history else ():
            for signal in tally.gauges:
                self._signal(signal, match, None, ranks)
        self._last.clear()

    def _error(self, kind: str) -> None:
        if kind == "engine_dead":  # which ends a phase
            self._settle()
        self._store.count(catalog.ERRORS, (kind,), origin="log")

    def _count(self, family: Family, labels: Labels, count: int = 1) -> None:
        series = self._store.counters[family]
        series[labels] = series.get(labels, 0.0) + count

    def _matched(self, pattern: str) -> float:
        return self._store.counters[catalog.LOG_MATCHED].get((self.source, pattern), 0.0)


def _value(signal: Signal, match: re.Match[str], elapsed: float | None) -> float | None:
    """What *signal* says in base units; None if the line leaves it out, or divides by nothing."""
    if signal.value == "elapsed":
        value = elapsed
    else:
        text = _text(signal.value or "1", match)
        value = None if text is None else number(text, signal.unit)
    if signal.times and value is not None:
        factor = number(_text(signal.times, match) or "1", "")
        value = None if factor is None else value * factor
    if signal.over and value is not None:
        divisor = number(_text(signal.over, match) or "", "")
        value = value / divisor if divisor else None
    return value


def _text(name: str, match: re.Match[str]) -> str | None:
    text: str | None = match[name] if name in match.re.groupindex else name
    return text

"""From lines to signals, by the rules of a profile.

Works on whole chunks: a literal that no line holds costs one search of the chunk, and only lines that hold one are
cut out and matched. While an error or an echo is open every line is looked at, for it may belong to it.
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping

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
from exporter.sources.peel import ERROR, NO_RANKS, Record, Shape, Unwrapper, peel, seconds_of
from exporter.store import Store

log = logging.getLogger(__name__)

_LONG_LINE = 2000
_ECHO_LINES = 200  # of an echo whose end cannot be told
_ECHO_SECONDS = 2.0
_ECHO_END = 500  # characters in which the end of an echo is looked for
_ECHO_FAILURES = 3  # echoes without an end, one after the other, that show a changed format
_MAX_PROCESSES = 10_000

_Rule = Pattern | Echo | Fields | None
"""What a literal leads to; None stands for the errors."""


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
        for echo in log.echoes:
            self._add(echo, literals_of(echo.regex))
        for pattern in (*log.patterns, *self._patterns):
            self._add(pattern, pattern.literals)
            self._store.set_total(catalog.LOG_MATCHED, (self.source, pattern.name), self._matched(pattern.name))
        if fields := self._own_fields | {n: s for n, s in log.fields.items() if n not in self._own_fields}:
            self._add(Fields(fields), fields)
            self._store.set_total(catalog.LOG_MATCHED, (self.source, "fields"), self._matched("fields"))
        self._add(None, self._errors.gates)

    def feed(self, data: bytes, *, history: bool) -> None:
        """*data* are whole lines, oldest first. Of *history* only facts about the engine are taken."""
        data = self._unwrapper.feed(data)
        self._history = history
        self._now = self._clock()
        hits = self._hits(data)
        starts, at, cursor = sorted(hits), 0, 0
        while True:
            if not (self._echo or self._errors.following):
                while at < len(starts) and starts[at] < cursor:
                    at += 1
                if at == len(starts):
                    break
                cursor = starts[at]
            if cursor >= len(data):
                break
            end = data.find(b"\n", cursor)
            end = len(data) if end < 0 else end
            self._line(data[cursor:end], hits.get(cursor, self._always))
            cursor = end + 1

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

    def _hits(self, data: bytes) -> dict[int, list[_Rule]]:
        """Where lines begin that hold a literal, with what the literals lead to."""
        hits: dict[int, list[_Rule]] = {}
        if self._always:
            start = 0
            while start < len(data):
                hits[start] = self._always
                start = data.find(b"\n", start) + 1 or len(data)
        for literal, rules in self._literals.items():
            found = data.find(literal)
            while found >= 0:
                start = data.rfind(b"\n", 0, found) + 1
                known = hits.get(start)
                hits[start] = rules if known is None else known + rules
                end = data.find(b"\n", found)
                found = data.find(literal, end) if end >= 0 else -1
        return hits

    # reading a line

    def _line(self, line: bytes, rules: list[_Rule]) -> None:
        record = peel(line, self._shapes)
        if self._echo is not None and self._echoing(self._echo, record):
            return
        self._shaped |= record.shaped
        if record.shaped and record.process not in self._processes and len(self._processes) < _MAX_PROCESSES:
            self._processes.add(record.process)
        tried = understood = False
        for rule in rules if len(rules) == 1 else dict.fromkeys(rules):
            if isinstance(rule, Echo):
                if not (rule.spares_errors and record.level == ERROR) and rule.regex.match(record.text):
                    self._begin_echo(rule, record)
                    return
            elif isinstance(rule, Pattern):
                tried = True
                understood |= self._pattern(rule, record)
            elif isinstance(rule, Fields):
                tried = True
                understood |= self._fields(rule, record)
        if not self._history and (None in rules or self._errors.following):
            self._errors.line(record, self._now)
        elif tried and not understood and not self._history:
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
        try:
            match = self._match(pattern, record.text)
        except TooSlow:
            self._given_up(pattern)
            return False
        if match is None:
            return False
        if self._history and not (pattern.startup or pattern.phase):
            return True
        if pattern.phase == "stopping" and not record.shaped and self._shaped:
            return False  # whoever writes a line of their own into the log must not silence it
        if pattern.phase:
            self._enter(pattern.phase)
        for label, group in pattern.info.items():
            self._lifecycle.tell(label, match[group])
        elapsed = self._pair(pattern, match, record) if pattern.begin or pattern.end else None
        ranks = record.ranks or self._ranks_of(record.process)
        chained = pattern.spoils or pattern.name in self._spoilt
        if not (chained and self._spoils(pattern, rank_of(match, ranks))):
            for signal in pattern.signals:
                value = _value(signal, match, elapsed)
                if value is not None:
                    weight = number(_text(signal.weight, match) or "1", "") if signal.weight else 1.0
                    self._effects.apply(signal, value, weight, match, ranks=ranks, fact=pattern.startup)
        if not self._history:
            self._count(catalog.LOG_MATCHED, (self.source, pattern.name))
        return True

    def _match(self, pattern: Pattern, text: str) -> re.Match[str] | None:
        """Bounded where a regex is not ours, or a line is longer than any that ours were tried on. Raises TooSlow."""
        if len(text) > _LONG_LINE or pattern in self._patterns:
            return self._bounded.match(pattern.regex, text)
        return pattern.regex.match(text)

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

    def _error(self, kind: str) -> None:
        self._store.count(catalog.ERRORS, (kind,), origin="log")

    def _count(self, family: Family, labels: Labels) -> None:
        series = self._store.counters[family]
        series[labels] = series.get(labels, 0.0) + 1

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

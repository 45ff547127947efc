"""An engine's metrics page as numbers, and what has come since the page before."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from exporter.catalog import BY_SHORT
from exporter.engines.profile import Profile
from exporter.refine import Window

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and its labels, sorted."""

_NAME = re.compile(r"(?:# TYPE )?([A-Za-z_:][\w:]*)")
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)")
_SUFFIX = re.compile(r"_(?:total|bucket|sum|count|created)$")
_GROWING = ("_total", "_bucket", "_count")
_BEYOND = 1e18
_ROUNDING = 1e-9
_WHOLE = ("", "#", " ", "\t")  # what a line begins with that has no value
_MOST_REMEMBERED = 200_000  # series; more than any engine has, and what a page that churns labels may cost
_RESTART_SECONDS = 0.5  # a start time that differs by less is the same start, told anew
START_TIME = "process_start_time_seconds"


class NotAPage(ValueError):
    """What was answered is not a metrics page."""


@dataclass(slots=True)
class Page:
    """Samples by canonical name (``vllm:…``, whatever a collector made of it), and names announced without one."""

    samples: dict[str, dict[Key, float]] = field(default_factory=lambda: defaultdict(dict))
    names: set[str] = field(default_factory=set)
    dropped: Counter[str] = field(default_factory=Counter)
    """By metric: values that cannot be, and families that cannot be parsed."""
    bad: set[Key] = field(default_factory=set)
    """Series that are there with a value that cannot be."""
    growing: set[str] = field(default_factory=set)
    """Samples that can only grow while the engine lives."""
    size: int = 0
    """Characters."""

    def has(self, name: str) -> bool:
        """Whether the page has the metric *name* or announces it."""
        return name in self.names or any(name + suffix in self.names for suffix in ("_bucket", "_sum", "_total"))

    def put(self, entry: "_Entry", value: float) -> None:
        """Take the sample *entry* with this *value*, or count it where that cannot be; of two alike the larger."""
        if entry.grows:
            self.growing.add(entry.name)
        series = self.samples[entry.name]
        if not (abs(value) < _BEYOND and (value >= 0 or entry.name not in self.growing)):
            self.dropped[entry.base] += 1
            self.bad.add(entry.key)
            return
        series[entry.key] = max(series.get(entry.key, -math.inf), value)

    @property
    def started_at(self) -> float | None:
        return min(self.samples.get(START_TIME, {}).values(), default=None)


def names_of(text: str) -> set[str]:
    """The names of the samples and announcements of a page, as they stand there."""
    return {match[1] for line in text.split("\n") if (match := _NAME.match(line))}


@dataclass(frozen=True, slots=True)
class _Entry:
    """A sample of a page: where it belongs, and its value."""

    base: str
    name: str
    key: Key
    grows: bool
    value: float
    timed: bool
    """Its time stands behind its value."""


class PageReader:
    """Reads the samples a profile wants out of a page; the rest of the page is not even parsed.

    The stock parser takes tens of milliseconds for a page of vLLM, all of it on the event loop. But from one poll to
    the next hardly anything changes but the values: a page whose lines are those of the last one up to their values
    is not parsed again.
    """

    def __init__(self, profile: Profile) -> None:
        wanted = {name for rules in profile.page_rules().values() for rule in rules for name in rule.all_names}
        self._wanted = wanted | {START_TIME} | {info.sample for info in profile.info.values()}
        self._mapped = {name for rules in profile.page_rules().values() for rule in rules for name in rule.names}
        counters = (rules for short, rules in profile.page_rules().items() if BY_SHORT[short].kind == "counter")
        self._counters = {name for rules in counters for rule in rules for name in (*rule.names, *rule.less)}
        self._mirrors = set(profile.labels.mirrors)
        self._starts = {start.rstrip(":_"): start for start in profile.detect.metrics}
        starts = "|".join(map(re.escape, self._starts))
        self._prefix = re.compile(rf"(?:[A-Za-z]\w*?_)??({starts})[:_](?=\w)") if starts else None
        self._canonical: dict[str, str] = {}
        self._heads: list[str] = []
        self._shape: _Shape | None = None

    def read(self, text: str, *, openmetrics: bool = False) -> Page:
        """*text* as a page. Raises NotAPage if it holds no sample and no announcement at all."""
        lines = text.split("\n")
        if openmetrics:
            return self._parsed(lines, openmetrics=True)
        heads = [line if line[:1] in _WHOLE else line.rpartition(" ")[0] or line for line in lines]
        if heads != self._heads:
            self._heads, self._shape = heads, None
            return self._parsed(lines)
        if self._shape is None:
            self._shape = self._learn(lines)
        return self._shape.read(lines) or self._parsed(lines)

    def knows(self, page: Page) -> bool:
        """Whether *page* is that of the profile's engine: has a metric it maps, or one that begins as its do."""
        starts = tuple(self._starts.values())
        begins = bool(starts) and any(name.startswith(starts) for name in page.names)
        return begins or not self._mapped or any(map(page.has, self._mapped))

    def canonical(self, name: str) -> str:
        """The name as the engine's own documentation writes it."""
        if name not in self._canonical and len(self._canonical) < 10_000:
            match = self._prefix.match(name) if self._prefix else None
            self._canonical[name] = self._starts[match[1]] + name[match.end() :] if match else name
        return self._canonical.get(name, name)

    def _parsed(self, lines: list[str], *, openmetrics: bool = False) -> Page:
        page = Page(size=sum(map(len, lines)) + len(lines) - 1)
        for base, group in self._groups(lines, page.names).items():
            try:
                entries = list(self._entries(base, group, openmetrics))
            except (ValueError, KeyError, IndexError, TypeError):  # it is left out and counted, the others stay
                page.dropped[base] += 1
                continue
            for entry in entries:
                page.put(entry, entry.value)
        if not page.names:
            raise NotAPage("no metrics in the answer")
        return page

    def _learn(self, lines: list[str]) -> "_Shape":
        """Where each wanted value stands: what the stock parser makes of lines that have their number for a value."""
        shape = _Shape()
        parts = enumerate(zip(self._heads, lines, strict=True))
        numbered = [head if head == line else f"{head} {number}" for number, (head, line) in parts]
        for base, group in self._groups(numbered, shape.names).items():
            try:
                shape.entries += self._entries(base, group, False)
            except (ValueError, KeyError, IndexError, TypeError):
                shape.broken.append(base)
        shape.sound = bool(shape.names) and not any(entry.timed for entry in shape.entries)
        return shape

    def _groups(self, lines: list[str], names: set[str]) -> dict[str, list[str]]:
        """The lines of each wanted family; the *names* of all are noted."""
        groups = defaultdict[str, list[str]](list)
        for line in lines:
            match = _NAME.match(line)
            if match is None:
                continue
            name = self.canonical(match[1])
            names.add(name)
            if name != match[1]:  # a page may announce one form of a name and use the other
                line = line[: match.start(1)] + name + line[match.end(1) :]
            for base in {name, _SUFFIX.sub("", name), name + "_total"}:  # OpenMetrics announces without _total
                if base in self._wanted:
                    groups[base].append(line)
        return groups

    def _entries(self, base: str, lines: list[str], openmetrics: bool) -> Iterator[_Entry]:
        """The samples of one family's lines. Raises what the parsers raise if they cannot be parsed."""
        if openmetrics:
            families = list(openmetrics_families("\n".join(lines) + "\n# EOF\n"))  # type: ignore[no-untyped-call]
        else:
            families = list(text_families("\n".join(lines) + "\n"))
        printed = {match[1] for line in lines if (match := _SAMPLE.match(line))}
        for family in families:
            for sample in family.samples:
                name = sample.name
                if name not in printed:  # the parser adds _total to counters that an engine shows without it
                    name = name.removesuffix("_total")
                grows = (
                    family.type == "counter"
                    or name in self._counters
                    or (family.type != "gauge" and name.endswith(_GROWING))
                )
                labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in self._mirrors))
                yield _Entry(base, name, (name, labels), grows, sample.value, sample.timestamp is not None)


@dataclass(slots=True)
class _Shape:
    """A page without its values: the value of each entry is the number of the line that has it."""

    entries: list[_Entry] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Families that cannot be parsed."""
    names: set[str] = field(default_factory=set)
    sound: bool = True

    def read(self, lines: list[str]) -> Page | None:
        """The page with the values of *lines*, which are alike up to these; None where they must be parsed."""
        if not self.sound:
            return None
        page = Page(size=sum(map(len, lines)) + len(lines) - 1, names=set(self.names), dropped=Counter(self.broken))
        try:
            for entry in self.entries:
                text = lines[int(entry.value)].rpartition(" ")[2]
                if "_" in text:  # which Python takes for a number
                    return None
                page.put(entry, float(text))
        except (ValueError, IndexError):
            return None
        return page


class Increases:
    """What counters and histograms grew by, page after page. The first page only sets the reference.

    A series that is new on a later page has grown from 0. A value below the last means that the engine started
    anew: the value is the increase. That is so for every series if the start time of the process has changed, or,
    where the page does not tell it, if most series fell.
    """

    def __init__(self) -> None:
        self._last: dict[Key, float] = {}
        self._before: dict[Key, float] = {}
        self._unknown: set[Key] = set()
        self._started_at: float | None = None
        self._first = True
        self.restarted = False

    def turn(self, page: Page) -> None:
        """A new page has come: see whether the engine was started since the last."""
        self.restarted = not self._first and self._is_restart(page)
        now = {key: value for series in page.samples.values() for key, value in series.items()}
        self._before = {} if self.restarted else self._last
        if len(self._before) > _MOST_REMEMBERED:  # what vanished is forgotten, what is there keeps its reference
            self._before = {key: value for key, value in self._before.items() if key in now}
        self._unknown = (self._unknown - self._last.keys() | page.bad) - self._before.keys()
        self._last = {**self._before, **now}
        self._started_at = page.started_at

    def end(self) -> None:
        """The page has been used, if it was the engine's."""
        self._first = False

    def of(self, key: Key, value: float) -> float:
        """What the counter *key* grew by, 0 on the first page."""
        grown = value - self._reference(key, value)
        if grown < 0 and -grown <= _ROUNDING * value:
            return 0.0
        return grown if grown >= 0 else value

    def window(self, group: Mapping[str, Iterable[tuple[Key, float]]]) -> Window | None:
        """What came into one histogram series; None if its buckets make no sense.

        *group* holds the series' samples by suffix: ``_bucket``, ``_sum`` and ``_count``.
        """
        try:
            buckets = sorted((float(dict(key[1])["le"]), key, value) for key, value in group.get("_bucket", ()))
        except (KeyError, ValueError):
            return None
        if not buckets:  # a summary, or a histogram without its buckets: one bucket for all
            buckets = [(math.inf, key, value) for key, value in group.get("_count", ())]
        if not buckets or not math.isinf(buckets[-1][0]) or not group.get("_sum"):
            return None
        _, everything, count = buckets[-1]
        anew = count < self._reference(everything, count)  # the count of all fell: the series was born anew
        # from here on a fall is no restart but a value that cannot be: it stays negative, and is dropped as such
        cumulative = [round(value - (0.0 if anew else self._reference(key, value))) for _, key, value in buckets]
        counts = [after - before for before, after in zip([0, *cumulative], cumulative, strict=False)]
        total = sum(value - (0.0 if anew else self._reference(key, value)) for key, value in group.get("_sum", ()))
        return Window(tuple(bound for bound, _, _ in buckets[:-1]), tuple(counts), total)

    def _reference(self, key: Key, value: float) -> float:
        known = not (self._first or key in self._unknown)
        return self._before.get(key, 0.0 if known else value)

    def _is_restart(self, page: Page) -> bool:
        if page.started_at is not None and self._started_at is not None:
            return abs(page.started_at - self._started_at) > _RESTART_SECONDS
        fell = kept = 0
        for name, series in page.samples.items():
            if name in page.growing and not name.endswith("_bucket"):
                for key, value in series.items():
                    before = self._last.get(key, 0.0)
                    fell += value < before
                    kept += 0 < before <= value
        return fell > kept


def histograms(page: Page, name: str) -> Iterator[tuple[dict[str, str], dict[str, list[tuple[Key, float]]]]]:
    """The series of the histogram *name*: its labels without ``le``, and its samples by suffix."""
    groups: dict[tuple[tuple[str, str], ...], dict[str, list[tuple[Key, float]]]] = {}
    for suffix in ("_bucket", "_sum", "_count"):
        for key, value in page.samples.get(name + suffix, {}).items():
            labels = tuple(pair for pair in key[1] if pair[0] != "le")
            groups.setdefault(labels, {}).setdefault(suffix, []).append((key, value))
    for labels, group in groups.items():
        yield dict(labels), group


def totals(page: Page, name: str, count: str) -> Iterator[tuple[dict[str, str], dict[str, list[tuple[Key, float]]]]]:
    """The same for an engine that tells a sum (*name*) and how many it is of (*count*) as two counters."""
    counts = {key[1]: (key, value) for key, value in page.samples.get(count, {}).items()}
    for key, value in page.samples.get(name, {}).items():
        if key[1] in counts:
            yield dict(key[1]), {"_sum": [(key, value)], "_count": [counts[key[1]]]}

"""An engine's metrics page as numbers."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from exporter.catalog import BY_SHORT
from exporter.engines.profile import Profile

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and its labels, sorted."""

_NAME = re.compile(r"(?:# TYPE )?([A-Za-z_:][\w:]*)")
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)")
_SUFFIX = re.compile(r"_(?:total|bucket|sum|count|created)$")
_GROWING = ("_total", "_bucket", "_count")
_BEYOND = 1e18
_WHOLE = ("", "#", " ", "\t")  # what a line begins with that has no value
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
        """Unix time of the oldest process behind the page; one before 1970 is none."""
        return min((at for at in self.samples.get(START_TIME, {}).values() if at > 0), default=None)


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
            page = self._parsed(lines)
            self._shape = self._learn(lines)
            self._shape.sound = self._shape.sound and self._shape.read(lines) == page
            return page
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
        apart = all(head != line or line[:1] in _WHOLE for head, line in zip(self._heads, lines, strict=True))
        shape.sound = apart and not any(entry.timed for entry in shape.entries)
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

"""What each line of a log and each metric of a page became, and why; for adapting names to a server of one's own."""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exporter import catalog, verify
from exporter.catalog import ERROR_KINDS, Family
from exporter.engines import profile as profiles
from exporter.engines.profile import Profile
from exporter.lifecycle import Lifecycle
from exporter.signals import Labels, Origin
from exporter.sources.lines import Lines
from exporter.sources.page import PageReader, names_of
from exporter.sources.peel import Unwrapper
from exporter.store import Store

_SAMPLE = re.compile(r"[A-Za-z_:][\w:]*(?:\{.*\})? \S+(?: \d+)?\s*$|#|\s*$")
_PARTS = (
    (re.compile(r'"[^"]*"|\'[^\']*\''), "'…'"),
    (re.compile(r"\b(?=[\w-]*\d)[\w-]{6,}\b"), "…"),
    (re.compile(r"\d+(?:[.,]\d+)*"), "0"),
)
_SHAPE_LENGTH = 100
_ERROR = "error, kind "
_SETTLED = 60.0
IGNORED = "known and of no use here"
_APART = 1e-3  # seconds between two lines, so that what is judged by time keeps its order


@dataclass(slots=True)
class Told:
    """One line or metric and what came of it; *why* says why nothing did."""

    number: int
    text: str
    became: list[str] = field(default_factory=list)
    why: str = ""


class _Recorder(Store):
    """A store that also notes what it is given."""

    def __init__(self, lines: list[str], **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._notes = lines

    def count(self, family: Family, labels: Labels, amount: float = 1.0, *, origin: Origin) -> None:
        super().count(family, labels, amount, origin=origin)
        what = _ERROR + labels[0] if family is catalog.ERRORS else f"{_named(family, labels)} +{amount:g}"
        self._notes.append(what)

    def observe(
        self, family: Family, labels: Labels, value: float, count: int = 1, *, origin: Origin, ago: float | None = 0.0
    ) -> None:
        super().observe(family, labels, value, count, origin=origin, ago=ago)
        times = f" x{count}" if count > 1 else ""
        self._notes.append(f"{_named(family, labels)} = {value:g} s{times}")

    def drop(self, family: Family, count: int = 1) -> None:
        super().drop(family, count)
        self._notes.append(f"{family.short}: dropped, the value cannot be true")


def is_page(text: str) -> bool:
    """Whether *text* is a metrics page rather than a log."""
    lines = text.split("\n")[:200]
    return bool(names_of(text)) and all(_SAMPLE.match(line) for line in lines)


def log(text: str, profile: Profile, **own: Any) -> list[Told]:
    """Each line of *text* as *profile* and a user's *own* patterns and fields read it; an error at its last line."""
    notes: list[str] = []
    now, counted = 0.0, dict[str, tuple[float | None, float]]()
    store = _Recorder(notes, clock=lambda: now, wall=lambda: now)
    life = Lifecycle(has_page=False)
    lines = Lines("log", profile, store, life, clock=lambda: now, counted=counted, **own)
    matched = store.counters[catalog.LOG_MATCHED]
    told = [Told(number, line) for number, line in enumerate(text.removesuffix("\n").split("\n"), 1)]

    def note(here: Told, phase: str, more: list[str]) -> None:
        """Put what was told while a line was read where it belongs."""
        errors = [kind for kind in ERROR_KINDS if f"{_ERROR}{kind}" in notes]
        here.became += [what for what in notes if not what.startswith(_ERROR)] + more
        for kind in errors:
            at = told[round(counted[kind][1] / _APART) - 1]
            at.became.append(_ERROR + kind)
            at.why = ""
            here = at if kind == "engine_dead" else here
        if life.phase != phase:
            here.became.append(f"phase {life.phase}")
        notes.clear()

    for here in told:
        before, phase, facts, unparsed = dict(matched), life.phase, set(lines.samples()), _unparsed(store)
        now += _APART
        lines.feed(here.text.encode() + b"\n", history=False)
        by = [name for (_, name), n in matched.items() if n > before.get(("log", name), 0)]
        here.became = [f"pattern {name}" for name in by]
        note(
            here,
            phase,
            [f"{_named(s.family, s.labels)} = {s.value:g}" for s in lines.samples() if s not in facts and by],
        )
        if not here.became:
            here.why = _why(lines, _unparsed(store) > unparsed)
    now += _SETTLED
    phase = life.phase
    lines.flush()
    note(told[-1], phase, [])
    return told


def page(text: str, profile: Profile) -> list[Told]:
    """Each metric of the page *text* as *profile* reads it."""
    reader = PageReader(profile)
    mapped = defaultdict[str, dict[str, None]](dict)
    for short, rules in profile.page_rules().items():
        for name in (name for rule in rules for name in rule.all_names):
            mapped[name.removesuffix("_total")][short] = None
    for name, info in profile.info.items():
        mapped[info.sample][f"engine_info, {name}"] = None
    ignored = re.compile("|".join(_glob(pattern) for pattern in profile.ignored) or r"(?!)")
    names = {re.sub(r"_(?:bucket|sum|count|created)$", "", name) for name in map(reader.canonical, names_of(text))}
    told = []
    for number, name in enumerate(sorted(names), 1):
        known = any(ignored.fullmatch(form) for form in (name, name + "_total"))
        became = list(mapped.get(name.removesuffix("_total"), ()))
        told.append(Told(number, name, became, "" if became else IGNORED if known else "not known to the profile"))
    return told


def engine_of(text: str) -> str:
    """The engine that wrote *text*, a log or a page; generic if none is recognised."""
    found = profiles.of_page(names_of(text)) if is_page(text) else profiles.of_log(Unwrapper().feed(text.encode()))
    return found or profiles.GENERIC


def shapes(told: list[Told]) -> Counter[str]:
    """What the lines that became nothing look like, numbers and names taken out, with how many there are."""
    return Counter(shape(t.text) for t in told if not t.became and t.why != IGNORED and t.text.strip())


def shape(text: str) -> str:
    """*text* without what differs from line to line."""
    for regex, instead in _PARTS:
        text = regex.sub(instead, text)
    return text[:_SHAPE_LENGTH]


def read(path: Path) -> str:
    """The text of *path*, whatever its bytes. Raises OSError."""
    return path.read_bytes().decode("utf-8", "replace")


def _why(lines: Lines, unparsed: bool) -> str:
    if lines.in_echo:
        return "part of what a client sent"
    if unparsed:
        return "holds the words of a pattern and does not fit it"
    return "holds nothing the profile looks for"


def _unparsed(store: Store) -> float:
    return sum(store.counters[catalog.LOG_UNPARSED].values())


def _named(family: Family, labels: Labels) -> str:
    return verify.name_of(family, labels)


def _glob(pattern: str) -> str:
    return ".*".join(map(re.escape, pattern.split("*")))

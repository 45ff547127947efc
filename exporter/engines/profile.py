"""A profile: the data file that says how to translate one engine's page and log into our families.

Data only, checked whole when it is read: every family, label, unit and group it names must exist.
"""

import difflib
import re
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

from exporter import strictyaml
from exporter.catalog import BY_SHORT, ERROR_KINDS, PHASES, Family
from exporter.engines.literal import literals_of
from exporter.strictyaml import ConfigError, Seconds

SHARED = "shared"
GENERIC = "generic"
INFO_LABELS = ("version", "model", "dtype", "quantization")
_FILLED_IN = ("model", "source", "rank")  # labels a rule need not give
GROUP = re.compile(r"\$(\w+)")
RANK_PARTS = ("rank", "pipeline", "tensor", "expert")
"""What the start of a line may tell of who wrote it, as groups of a record or a process; rank is data-parallel."""
UNITS: dict[str, float] = {
    "": 1.0,
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ns": 1e-9,
    "min": 60.0,
    "%": 0.01,
    "B": 1.0,
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
    "KB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
}


def _family(short: str) -> Family:
    if short not in BY_SHORT:
        near = [n for n in BY_SHORT if short in n] or difflib.get_close_matches(short, BY_SHORT, 1, 0.4)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"no family {short!r} in the catalog{hint}")
    return BY_SHORT[short]


def _check_labels(family: Family, labels: dict[str, str]) -> None:
    wanted = [label for label in family.labels if label not in _FILLED_IN]
    missing = [label for label in wanted if label not in labels]
    unknown = [label for label in labels if label not in family.labels]
    if missing or unknown:
        takes = f"wants the labels {', '.join(wanted)}" if wanted else "takes no labels here"
        raise ValueError(f"{family.short} {takes}, got {', '.join(sorted(labels)) or 'none'}")
    for label, values in family.closed:
        value = labels.get(label, values[0])
        if "$" not in value and value not in values:
            raise ValueError(f"label {label} must be one of {', '.join(values)}, got {value!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Signal:
    """One thing a matched line says.

    *value* is a named group of the pattern, a number, or ``elapsed`` (seconds since the line that began it);
    left out it is 1, or the field's own value. *times* and *over*, each a group or a number, multiply and divide it;
    a factor that the line leaves out is 1. *weight*, the same, is how many observations of it the line stands for.
    *total* says that the value goes on growing while the engine lives: each rank's increase counts. In a label value
    ``$name`` is the text of that group, or of that part of the rank.
    """

    signal: str
    value: str = ""
    times: str = ""
    over: str = ""
    unit: str = ""
    weight: str = ""
    total: bool = False
    labels: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_labels(_family(self.signal), self.labels)
        if self.value == "elapsed" and self.unit not in ("", "s"):
            raise ValueError(f"unit must be s for elapsed, got {self.unit!r}")
        if self.total and self.family.kind != "counter":
            raise ValueError(f"total is for counters, and {self.signal} is a {self.family.kind}")
        if self.unit not in UNITS:
            raise ValueError(f"unit must be one of {', '.join(u for u in UNITS if u)}, got {self.unit!r}")

    @property
    def family(self) -> Family:
        return BY_SHORT[self.signal]


@dataclass(frozen=True, slots=True)
class LineSample:
    """A line as the engine prints it, and what must come of it: ``family{label=value}: number``."""

    line: str
    gives: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """A kind of line. *regex* is matched at the start of the message, after time, level and place.

    *contains* are literals of which the line must hold one; derived from the regex when left out.
    *startup* lines are facts about the engine: kept until its next start, and looked for in what was written
    before Stopline started. *begin* and *end* name the group with the id that pairs two lines. *spoils* names
    patterns whose next line of the same rank is not to be believed, as their first line ever.
    """

    name: str
    regex: re.Pattern[str]
    contains: str | tuple[str, ...] = ()
    startup: bool = False
    phase: str = ""
    info: dict[str, str] = field(default_factory=dict)
    signals: tuple[Signal, ...] = ()
    begin: str = ""
    end: str = ""
    spoils: tuple[str, ...] = ()
    samples: tuple[LineSample, ...] = ()
    rejects: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        groups = self.regex.groupindex
        named = [self.begin, self.end, *self.info.values()]
        given = (v for s in self.signals for v in (s.value, s.times, s.over, s.weight))
        named += [v for v in given if not is_number(v) and v != "elapsed"]
        labels = [name for s in self.signals for v in s.labels.values() for name in GROUP.findall(v)]
        for name in (*named, *(name for name in labels if name not in RANK_PARTS)):
            if name and name not in groups:
                raise ValueError(f"pattern {self.name}: no group named {name!r} in the regex")
        if self.phase and self.phase not in PHASES:
            raise ValueError(f"pattern {self.name}: phase is one of {', '.join(PHASES)}; got {self.phase!r}")
        for label in self.info:
            if label not in INFO_LABELS:
                raise ValueError(f"pattern {self.name}: info is one of {', '.join(INFO_LABELS)}")
        if any(s.value == "elapsed" for s in self.signals) and not self.end:
            raise ValueError(f"pattern {self.name}: 'elapsed' needs 'end'")

    @property
    def literals(self) -> tuple[str, ...]:
        """What a line must hold at least one of; empty if nothing is certain, and every line must be tried."""
        if self.contains:
            return (self.contains,) if isinstance(self.contains, str) else self.contains
        return literals_of(self.regex)


@dataclass(frozen=True, slots=True, eq=False)
class Echo:
    """A line that repeats what a client sent. It is never an error; nor is what follows until *ends* matches.

    With *spares_errors* a record at level error is none: it failed, and says of what request.
    """

    regex: re.Pattern[str]
    ends: re.Pattern[str]
    spares_errors: bool = False


@dataclass(frozen=True, slots=True)
class Kind:
    """Messages of one kind of error; matched at the start of a message, with or without an exception's type.

    What is quoted in a message may be a client's text: only a regex with a quote in it finds anything there.
    """

    kind: str
    regex: re.Pattern[str]

    def __post_init__(self) -> None:
        if self.kind not in ERROR_KINDS:
            raise ValueError(f"kind must be one of {', '.join(ERROR_KINDS)}, got {self.kind!r}")


@dataclass(frozen=True, slots=True)
class ErrorSample:
    """Lines as printed, and the kinds that come of them, none if that is left out."""

    lines: str
    kinds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ErrorRules:
    """Which lines are errors, and of which kind.

    *gates* are literals; only a line with one of them is looked at. A record is an error by its own level, or,
    where the line has none, by its *shapes*. *kinds* are tried in the precedence of the catalog. *context* are
    error lines that only describe another; *client* are a client's mistakes. *access* are the lines of the HTTP
    server, with a group ``status``: each with 5xx is an event of its own.
    """

    gates: tuple[str, ...] = ()
    shapes: tuple[re.Pattern[str], ...] = ()
    kinds: tuple[Kind, ...] = ()
    context: tuple[re.Pattern[str], ...] = ()
    client: tuple[re.Pattern[str], ...] = ()
    access: tuple[re.Pattern[str], ...] = ()
    samples: tuple[ErrorSample, ...] = ()


@dataclass(frozen=True, slots=True)
class LogRules:
    """How the engine's log is read. *records* are the shapes of what stands before a message, most usual first.

    *processes* are the names in ``(name pid=n)`` that tell a rank.
    """

    records: tuple[re.Pattern[str], ...] = ()
    processes: tuple[re.Pattern[str], ...] = ()
    patterns: tuple[Pattern, ...] = ()
    fields: dict[str, Signal | tuple[Signal, ...]] = field(default_factory=dict)
    echoes: tuple[Echo, ...] = ()
    errors: ErrorRules = ErrorRules()
    gauges_expire: Seconds = Seconds(60.0)


@dataclass(frozen=True, slots=True)
class PageRule:
    """One way to get a family from the page. *sample* lists a metric's names, newest first: the first present counts.

    *where* keeps the series whose labels match; *label_value* takes the number from that label of an info metric.
    *over* divides a gauge (without *sample*, 1) by another of the same labels, *times* multiplies it (by another
    label, beside *label_value*), *less* takes another off, the first that is there. *count* is how many observations
    a counter of their sum holds, for a histogram that is told as two counters. Of a counter, *less* names those whose
    increase is taken off, for another family counts it already; with *open*, gauges of what is under way, what is left
    counts once it is neither finished (*less*) nor open any more: that has gone away. Of times that are told as
    requests end, *decode* names the histogram of the same requests' times from first token to the end, and of queue
    waits *latency* that from their arrival. With *above*, a bound of a histogram, a counter holds how many of its
    observations were above it.
    """

    sample: str | tuple[str, ...] = ""
    where: dict[str, re.Pattern[str]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    scale: float = 1.0
    label_value: str = ""
    over: str = ""
    times: str = ""
    count: str = ""
    less: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    latency: str = ""
    decode: str = ""
    above: float | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        if not self.sample and not self.over:
            raise ValueError("sample is required, but for one over another (over)")

    @property
    def all_names(self) -> tuple[str, ...]:
        """Every metric the rule looks at."""
        other = (self.over, self.count, "" if self.label_value else self.times, self.latency, self.decode)
        return tuple(name for name in (*self.names, *other, *self.less, *self.open) if name)

    @property
    def names(self) -> tuple[str, ...]:
        sample = self.sample or self.over
        return (sample,) if isinstance(sample, str) else sample


@dataclass(frozen=True, slots=True, eq=False)
class SpanRule:
    """What a span of one request says. *name* is matched whole; a span without one of *has* says nothing.

    The *value* of a signal is an attribute that is a number, or ``duration`` (seconds from start to end).
    """

    name: re.Pattern[str]
    signals: tuple[Signal, ...]
    has: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for signal in self.signals:
            if not signal.value or signal.family.kind != "histogram":
                raise ValueError(f"signals of a span are times with a value, got {signal.signal}")


@dataclass(frozen=True, slots=True)
class Detect:
    """How the engine is recognised: by the start of its metrics' names, or by a line of its log.

    *exact* are names without a start of their own; a page that has them all is this engine's, if no other's.
    """

    metrics: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    log: tuple[re.Pattern[str], ...] = ()


@dataclass(frozen=True, slots=True)
class PageInfo:
    """Something of the engine's identity that stands in the *label* of an info metric *sample*."""

    sample: str
    label: str


@dataclass(frozen=True, slots=True)
class PageLabels:
    """Labels with a meaning: the model's name, the data-parallel rank, and those along which ranks only mirror."""

    model: str = ""
    rank: str = ""
    mirrors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Hint:
    """What the engine tells if it is started with *flag*: *gives*. Both are Markdown, for people.

    It does not tell it yet if no line fits one of *patterns*; if its page has none of *metrics*, or, with
    *bucket_below*, no bucket of them under so many seconds; or, with *page*, if it answers and has no page. With none
    of these it cannot be seen.
    """

    flag: str
    gives: str
    patterns: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    bucket_below: float = 0.0
    page: bool = False


@dataclass(frozen=True, slots=True)
class Profile:
    """Everything Stopline knows of one engine. *order* overrides which source has the word on a signal.

    *preallocates* says whether it takes the memory of its GPUs when it starts; left out where that depends. *reasons*
    are, by sample, all the values known of a label that says how a request ended: another one is told as unknown, and
    says neither that the request was answered nor that it failed.
    """

    engine: str
    title: str = ""
    versions: str = ""
    tells: str = ""
    preallocates: bool | None = None
    detect: Detect = Detect()
    metrics_path: str = "/metrics"
    iterations_path: str = ""
    health_path: str = ""
    labels: PageLabels = PageLabels()
    info: dict[str, PageInfo] = field(default_factory=dict)
    metrics: dict[str, PageRule | tuple[PageRule, ...]] = field(default_factory=dict)
    reasons: dict[str, dict[str, re.Pattern[str]]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    order: dict[str, tuple[Literal["trace", "log", "metrics"], ...]] = field(default_factory=dict)
    log: LogRules = LogRules()
    spans: tuple[SpanRule, ...] = ()
    hints: tuple[Hint, ...] = ()

    def __post_init__(self) -> None:
        problems = []
        for short, rules in self.page_rules().items():
            for rule in rules:
                try:
                    _check_labels(_family(short), rule.labels)
                    if any("$" in value for value in rule.labels.values()):
                        raise ValueError("labels of a page's rule are fixed; see info for what an info metric tells")
                except ValueError as error:
                    problems.append(f"metrics.{short}: {error}")
        mapped = {name for rules in self.page_rules().values() for rule in rules for name in rule.names}
        problems += [
            f"reasons.{name}: no rule of metrics has this sample" for name in self.reasons if name not in mapped
        ]
        patterns = {pattern.name for pattern in self.log.patterns}
        for pattern in self.log.patterns:
            problems += [
                f"pattern {pattern.name}: spoils {n!r}, no such pattern" for n in pattern.spoils if n not in patterns
            ]
        problems += [
            f"info.{name}: is one of {', '.join(INFO_LABELS)}" for name in self.info if name not in INFO_LABELS
        ]
        unknown = (name for name in self.order if name.partition(".")[0] not in BY_SHORT)
        problems += [f"order.{name}: no such family in the catalog" for name in unknown]
        known = {pattern.name for pattern in self.log.patterns}
        hinted = (name for hint in self.hints for name in hint.patterns if name not in known)
        problems += [f"hints: no pattern {name!r} in log.patterns" for name in hinted]
        if problems:
            raise ConfigError(problems)

    def page_rules(self) -> dict[str, tuple[PageRule, ...]]:
        """The rules for the page by family, in the catalog's short names."""
        return {n: (r,) if isinstance(r, PageRule) else r for n, r in self.metrics.items()}


def load(path: Path) -> Profile:
    """A user's own profile. Raises ConfigError."""
    return strictyaml.load(path, Profile)


@cache
def bundled(engine: str) -> Profile:
    """A profile that ships with Stopline. Raises KeyError for an engine that has none."""
    if engine not in names():
        raise KeyError(engine)
    return _ours(engine)


@cache
def names() -> tuple[str, ...]:
    """The engines that ship with Stopline, the generic one last."""
    files = [Path(str(f)).stem for f in resources.files("exporter.engines").iterdir() if f.name.endswith(".yaml")]
    return tuple(sorted((f for f in files if f != SHARED), key=lambda n: (n == GENERIC, n)))


@cache
def shared() -> ErrorRules:
    """What fails alike in every engine built on PyTorch and CUDA."""
    return _ours(SHARED).log.errors


def _ours(name: str) -> Profile:
    return strictyaml.load(Path(str(resources.files("exporter.engines") / f"{name}.yaml")), Profile, ours=True)


@cache
def metrics_paths() -> tuple[str, ...]:
    """Where engines have their metrics pages."""
    return tuple(dict.fromkeys(bundled(engine).metrics_path for engine in (GENERIC, *names())))


def of_page(sample_names: set[str]) -> str:
    """The engine whose page this is, by its metrics' names; empty if none is recognised.

    A collector may have put its own prefix before the name and an underscore in place of the colon.
    """
    for engine in names():
        for start in bundled(engine).detect.metrics:
            wanted = re.compile(rf"(?:[A-Za-z]\w*_)?{re.escape(start).replace(':', '[:_]')}")
            if any(wanted.match(name) for name in sample_names):
                return engine
    exact = ((engine, bundled(engine).detect.exact) for engine in names())
    return next((engine for engine, wanted in exact if wanted and sample_names.issuperset(wanted)), "")


def of_log(data: bytes) -> str:
    """The engine that printed these lines; empty if they could be anyone's."""
    for engine in names():
        for regex in bundled(engine).detect.log:
            possible = any(literal.encode() in data for literal in literals_of(regex))
            if possible and regex.search(data.decode("utf-8", "replace")):
                return engine
    return ""


def is_number(text: str) -> bool:
    """Whether *text* stands for itself, and is not the name of a group."""
    try:
        float(text)
    except ValueError:
        return False
    return True

"""The error corpus: lines as engines print them count as what stands beside them, whatever is wrapped around a line.

``tests/fixtures/corpus/<engine>.yaml`` lists entries. *lines* is one record, of one line or several, or a list of
records; *kind* what they count as: one, a list, or left out for none; *why* says why, where that is not plain; *from*
names the capture that has these lines, the others follow the engine's sources. ``shared`` is for every engine built on
PyTorch.
"""

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import yaml
from harness import Reader
from hypothesis import given, settings
from hypothesis import strategies as st

from exporter.catalog import ERROR_KINDS
from exporter.engines import profile as profiles
from exporter.sources.peel import BELOW, ERROR, WARNING, Shape, peel

FIXTURES = Path(__file__).parent / "fixtures"
FILES = [path.stem for path in sorted((FIXTURES / "corpus").glob("*.yaml"))]
ENGINES = [name for name in FILES if name != "shared"]
PYTORCH = [name for name in ENGINES if name != "llamacpp"]
NEVER = {  # kinds that neither an engine nor what it is built on tells in a line
    "vllm": {"hang"},
    "tgi": {"hang"},
    "lmdeploy": {"hang"},
    "llamacpp": {"collective", "timeout", "hang"},
    "triton": {"hang"},
    "dynamo": {"kv_cache", "hang"},
    "nim": {"hang"},
}


@dataclass(frozen=True)
class Entry:
    """Records of *engine*, each of one line or several, and what they count as."""

    name: str
    engine: str
    records: tuple[str, ...]
    kinds: tuple[str, ...]
    why: str
    source: str


@cache
def corpus(file: str) -> tuple[Entry, ...]:
    entries = []
    for n, item in enumerate(yaml.safe_load((FIXTURES / "corpus" / f"{file}.yaml").read_text()), 1):
        assert set(item) <= {"lines", "kind", "why", "from"}, (file, n)
        records = [item["lines"]] if isinstance(item["lines"], str) else item["lines"]
        kinds = [item["kind"]] if isinstance(item.get("kind"), str) else item.get("kind", [])
        texts = tuple(record.removesuffix("\n") for record in records)
        entries.append(Entry(f"{file} {n}", file, texts, tuple(kinds), item.get("why", ""), item.get("from", "")))
    return tuple(entries)


ALL = [entry for file in FILES for entry in corpus(file)]


def read_by(engine: str) -> list[Entry]:
    """All entries that *engine* may print."""
    shared = corpus("shared") if engine in PYTORCH else ()
    return [*corpus(engine), *(replace(entry, engine=engine) for entry in shared)]


# What may stand around a line, from the inside out. A record is a list of lines: one write of the server.

Form = Callable[[str, list[str]], list[str]]  # engine and record to record


def plain(engine: str, record: list[str]) -> list[str]:
    return record


def level_in_colour(engine: str, record: list[str]) -> list[str]:
    level = r"(?<!\w)(DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL|[DIWEF])(?=[\s:\]])"
    return [re.sub(level, "\x1b[1;31m\\1\x1b[0m", line, count=1) for line in record]


def in_colour(engine: str, record: list[str]) -> list[str]:
    text = "\n".join(record)
    return f"\x1b[38;5;9m{text}\x1b[0m".split("\n")


@cache
def shapes(engine: str) -> list[Shape]:
    return [Shape(regex) for regex in profiles.bundled(engine).log.records]


def in_json(level_key: str, text_key: str, stack_key: str = "") -> Form:
    """One object for a whole record, behind the process's name; what was not printed by a logger stays as it is."""

    def form(engine: str, record: list[str]) -> list[str]:
        lines = [peel(line.encode(), shapes(engine)) for line in record]
        if not lines[0].shaped or lines[0].fields:
            return record
        text, traceback, stack = "\n".join(line.text for line in lines), "", ""
        if stack_key:
            text, traceback, stack = text.partition("Traceback (most recent call last):")
        level = {ERROR: "ERROR", WARNING: "WARNING", BELOW: "INFO"}.get(lines[0].level, "")
        told = {"timestamp": lines[0].time, level_key: level, text_key: text, stack_key: traceback + stack}
        name = re.match(r"(?:\([^)]*pid=[^)]*\) ?)*", record[0])
        return [name[0] + json.dumps({key: value for key, value in told.items() if value})]

    return form


FORMS: dict[str, Form] = {
    "plain": plain,
    "level in colour": level_in_colour,
    "in colour": in_colour,
    "pythonjsonlogger": in_json("levelname", "message", "exc_info"),
    "structlog": in_json("level", "event", "exception"),
    "JSON": in_json("level", "msg"),
}


def as_it_is(line: str) -> str:
    return line


def named(line: str) -> str:
    """As versions of vLLM print it that put the name of the process before all that it writes."""
    return line if re.match(r"(?:\x1b\[[\d;]*m)?\(", line) else f"(Worker_TP1 pid=412) {line}"


def in_ray(line: str) -> str:
    return f"\x1b[36m(ServeReplica:default:LLMServer pid=8421, ip=10.0.0.8)\x1b[0m {line}"


NAMES = {"vllm": [as_it_is, named, in_ray], "sglang": [as_it_is, in_ray]}


def whole(line: bytes) -> list[bytes]:
    return [line]


def halves(line: bytes) -> list[bytes]:
    return [line[: len(line) // 2], line[len(line) // 2 :]]


def awkward(line: bytes) -> list[bytes]:
    """Cut after the first byte, before the last, within a character and within a colour."""
    at = {1, len(line) - 1}
    at |= {m.start() + 1 for m in itertools.islice(re.finditer(rb"[\xc3-\xf4][\x80-\xbf]|\x1b\[", line), 4)}
    cuts = [0, *sorted(cut for cut in at if 0 < cut < len(line)), len(line)]
    return [line[begin:end] for begin, end in itertools.pairwise(cuts)]


def cri(parts: Callable[[bytes], list[bytes]]) -> Callable[[bytes], bytes]:
    def container(line: bytes) -> bytes:
        *first, last = parts(line)
        lines = [b"2026-11-30T08:00:00.000000000Z stderr P " + part + b"\n" for part in first]
        return b"".join([*lines, b"2026-11-30T08:00:00.000000001Z stderr F " + last + b"\n"])

    return container


def docker(parts: Callable[[str], list[str]]) -> Callable[[bytes], bytes]:
    def container(line: bytes) -> bytes:
        rest = {"stream": "stderr", "time": "2026-11-30T08:00:00.000000000Z"}
        texts = parts(line.decode() + "\n")
        return b"".join(json.dumps({"log": text} | rest, separators=(",", ":")).encode() + b"\n" for text in texts)

    return container


CONTAINERS: dict[str, Callable[[bytes], bytes]] = {
    "a file": lambda line: line + b"\n",
    "CRI": cri(whole),
    "CRI in halves": cri(halves),
    "CRI in awkward parts": cri(awkward),
    "Docker": docker(whole),
    "Docker in halves": docker(halves),
}


@dataclass(frozen=True)
class Wrapping:
    """One way in which a line can reach a file."""

    form: str = "plain"
    name: Callable[[str], str] = as_it_is
    end: str = ""
    container: str = "a file"

    def __str__(self) -> str:
        return f"{self.form}, {self.name.__name__}, {'CRLF' if self.end else 'LF'}, {self.container}"

    def lines(self, entry: Entry) -> list[bytes]:
        """The physical lines that *entry* becomes."""
        records = [FORMS[self.form](entry.engine, record.split("\n")) for record in entry.records]
        lines = [self.name(line) + self.end for record in records for line in record]
        return [CONTAINERS[self.container](line.encode()) for line in lines]


def wrappings(engine: str, form: str) -> list[Wrapping]:
    names = NAMES.get(engine, [as_it_is])
    return [Wrapping(form, *rest) for rest in itertools.product(names, ("", "\r"), CONTAINERS)]


def check(cases: Iterable[tuple[Entry, Wrapping]]) -> None:
    """Each entry by itself counts as what it says."""
    wrong: dict[str, list[str]] = {}
    for entry, wrapping in cases:
        counted = Reader(entry.engine).feed(b"".join(wrapping.lines(entry))).settle(60).errors
        if counted != Counter(entry.kinds):
            told = f"counts {dict(counted) or 'nothing'}, not {dict(Counter(entry.kinds)) or 'nothing'}"
            which = f"{entry.name} ({entry.records[0][:200]!r}), read by {entry.engine}, {told}"
            wrong.setdefault(which, []).append(str(wrapping))
    assert not wrong, "\n".join(f"{which}: {len(where)} times, first as {where[0]}" for which, where in wrong.items())


# the corpus itself


def test_the_corpus_is_large_and_much_of_it_is_no_error() -> None:
    assert len(ALL) >= 300
    assert sum(not entry.kinds for entry in ALL) >= 0.4 * len(ALL)
    assert [entry.name for entry in ALL if not entry.kinds and not entry.why] == []
    assert {kind for entry in ALL for kind in entry.kinds} <= set(ERROR_KINDS)
    assert len({(entry.engine, entry.records) for entry in ALL}) == len(ALL)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_kind_that_an_engine_can_print_is_there(engine: str) -> None:
    assert set(ERROR_KINDS) - {kind for entry in read_by(engine) for kind in entry.kinds} == NEVER.get(engine, set())


def test_what_is_said_to_be_captured_stands_in_the_capture() -> None:
    captured = [entry for entry in ALL if entry.source]
    lines = [(entry, line) for entry in captured for record in entry.records for line in record.split("\n")]
    assert len(captured) > 50
    assert [(e.name, line) for e, line in lines if line not in (FIXTURES / e.source).read_text()] == []


# what comes of it


@pytest.mark.parametrize("engine", ENGINES)
def test_every_entry_counts_as_what_it_says(engine: str) -> None:
    check((entry, Wrapping()) for entry in read_by(engine))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_entry_counts_the_same_under_everything_around_it(engine: str, form: str) -> None:
    check(itertools.product(corpus(engine), wrappings(engine, form)))


@pytest.mark.parametrize("form", FORMS)
def test_an_entry_that_engines_share_counts_the_same_under_everything_around_it(form: str) -> None:
    """The engines take turns."""
    for turn, entry in enumerate(corpus("shared"), list(FORMS).index(form)):
        engine = PYTORCH[turn % len(PYTORCH)]
        check((replace(entry, engine=engine), wrapping) for wrapping in wrappings(engine, form))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_entries_in_one_log_count_as_much_as_each_by_itself(data: st.DataObject) -> None:
    """In any order, a minute apart, the engine started anew before each; cut into chunks anywhere."""
    engine = data.draw(st.sampled_from(ENGINES))
    wrapping = data.draw(st.sampled_from([w for form in FORMS for w in wrappings(engine, form)]))
    chosen = data.draw(st.lists(st.sampled_from(read_by(engine)), min_size=2, max_size=8, unique=True))
    reader = Reader(engine)
    for minute, entry in enumerate(chosen):
        reader.lifecycle.begin(None)
        later = [re.sub(r"(?<![\d:])\d\d:\d\d:\d\d", f"07:{minute:02}:00", record) for record in entry.records]
        lines = wrapping.lines(replace(entry, records=tuple(later)))
        cuts = sorted(data.draw(st.sets(st.integers(1, len(lines)), max_size=3)) | {0, len(lines)})
        for begin, end in itertools.pairwise(cuts):
            reader.feed(b"".join(lines[begin:end]))
        reader.settle(60)
    assert reader.errors == sum((Counter(entry.kinds) for entry in chosen), Counter())

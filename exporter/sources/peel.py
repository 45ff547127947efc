"""From the bytes of a log to records: container prefix, colours, process prefix and JSON taken off, in that order."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from exporter.engines.profile import RANK_PARTS

_CRI = re.compile(rb"(?m)^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d) (stdout|stderr) ([PF])(?: |$)")
_CRI_STREAMS = (b" stdout F", b" stderr F", b" stdout P", b" stderr P")
_DOCKER_STREAM = b'","stream":"std'
MARKS = (*_CRI_STREAMS, _DOCKER_STREAM)
"""One of them is in every line of a container runtime."""
_CRI_FULL = re.compile(rb"(?m)^\S+ (?:stdout|stderr) F(?: |$)")
_DOCKER = re.compile(rb'(?m)^\{"log":"(?:[^"\\]|\\.)*+","stream":"std(?:out|err)"')
_ANSI = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)|\xc2\x9b[0-?]*[ -/]*[@-~]")
_ANSI_TEXT = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\))")
# vLLM's and Ray's name of a process, and the rank that torch.distributed puts before each line of an exception
_PROCESS = re.compile(r"\(((?:[A-Za-z][\w.:\-]*(?: [\w=]+)?? )?pid=\d+)(?:, ip=[^)\s]+)?\) ?|\[(rank\d+)\]: ")
_TIMES = (  # a shape, and what is put before the text: of a leap year, so that 29 February can be read
    ("", ""),
    ("", "2000-"),
    ("%m%d %H:%M:%S.%f", "2000-"),
    ("%m-%d %H:%M:%S", "2000-01-01 "),
    ("%m-%d %H:%M:%S.%f", "2000-01-01 "),
)
_PARTS = re.compile(r"\\.|\[(?:\\.|[^\]\\])+\]|.")  # of a regex: escapes and sets whole
_MAX_JOINED = 64 << 10
_MAX_JSON = 256 << 10

ERROR, WARNING, BELOW = "error", "warning", "below"
_LEVELS: dict[object, str] = {
    **dict.fromkeys(("INFO", "DEBUG", "I", "D"), BELOW),
    **dict.fromkeys(("ERROR", "CRITICAL", "FATAL", "E", "F"), ERROR),
    **dict.fromkeys(("WARNING", "WARN", "W"), WARNING),
    **dict.fromkeys(("error", "err", "e", "critical", "crit", "fatal", "f", "c", "alert", "emerg"), ERROR),
    **dict.fromkeys(("warning", "warn", "w"), WARNING),
}
_LEVEL_KEYS = ("level", "levelname", "severity", "lvl", "log_level", "loglevel", "log.level", "record.level.name")
_TEXT_KEYS = ("message", "msg", "event", "record.message", "text", "log", "fields.message")
_TIME_KEYS = ("timestamp", "time", "ts", "@timestamp", "asctime")
_STACK_KEYS = ("exc_info", "exception", "traceback", "stack", "stack_trace", "error.stack")


NO_RANKS: Mapping[str, str] = MappingProxyType({})


@dataclass(slots=True)
class Record:
    """One line, peeled. *shaped* says that the line starts a record by its own shape; else it may continue one.

    *process* is the ``name pid=n`` some servers put before every line of a process, raw output included; of two,
    the inner one first.
    *level* is ``error``, ``warning``, ``below`` or empty where the line tells none. *place* is what identifies
    the call that printed it. *ranks* are the parts of the rank that the shape tells. *fields* are those of a JSON
    line, nested ones by dotted name.
    """

    text: str
    shaped: bool = False
    level: str = ""
    time: str = ""
    process: str = ""
    place: str = ""
    stack: str = ""
    ranks: Mapping[str, str] = field(default_factory=lambda: NO_RANKS)
    fields: Mapping[str, Any] | None = None


class _DockerLine(msgspec.Struct):
    log: str
    stream: Literal["stdout", "stderr"]


_decode_docker = msgspec.json.Decoder(_DockerLine).decode


class Unwrapper:
    """Takes what container runtimes put around lines (CRI, Docker) and colours off whole chunks; joins split lines.

    A file is in a container runtime's format from the first line that is. Parts are joined per stream, bounded.
    """

    def __init__(self) -> None:
        self._runtime: Callable[[bytes], bytes] | None = None
        self._parts: dict[bytes | str, bytes] = {}

    @property
    def wrapped(self) -> bool:
        """Whether the file is in a container runtime's format."""
        return self._runtime is not None

    def feed(self, data: bytes, *, marked: bool = True) -> bytes:
        """Whole lines in, whole lines out. *marked* is False if *data* is known to hold none of MARKS."""
        if self._runtime is None and marked:
            self._runtime = self._find(data)
        if self._runtime is not None:
            data = self._runtime(data)
        if b"\x1b" in data or not data.isascii():
            data = _ANSI.sub(b"", data)
        return data

    def _find(self, data: bytes) -> Callable[[bytes], bytes] | None:
        if any(stream in data for stream in _CRI_STREAMS) and _CRI.search(data):
            return self._cri
        return self._docker if _DOCKER_STREAM in data and _DOCKER.search(data) else None

    def _cri(self, data: bytes) -> bytes:
        if not self._parts and b" P " not in data:
            return _CRI_FULL.sub(b"", data)
        lines = []
        for line in _split(data):
            match = _CRI.match(line)
            lines.append(line + b"\n" if match is None else self._join(match[1], line[match.end() :], match[2] == b"F"))
        return b"".join(lines)

    def _docker(self, data: bytes) -> bytes:
        lines = []
        for line in _split(data):
            try:
                part = _decode_docker(line)
            except (msgspec.DecodeError, RecursionError):
                lines.append(line + b"\n")
            else:
                text = part.log.removesuffix("\n")
                lines.append(self._join(part.stream, text.encode(), len(text) < len(part.log)))
        return b"".join(lines)

    def _join(self, stream: bytes | str, text: bytes, whole: bool) -> bytes:
        """The line of *stream* that *text* completes; nothing if more of it is to come."""
        joined = self._parts.pop(stream, b"") + text
        if whole:
            return joined + b"\n"
        self._parts[stream] = joined[:_MAX_JOINED]
        return b""


def _split(data: bytes) -> Iterator[bytes]:
    return iter(data.removesuffix(b"\n").split(b"\n"))


class Shape:
    """What stands before a message; *regex* may have the groups level, time, place, process, and parts of the rank."""

    def __init__(self, regex: re.Pattern[str]) -> None:
        self.closed = _closed(regex.pattern)
        self._match = regex.match
        self._groups = tuple(name for name in ("level", "time", "place", "process") if name in regex.groupindex)
        self._ranks = tuple(name for name in RANK_PARTS if name in regex.groupindex)

    def time_in(self, text: str) -> tuple[int, int]:
        """From where to where in *text*, which is of this shape, the time stands; 0 and 0 if it tells none."""
        match = self._match(text)
        return match.span("time") if match and "time" in self._groups and match["time"] else (0, 0)

    def record(self, text: str, process: str) -> Record | None:
        """*text* as a record of this shape."""
        match = self._match(text)
        if match is None:
            return None
        record = Record(text[match.end() :], True, process=process)
        for name in self._groups:
            if value := match[name]:
                setattr(record, name, value)
        if self._ranks and (ranks := {name: text for name in self._ranks if (text := match[name])}):
            record.ranks = ranks
        record.level = _level(record.level)
        return record


def peel(line: bytes, shapes: Sequence[Shape]) -> Record:
    """*line* without its newline, as a record. Never raises, whatever the bytes.

    Level, time, place and process are taken from the shape before the message and from nowhere else.
    """
    text = line.decode("utf-8", "replace")
    if "\r" in text:
        text = text.removesuffix("\r")
        first, *drawn = text.split("\r")
        # a progress bar: what was drawn last counts; but in a record it is only what somebody wrote into it
        if drawn and not (_PROCESS.match(first) or any(shape.record(first, "") for shape in shapes)):
            text = drawn[-1]
    process = ""
    if text[:1] in ("(", "["):
        process, text = _process(text)
    if text[:1] == "{" and len(text) <= _MAX_JSON and (record := _from_json(text)) is not None:
        record.process = process
        return record
    for shape in shapes:
        if record := shape.record(text, process):
            return record
    return Record(text, process=process)


class Peeler:
    """Peels lines of one kind, of which many begin alike: a start is not read again if only its time differs."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._shapes = shapes
        self._record = Record("")
        self._start = self._head = b"\0\n"  # no line begins so
        self._tail = b""
        self._begin = self._at = self._end = 0  # of the time, where it begins and ends, and of the start
        self._timely = re.compile(b"").fullmatch

    def peel(self, data: bytes, begin: int, end: int) -> Record:
        """`peel` of what stands from *begin* to *end*; the record is valid until the next line."""
        if data.startswith(self._start, begin) or self._again(data, begin):
            text = data[begin + self._end : end].decode("utf-8", "replace")
            if "\r" not in text:
                record = self._record
                record.text = text
                return record
        line = data[begin:end]
        return self._learn(line) or peel(line, self._shapes)

    def _again(self, data: bytes, begin: int) -> bool:
        """Whether the start is the same at another time, which is then taken."""
        at = begin + self._at
        if not (data.startswith(self._head, begin) and data.startswith(self._tail, at)):
            return False
        time = data[begin + self._begin : at]
        if self._timely(time) is None:
            return False
        self._start, self._record.time = self._head + time + self._tail, time.decode()
        return True

    def _learn(self, line: bytes) -> Record | None:
        """The record of *line*, if it is of the first shape; its start is remembered if nothing could go on behind."""
        if not (self._shapes and self._shapes[0].closed and line.isascii()) or b"\r" in line:
            return None
        process, text = _process(line.decode())
        record = self._shapes[0].record(text, process) if text[:1] != "{" else None
        if record is not None:
            end = len(line) - len(record.text)
            if line.endswith(b"] ", 0, end):
                begin, at = (len(line) - len(text) + n for n in self._shapes[0].time_in(text))
                self._record, self._begin, self._at, self._end = record, begin, at, end
                self._start, self._head, self._tail = line[:end], line[:begin], line[at:end]
                self._timely = re.compile(re.sub(rb"\d", rb"\\d", re.escape(line[begin:at]))).fullmatch
        return record


def seconds_of(time: str) -> float | None:
    """A log's own time as seconds on some scale of its own; None if it cannot be read.

    Only differences of two times of the same log mean anything: many logs have no year or no zone.
    """
    try:
        number = float(time)
    except ValueError:
        pass
    else:
        return number / 1000 if number > 1e11 else number  # epoch in ms
    text = time.replace(",", ".").replace("/", "-")
    for shape, day in _TIMES:
        try:
            if shape:
                return datetime.strptime(day + text, "%Y-" + shape).timestamp()
            return datetime.fromisoformat(day + text).timestamp()
        except ValueError:
            continue
    return None


def _closed(pattern: str) -> bool:
    """Whether a match ends behind the bracket and the space at its end, whatever follows: nothing in it passes one.

    And whether any digits could stand where some do.
    """
    if not pattern.endswith((r"\] ", r"\] ?")) or re.search(r"\(\?<?[=!]|\d(?![\d,]*\})", pattern):
        return False
    parts = (part for part in _PARTS.findall(pattern) if part[0] in "[.\\" and part != r"\]")
    return not any(re.match(part, "]") for part in parts)


def _process(text: str, around: int = 2) -> tuple[str, str]:
    """The name of the process before *text*, behind it those of up to *around* others, and what follows."""
    prefix = _PROCESS.match(text)
    if prefix is None:
        return "", text
    name, text = prefix[1] or prefix[2], text[prefix.end() :]
    if not around or text[:1] not in ("(", "["):
        return name, text
    inner, text = _process(text, around - 1)
    return f"{inner} {name}".lstrip(), text


def _level(word: object) -> str:
    if not isinstance(word, str) or not word:
        return ""
    if level := _LEVELS.get(word):
        return level
    return _LEVELS.get(word.strip().lower(), BELOW)


def _from_json(text: str) -> Record | None:
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return None
    if not isinstance(decoded, dict):
        return None
    fields = _flat(decoded)
    message = next((v for k in _TEXT_KEYS if isinstance(v := fields.get(k), str)), "")
    stack = next((v for k in _STACK_KEYS if isinstance(v := fields.get(k), str)), "")
    return Record(
        text=_ANSI_TEXT.sub("", message),
        shaped=True,
        level=_level(next((fields[k] for k in _LEVEL_KEYS if k in fields), None)),
        time=str(next((fields[k] for k in _TIME_KEYS if k in fields), "")),
        stack=_ANSI_TEXT.sub("", stack),
        fields=fields,
    )


def _flat(decoded: dict[str, Any], prefix: str = "", depth: int = 0) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in decoded.items():
        if isinstance(value, dict) and depth < 3:
            flat |= _flat(value, f"{prefix}{key}.", depth + 1)
        else:
            flat[prefix + key] = value
    return flat

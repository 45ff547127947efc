"""Everything that reads bytes which others wrote: each target takes any bytes, and must neither raise nor be slow.

What a target checks beside that it says itself, by AssertionError. Seeds are the captures of `tests/fixtures`.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec
from harness import Reader

from exporter import strictyaml
from exporter.baseline import Pins
from exporter.config import Config
from exporter.engines import profile as profiles
from exporter.engines.profile import Profile
from exporter.sources import traces
from exporter.sources.chunks import CHUNK_BYTES, LINE_LIMIT_BYTES
from exporter.sources.chunks import Lines as Cutter
from exporter.sources.iterations import _MARK
from exporter.sources.page import NotAPage, PageReader, names_of
from exporter.sources.peel import Peeler, Shape, Unwrapper, peel
from exporter.strictyaml import ConfigError
from exporter.webfile import WebFile

FIXTURES = Path(__file__).parents[1] / "fixtures"
ENGINES = profiles.names()
_SEED_BYTES = 600
_READ_ANEW = 2000  # inputs after which a reader is replaced by a fresh one


@dataclass(frozen=True)
class Target:
    """*slow* is from how many processor seconds on an input of up to a mebibyte is too much.

    What is not of *strangers* is the user's own.
    """

    name: str
    run: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    strangers: bool = True

    @property
    def slow(self) -> float:
        return 0.1 if self.strangers else 5.0


def chunks(data: bytes) -> None:
    """Whole lines come out as they went in, wherever the pieces were cut."""
    cutter, size = Cutter(), 7 + (data[0] if data else 0) * 64
    pieces = (data[at : at + size] for at in range(0, len(data), size))
    given = b"".join(map(cutter.feed, pieces))
    assert len(cutter.held) <= LINE_LIMIT_BYTES + CHUNK_BYTES
    if b"\0" not in data and not cutter.dropped:
        assert given + cutter.held == data


def peeled(data: bytes) -> None:
    """What is remembered of the line before changes no record; by the shapes of the engine that the first byte says."""
    shapes = _SHAPES[_engine(data)]
    peeler = Peeler(shapes)
    for line in Unwrapper().feed(data[1:] + b"\n").split(b"\n"):
        assert peeler.peel(line, 0, len(line)) == peel(line, shapes)


_SHAPES = {engine: tuple(map(Shape, profiles.bundled(engine).log.records)) for engine in ENGINES}


def lines(data: bytes) -> None:
    """By the profile that the first byte chooses."""
    _reader(data).feed(data[1:]).settle()


def facts(data: bytes) -> None:
    """The same as history."""
    _reader(data).feed(data[1:], history=True).settle()


_readers: dict[str, Iterator[Reader]] = {}


def _reader(data: bytes) -> Reader:
    """One that has read before, as a sidecar has."""
    engine = _engine(data)
    if engine not in _readers:
        _readers[engine] = itertools.chain.from_iterable(
            itertools.repeat(Reader(engine), _READ_ANEW) for _ in itertools.count()
        )
    return next(_readers[engine])


def _engine(data: bytes) -> str:
    return ENGINES[data[0] % len(ENGINES)] if data else ENGINES[0]


def page(data: bytes) -> None:
    """The second time, when only values are looked for, it reads the same."""
    reader, text = PageReader(_profile(data)), data[1:].decode("utf-8", "replace")
    names_of(text)
    with contextlib.suppress(NotAPage):
        first = reader.read(text)
        assert reader.read(text) == first
        assert reader.read(text) == first


def openmetrics(data: bytes) -> None:
    with contextlib.suppress(NotAPage):
        PageReader(_profile(data)).read(data[1:].decode("utf-8", "replace"), openmetrics=True)


def _profile(data: bytes) -> Profile:
    return profiles.bundled(_engine(data))


def spans(data: bytes) -> None:
    """Protobuf or JSON, by the first byte."""
    kind = "application/json" if data[:1] == b"{" else "application/x-protobuf"
    with contextlib.suppress(ValueError):
        batch = traces._decoded(kind, data)
        for engine in ("vllm", "sglang"):
            list(traces._signals(batch, profiles.bundled(engine).spans))


def iterations(data: bytes) -> None:
    """TensorRT-LLM's records: a list of objects is read as the lines that its log has of them."""
    with contextlib.suppress(msgspec.DecodeError, RecursionError):
        records = msgspec.json.decode(data, type=list[dict[str, object]])
        text = b"".join(_MARK + msgspec.json.encode(record) + b"\n" for record in records)
        _reader(bytes((ENGINES.index("trtllm"),))).feed(text).settle()


def yaml(kind: type) -> Callable[[bytes], None]:
    """Settings as a *kind*: they are right, or each problem names the file."""

    def problems(data: bytes) -> tuple[str, ...]:
        try:
            strictyaml.parse(data.decode("utf-8", "replace"), kind, "file")
        except ConfigError as error:
            return error.problems or ("nothing is told",)
        return ()

    def read(data: bytes) -> None:
        assert [problem for problem in problems(data) if not problem.startswith("file:")] == []

    return read


# seeds


def _pieces(paths: Iterator[Path]) -> Iterator[tuple[Path, bytes]]:
    """Some whole lines of each file, from its beginning, its middle and its end."""
    for path in sorted(paths):
        data = path.read_bytes()
        for at in {0, len(data) // 2, max(0, len(data) - _SEED_BYTES)}:
            start = data.rfind(b"\n", 0, at) + 1
            yield path, data[start : start + _SEED_BYTES]


def _of_engines(pattern: str) -> tuple[bytes, ...]:
    """With the byte before them that chooses their engine."""
    return tuple(
        bytes((ENGINES.index(engine),)) + data
        for path, data in _pieces(FIXTURES.glob(pattern))
        if (engine := path.relative_to(FIXTURES).parts[0]) in ENGINES
    )


def _files(*patterns: str) -> tuple[bytes, ...]:
    return tuple(data for pattern in patterns for _, data in _pieces(FIXTURES.glob(pattern)))


_WEB = b"""tls_server_config: {cert_file: a.pem, key_file: b.pem, min_version: TLS12}
http_server_config: {http2: true, headers: {X-Frame-Options: deny}}
basic_auth_users: {ops: $2b$10$abcdefghijklmnopqrstuuMLPqzYYK8wVPl1wnlVXTFLEWZYvKuhK}
"""
_PINS = b"pins: [{signal: request, quantile: 0.99, seconds: 1.5s, model: m}]\n"


@cache
def targets() -> tuple[Target, ...]:
    logs = _of_engines("*/*/**/*.log")
    pages = _of_engines("*/*/*metrics*.txt")
    engines = tuple(path.read_bytes() for path in sorted(Path(profiles.__file__).parent.glob("*.yaml")))
    return (
        Target("chunks", chunks, logs),
        Target("peel", peeled, logs),
        Target("lines", lines, logs),
        Target("facts", facts, logs),
        Target("page", page, pages),
        Target("openmetrics", openmetrics, pages),
        Target("spans", spans, _files("**/otlp-*")),
        Target("iterations", iterations, _files("trtllm/*/*iteration*.json", "trtllm/*/*.json")),
        Target("settings", yaml(Config), _files("config/*.yml"), strangers=False),
        Target("profile", yaml(Profile), tuple(data[:2000] for data in engines), strangers=False),
        Target("web file", yaml(WebFile), (_WEB,), strangers=False),
        Target("pins", yaml(Pins), (_PINS,), strangers=False),
    )

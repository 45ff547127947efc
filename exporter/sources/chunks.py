"""Whole lines in chunks: what every way of reading a log gives, and how bytes are cut into them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

CHUNK_BYTES = 64 * 1024  # larger chunks read no faster and hold up the event loop longer
LINE_LIMIT_BYTES = 1024 * 1024
HEAD_BYTES = 64 * 1024
FLUSH_SECONDS = 2.0

Reason = Literal["missing", "permission", "not_a_file", "io_error"]
"""Why a log cannot be read."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole lines, oldest first, each ending in a newline; at most about 64 KiB and one line.

    *history* lines were written before following began: read them for start-up facts, never for counts.
    """

    data: bytes
    history: bool


@dataclass(slots=True)
class TailStats:
    """What following came to: totals since the start, without history, and the state after the last poll."""

    lines: int = 0
    bytes: int = 0
    rotations: int = 0
    truncations: int = 0
    dropped_bytes: int = 0  # of lines that were cut or flushed, newlines left out
    lag_bytes: int = 0  # size minus offset
    last_line_at: float | None = None  # seconds since epoch
    readable: bool = True
    reason: str = ""  # a Reason if not readable

    def add(self, other: "TailStats") -> None:
        """Add the totals of *other*; the state is the caller's to tell."""
        self.lines += other.lines
        self.bytes += other.bytes
        self.rotations += other.rotations
        self.truncations += other.truncations
        self.dropped_bytes += other.dropped_bytes
        self.lag_bytes += other.lag_bytes
        self.last_line_at = max(filter(None, (self.last_line_at, other.last_line_at)), default=None)


class LineSource(Protocol):
    """Something that gives log lines when asked."""

    @property
    def stats(self) -> TailStats: ...

    @property
    def paths(self) -> list[Path]:
        """The files that are followed now, whether they are there or not; none for standard input."""
        ...

    def poll(self) -> Iterator[Chunk]:
        """Read what is there now, chunk by chunk; the file may change between two chunks."""
        ...

    def close(self) -> None: ...


class Lines:
    """Cuts a stream of bytes into whole lines, in bounded memory."""

    __slots__ = ("dropped", "held", "skipping")

    def __init__(self) -> None:
        self.held = b""  # the last line, as long as it has no newline
        self.skipping = False  # up to the next newline: that line has been given
        self.dropped = 0

    def feed(self, data: bytes) -> bytes:
        """The lines that *data* (at most 64 KiB) completes, each with its newline."""
        if self.skipping:
            end = data.find(b"\n")
            self.dropped += len(data) if end < 0 else end
            if end < 0:
                return b""
            self.skipping = False
            data = data[end + 1 :]
        if b"\0" in data:  # a writer that kept its offset over a truncation leaves a hole before its line
            data = re.sub(rb"\n\0+", b"\n", data if self.held else data.lstrip(b"\0"))
        end = data.rfind(b"\n") + 1
        if self.held and len(self.held) + (data.find(b"\n") if end else len(data)) > LINE_LIMIT_BYTES:
            head = self.held[:HEAD_BYTES]
            self.dropped += len(self.held) - HEAD_BYTES
            self.held, self.skipping = b"", True
            return head + b"\n" + self.feed(data)
        if not end:
            self.held += data
            return b""
        lines = self.held + data[:end]
        self.held = data[end:]
        return lines

    def flush(self) -> bytes:
        """The last line without waiting for its newline; what still arrives of it will be dropped."""
        line, self.held, self.skipping = self.held + b"\n", b"", True
        return line


def count(stats: TailStats, lines: bytes, at: float) -> None:
    """*lines* were given live, at Unix time *at*."""
    stats.lines += lines.count(b"\n")
    stats.bytes += len(lines)
    stats.last_line_at = at


def reason_of(error: OSError) -> Reason:
    """Why a log cannot be read."""
    if isinstance(error, PermissionError):
        return "permission"
    return "missing" if isinstance(error, FileNotFoundError | NotADirectoryError) else "io_error"

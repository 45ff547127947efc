"""Follow log files: whole lines, each given once, across rotation, truncation and restarts.

Nothing here waits or reads a clock of its own: the caller polls, every 50 to 100 ms.

- A line is given when its newline is there; a last line without one after 2 s without growth,
  or when its file is left.  What then still arrives of it is dropped and counted, and so is
  all but the first 64 KiB of a line over 1 MiB.
- Rotation (new inode at the path): the old file is read to its end, the new one from 0.  The old
  one is left when the new one has its first byte, for writers go on in the old until they reopen.
- Truncation (size below the offset, or other bytes just before it): reading restarts at 0.
- A missing or unreadable file is a state with a reason, and is waited for.
- At the very first start what exists is *history*.  With a checkpoint history ends where
  following stopped, in whatever file of the directory that is by now.

Lost, because nobody can read it any more or because it would be counted twice:

- what a truncation (copytruncate) destroys after the last poll, and the unfinished line before it;
- files that come and go between two polls, or while the sidecar is down, save the one it was in;
- what is written to a rotated file after its successor has begun.

The bytes before the offset tell a rewritten file from a grown one; a file rewritten past the
old offset with just the same 64 bytes there (a log of one repeated line) passes for grown.
After a kill without ``close()`` up to a second of lines is given again.
"""

import logging
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from exporter import remedies
from exporter.sources.checkpoint import TAIL_BYTES, Checkpoint, Identity, Place
from exporter.sources.chunks import CHUNK_BYTES, FLUSH_SECONDS, Chunk, Lines, TailStats, count, reason_of

log = logging.getLogger(__name__)

SAVE_SECONDS = 1.0
REMEMBERED_FILES = 8  # of each path, should one come back, or its name be that of another path now


class _File:
    """An open file and how far it is read. Owns the descriptor."""

    __slots__ = ("fd", "grown_at", "history_end", "identity", "lines", "offset", "place", "resumed", "tail")

    def __init__(self, fd: int, identity: Identity) -> None:
        self.fd = fd
        self.identity = identity
        self.grown_at = 0.0
        self.rewind()

    def rewind(self) -> None:
        """Start again at 0, or behind a hole that is there: it can be huge and holds nothing."""
        self.offset = 0
        with suppress(OSError):  # nothing but a hole, or a file system without holes
            if os.pread(self.fd, 1, 0) == b"\0":
                self.offset = os.lseek(self.fd, 0, os.SEEK_DATA)
        self.tail = bytes(min(self.offset, TAIL_BYTES))  # the last bytes before the offset
        self.lines = Lines()
        self.place = (0, b"")  # end of the last line given, and the bytes before it
        self.history_end = 0  # what ends at or before this offset is history
        self.resumed = False  # an earlier run stopped where history ends

    def go_to(self, offset: int, tail: bytes) -> None:
        """Read on where an earlier reader stopped, perhaps within a line it had given."""
        self.offset, self.tail, self.place = offset, tail, (offset, tail)
        self.lines = Lines()
        self.lines.skipping = tail.rstrip(b"\0")[-1:] not in (b"", b"\n")

    def size(self) -> int:
        with suppress(OSError):
            return os.fstat(self.fd).st_size
        return 0

    def read(self, limit: int) -> bytes | None:
        """Up to *limit* bytes from the offset on; None if those before it are no longer there."""
        behind = len(self.tail)
        window = os.pread(self.fd, behind + limit, self.offset - behind)
        return window[behind:] if window.startswith(self.tail) else None

    def take(self, data: bytes) -> bytes:
        """Move past *data*, which was just read; the lines it completes."""
        lines = self.lines.feed(data)
        self.offset += len(data)
        if lines or b"\n" in data:
            held = len(self.lines.held)
            end = len(data) - held
            self.place = self.offset - held, _last(self.tail + data[max(0, end - TAIL_BYTES) : end])
        self.tail = _last(self.tail + data[-TAIL_BYTES:])
        if self.resumed and self.offset == self.history_end:
            self.go_to(self.offset, self.tail)
        return lines

    def flush(self) -> bytes:
        self.place = (self.offset, self.tail)
        return self.lines.flush()


def open_to_read(path: Path) -> int:
    """A descriptor; does not wait even if a FIFO has just taken the file's place."""
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK)


class Tailer:
    """Follows one path.

    *clock* is monotonic, *wall* gives seconds since epoch; *from_start* makes what exists at
    the first start live too.  *known* is shared by tailers whose paths may take each other's
    files (rotation within a glob): the place where each file was left, None while one has it open.
    """

    def __init__(
        self,
        path: Path,
        *,
        checkpoint: Checkpoint | None,
        clock: Callable[[], float],
        wall: Callable[[], float],
        from_start: bool = False,
        opener: Callable[[Path], int] = open_to_read,
        chunk_bytes: int = CHUNK_BYTES,
        known: dict[Identity, Place | None] | None = None,
    ) -> None:
        self.stats = TailStats()
        self.missing_since: float | None = None
        self._path = path
        self._checkpoint = checkpoint
        self._clock = clock
        self._wall = wall
        self._from_start = from_start
        self._opener = opener
        self._chunk_bytes = chunk_bytes
        self._known = {} if known is None else known
        self._files: deque[_File] = deque()  # the one being read; its successor, once that exists
        self._begun = False
        self._resume: Place | None = None  # where an earlier run stopped
        self._left: list[Place] = []  # in files read before, the last one first
        self._existed: tuple[Identity, int] | None = None  # the file of the first start, and its size then
        self._saved: tuple[Identity, tuple[int, bytes]] | None = None
        self._saved_at = 0.0

    def poll(self) -> Iterator[Chunk]:
        reason = self.look()
        while self._files:
            file = self._files[0]
            # Asked before reading: who writes to the new file has written all it will to the old.
            left = len(self._files) > 1 and self._files[1].size() > 0
            try:
                yield from self._drain(file)
            except OSError as error:
                reason = reason_of(error)
            if not left:
                break
            if file.lines.held:
                yield self._give(file, file.flush())
            self._leave(self._files.popleft())
        self._report(reason)
        self._save()

    def close(self) -> None:
        """Save the checkpoint and release the files. A held last line is read again after a restart."""
        self._save(at_once=True)
        while self._files:
            self._leave(self._files.popleft())

    def look(self) -> str:
        """Open what is at the path now, unless it is open; the reason if it cannot be read.

        The first look decides what is history.
        """
        try:
            found = self._path.stat()
        except OSError as error:
            reason = reason_of(error)
            if reason == "missing":
                self._begin(None)
                if self.missing_since is None:
                    self.missing_since = self._clock()
            return reason
        self.missing_since = None
        self._begin(found)
        identity = _identity(found)
        if len(self._files) > 1 and self._files[-1].identity != identity and not self._files[-1].size():
            self._leave(self._files.pop())  # came and went unused
        if identity in self._known and self._known[identity] is None:
            return ""  # open here, or by another tailer under another name
        if not stat.S_ISREG(found.st_mode):
            return "not_a_file"
        try:
            self._open(self._path)
        except OSError as error:
            return reason_of(error)
        return ""

    def _begin(self, found: os.stat_result | None) -> None:
        """Once: find out where an earlier run stopped, or what exists before any has read it."""
        if self._begun:
            return
        self._begun = True
        places = self._checkpoint.load(self._path) if self._checkpoint else []
        for place in places:
            self._known.setdefault(place.identity, place)
        if places:
            self._resume, self._left = places[0], places
            if not found or _identity(found) != self._resume.identity:
                self._open_rotated(self._resume.identity)
        elif found and stat.S_ISREG(found.st_mode) and not self._from_start:
            self._existed = _identity(found), found.st_size

    def _open_rotated(self, identity: Identity) -> None:
        """Queue the file under whatever name it has in the directory now, unless it was rewritten."""
        with suppress(OSError):
            for sibling in self._path.parent.iterdir():
                found = regular(sibling)
                if found and _identity(found) == identity and self._known[identity]:
                    self._open(sibling, rewritten=False)

    def _open(self, path: Path, *, rewritten: bool = True) -> None:
        """Queue the file at *path*, at the place where it was left if it was read before."""
        fd = self._opener(path)
        try:
            found = os.fstat(fd)
            place = self._known.get(_identity(found))
            tail = place.tail_in(fd) if place else None
        except OSError:
            os.close(fd)
            raise
        if tail is None and not rewritten:
            os.close(fd)
            return
        file = _File(fd, _identity(found))
        if place and tail is not None:
            if place == self._resume:
                file.history_end, file.resumed = place.offset, True
            else:
                file.go_to(place.offset, tail)
        elif place and place == self._resume:
            self.stats.truncations += 1
        elif self._files or self._resume:
            self.stats.rotations += 1
        elif self._existed and self._existed[0] == file.identity:
            file.history_end = min(self._existed[1], found.st_size)
        self._known[file.identity] = None
        self._files.append(file)

    def _leave(self, file: _File) -> None:
        os.close(file.fd)
        self._left, self._saved = self._places(file), None
        self._known[file.identity] = self._left[0]
        if len(self._left) > REMEMBERED_FILES:
            oldest = self._left.pop()
            if self._known.get(oldest.identity) == oldest:
                del self._known[oldest.identity]

    def _drain(self, file: _File) -> Iterator[Chunk]:
        """Read *file* to its end, and flush a last line that has stopped growing."""
        while True:
            now = self._clock()
            limit = self._chunk_bytes
            if file.offset < file.history_end:
                limit = min(limit, file.history_end - file.offset)
            data = file.read(limit)
            if data is None:
                self.stats.truncations += 1
                self.stats.dropped_bytes += len(file.lines.held)
                file.rewind()
                continue
            if not data:
                break
            file.grown_at = now
            lines = file.take(data)
            if file.offset > file.history_end:
                self.stats.dropped_bytes += file.lines.dropped
            file.lines.dropped = 0
            if lines:
                self.stats.lag_bytes = max(0, file.size() - file.offset)
                yield self._give(file, lines)
                self._save()
        self.stats.lag_bytes = 0
        if file.lines.held and now - file.grown_at >= FLUSH_SECONDS:
            yield self._give(file, file.flush())

    def _give(self, file: _File, lines: bytes) -> Chunk:
        history = file.offset <= file.history_end
        if not history:
            count(self.stats, lines, self._wall())
        return Chunk(lines, history)

    def _save(self, *, at_once: bool = False) -> None:
        """Save where the last line given ends, at most once a second; not while history is being read."""
        if self._checkpoint is None or not self._files:
            return
        file = self._files[0]
        due = at_once or self._clock() - self._saved_at >= SAVE_SECONDS
        if file.offset < file.history_end or not due or self._saved == (file.identity, file.place):
            return
        self._saved, self._saved_at = (file.identity, file.place), self._clock()
        self._checkpoint.save(self._path, self._places(file))

    def _places(self, file: _File) -> list[Place]:
        """Where the last line given of *file* ends, and where the files before it were left."""
        others = [place for place in self._left if place.identity != file.identity]
        return [Place.after(file.identity, *file.place), *others]

    def _report(self, reason: str) -> None:
        if reason != self.stats.reason:
            if reason:
                level = logging.INFO if reason == "missing" else logging.WARNING  # rotations come and go
                remedy = remedies.plain(remedies.LOG[reason].remedy)
                log.log(level, "log not readable: path=%s reason=%s remedy=%r", self._path, reason, remedy)
            else:
                log.info("log readable again: path=%s", self._path)
        self.stats.readable, self.stats.reason = not reason, reason


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino


def regular(path: Path) -> os.stat_result | None:
    """The state of *path* if it is a regular file."""
    with suppress(OSError):
        found = path.stat()
        return found if stat.S_ISREG(found.st_mode) else None
    return None


def _last(data: bytes) -> bytes:
    return data[-TAIL_BYTES:]

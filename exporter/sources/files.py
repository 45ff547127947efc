"""A path or a pattern of paths, followed as one log."""

import glob
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from exporter.sources.checkpoint import Checkpoint, Identity, Place
from exporter.sources.chunks import Chunk, TailStats
from exporter.sources.tail import Tailer, open_to_read, regular

SCAN_SECONDS = 1.0
FORGET_SECONDS = 60.0  # a rotated path may be without a file for as long as its writer needs to reopen
COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}  # what rotation leaves beside the logs


class LogFiles:
    """Follows a path, or every regular file a glob pattern matches.

    A pattern is looked up once a second.  Its files may be rotated into each other's names; a file
    read under one name is not read again under another.  The copies that copytruncate makes must
    not match, for a copy is a new file.  A match that has been gone for a minute is forgotten.
    """

    def __init__(
        self,
        pattern: str | Path,
        *,
        checkpoint: Checkpoint | None,
        clock: Callable[[], float],
        wall: Callable[[], float],
        from_start: bool = False,
        opener: Callable[[Path], int] = open_to_read,
    ) -> None:
        self._pattern = os.fspath(pattern)
        self._checkpoint = checkpoint
        self._clock = clock
        self._from_start = from_start
        self._known: dict[Identity, Place | None] = {}
        self._follow = partial(Tailer, checkpoint=checkpoint, clock=clock, wall=wall, opener=opener, known=self._known)
        self._tailers: dict[Path, Tailer] = {}
        self._forgotten = TailStats()
        self._scanned_at: float | None = None
        self._is_glob = glob.has_magic(self._pattern) and not os.path.lexists(pattern)
        if not self._is_glob:
            self._tailers[Path(pattern)] = self._follow(Path(pattern), from_start=from_start)

    @property
    def stats(self) -> TailStats:
        """All files together. Readable if there is a match and every match that is still there is."""
        each = [tailer.stats for tailer in self._tailers.values()]
        if not self._is_glob:
            return each[0]
        total = TailStats()
        for stats in (self._forgotten, *each):
            total.add(stats)
        total.reason = next((s.reason for s in each if s.reason not in ("", "missing")), "")
        if all(s.reason == "missing" for s in each):
            total.reason = "missing"
        total.readable = not total.reason
        return total

    @property
    def paths(self) -> list[Path]:
        return list(self._tailers)

    def poll(self) -> Iterator[Chunk]:
        if self._is_glob and (self._scanned_at is None or self._clock() - self._scanned_at >= SCAN_SECONDS):
            self._scan()
        for tailer in list(self._tailers.values()):
            yield from tailer.poll()

    def close(self) -> None:
        for tailer in self._tailers.values():
            tailer.close()

    def _scan(self) -> None:
        now = self._clock()
        live = self._from_start or self._scanned_at is not None
        # Unlike Path.glob this passes over directories that vanish or may not be listed.
        matches = map(Path, sorted(glob.glob(self._pattern, recursive=True)))  # noqa: PTH207
        new = [path for path in matches if path not in self._tailers and path.suffix not in COMPRESSED]
        if self._scanned_at is None and self._checkpoint:
            # All, before any file is opened: a file may have another's name by now.
            self._known.update({place.identity: place for place in self._checkpoint.load_all()})
        self._scanned_at = now
        for path in filter(regular, new):
            self._tailers[path] = self._follow(path, from_start=live)
            self._tailers[path].look()
        for path, tailer in list(self._tailers.items()):
            if tailer.missing_since is not None and now - tailer.missing_since >= FORGET_SECONDS:
                tailer.close()
                self._forgotten.add(tailer.stats)
                del self._tailers[path]

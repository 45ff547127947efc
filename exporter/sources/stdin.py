"""Standard input as a log."""

import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path

from exporter.sources.chunks import CHUNK_BYTES, FLUSH_SECONDS, Chunk, Lines, TailStats, count, reason_of


class StandardInput:
    """Reads a descriptor that somebody else owns, a pipe above all, without ever waiting.

    Its flags are left alone: another process may share them.  Everything is live.  ``missing``
    means that the other end was closed.
    """

    def __init__(self, *, clock: Callable[[], float], wall: Callable[[], float], fd: int = 0) -> None:
        self.stats = TailStats()
        self.paths: list[Path] = []
        self._fd = fd
        self._clock = clock
        self._wall = wall
        self._lines = Lines()
        self._grown_at = 0.0
        self._ready = select.poll()
        self._ready.register(fd, select.POLLIN)

    def poll(self) -> Iterator[Chunk]:
        reason = ""
        while ready := self._ready.poll(0):
            if not ready[0][1] & select.POLLIN:
                reason = "missing"
                break
            try:
                data = os.read(self._fd, CHUNK_BYTES)
            except BlockingIOError:  # somebody else took it
                break
            except OSError as error:
                reason = reason_of(error)
                break
            if not data:
                break
            self._grown_at = self._clock()
            if lines := self._lines.feed(data):
                yield self._give(lines)
        if self._lines.held and self._clock() - self._grown_at >= FLUSH_SECONDS:
            yield self._give(self._lines.flush())
        self.stats.dropped_bytes = self._lines.dropped
        self.stats.readable, self.stats.reason = not reason, reason

    def close(self) -> None:
        """Nothing to release: the descriptor stays open."""

    def _give(self, lines: bytes) -> Chunk:
        count(self.stats, lines, self._wall())
        return Chunk(lines, history=False)

"""The log source: what it publishes, and that a backlog does not silence it."""

import asyncio
from collections.abc import Iterator

from harness import Clock

from exporter import catalog
from exporter.engines import profile as profiles
from exporter.lifecycle import Lifecycle
from exporter.sources.chunks import Chunk, TailStats
from exporter.sources.lines import Lines
from exporter.sources.logs import LogSource
from exporter.store import Store


async def never() -> None:
    raise AssertionError("once() does not wait")


class Backlog:
    """Chunks that come as fast as they are read; each takes a tenth of a second."""

    def __init__(self, clock: Clock, chunks: int) -> None:
        self.stats = TailStats()
        self.closed = False
        self._clock = clock
        self._chunks = chunks

    def poll(self) -> Iterator[Chunk]:
        for _ in range(self._chunks):
            self._clock.pass_(0.1)
            self.stats.lines += 1
            yield Chunk(b"queue_wait_ms=5\n", history=False)

    def close(self) -> None:
        self.closed = True


def source(clock: Clock, files) -> tuple[LogSource, Store]:
    store = Store(clock=clock, wall=clock)
    lines = Lines("log", profiles.bundled("generic"), store, Lifecycle(has_page=False), clock=clock)
    return LogSource(files, lines, store, tick=never, recognise=lambda _: None, clock=clock), store


async def test_a_backlog_that_takes_long_is_told_of_meanwhile() -> None:
    clock = Clock()
    source_, store = source(clock, Backlog(clock, 20))
    task = asyncio.create_task(source_.once())
    seen = set()
    while not task.done():
        await asyncio.sleep(0)
        seen.add(store.counters[catalog.LOG_LINES].get(("log",), 0))
    assert len(seen) >= 5
    assert max(seen) == 20
    assert store.readings["log"].ok


async def test_a_log_that_cannot_be_read_is_a_failed_reading_with_its_reason() -> None:
    clock = Clock()
    files = Backlog(clock, 0)
    files.stats = TailStats(lines=7, readable=False, reason="permission")
    source_, store = source(clock, files)
    await source_.once()
    reading = store.readings["log"]
    assert (reading.ok, reading.reason, reading.samples) == (False, "permission", ())
    assert store.counters[catalog.LOG_LINES] == {("log",): 7}
    source_.close()
    assert files.closed

"""Random histories of a log and its tailer, compared poll by poll with what the contract says.

A ``World`` does to real files what writers, rotation and operators do.  ``Expected`` knows the
files only as lists of lines, and says which of them each poll must give, and in which order:
so a line given twice, lost, glued to another or out of order shows at once.  What the contract
allows to be lost is lost there too: lines destroyed by a truncation before they were read, files
that came and went between two looks, writes to a file after its successor had begun.

No two lines have a byte in common, so bytes before an offset are never the same by chance; that
is the one ambiguity a tailer cannot resolve.  STOPLINE_HISTORIES sets the number of histories.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from exporter.sources.checkpoint import Checkpoint
from exporter.sources.chunks import FLUSH_SECONDS, LineSource
from exporter.sources.files import LogFiles
from exporter.sources.tail import REMEMBERED_FILES, Tailer, open_to_read

HISTORIES = int(os.environ.get("STOPLINE_HISTORIES", "2000"))
LENGTHS = (1, 3, 20, 63, 64, 65, 150, 400)
MARKS = [bytes([byte]) for byte in range(1, 256) if byte != ord("\n")]


def histories(number: int) -> settings:
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=False,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )


@dataclass(eq=False)
class Written:
    """A file as its writer knows it."""

    fd: int  # open to the end of the history: the inode is not given to another file
    name: Path | None  # None: deleted, or moved away with its directory
    denied: bool = False
    epoch: int = 0  # how often it was truncated
    lines: list[bytes] = field(default_factory=list)
    partial: bytes = b""
    mark: bytes = b""  # what the partial line consists of

    @property
    def empty(self) -> bool:
        return not self.lines and not self.partial


class World:
    """A directory with a log in it, and one writer."""

    def __init__(self, root: Path) -> None:
        self.now = 0.0
        self.directory = root / "logs"
        self.directory.mkdir()
        self.path = self.directory / "log"
        self.files: list[Written] = []
        self.writer: Written | None = None
        self._root = root
        self._marks = iter(MARKS)
        self._renames = 0

    def at_path(self) -> Written | None:
        return next((file for file in self.files if file.name == self.path), None)

    def open(self, path: Path) -> int:
        """The tailer's opener: root can read everything, so denial is played."""
        fd = open_to_read(path)
        if any(os.path.sameopenfile(fd, file.fd) and file.denied for file in self.files):
            os.close(fd)
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return fd

    def close(self) -> None:
        for file in self.files:
            os.close(file.fd)

    # What happens to the log. *n* is 0 to 7 and means something else to each.

    def write(self, n: int) -> None:
        for number in range(1 + n % 3):
            self._append(LENGTHS[(n + number) % 8], whole=True)

    def part(self, n: int) -> None:
        self._append(LENGTHS[n], whole=False)

    def create(self, n: int) -> None:
        """A new file at the path; for some n unreadable, or not used by the writer yet."""
        if self.at_path() is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_APPEND if n & 4 else 0)
            self.files.append(Written(os.open(self.path, flags), self.path, denied=n in (1, 3)))
            if n not in (2, 3, 6):
                self.writer = self.files[-1]

    def reopen(self, _: int) -> None:
        self.writer = self.at_path() or self.writer

    def allow(self, _: int) -> None:
        for file in self.files:
            file.denied = False

    def rename(self, _: int) -> None:
        if file := self.at_path():
            assert file.name
            self._renames += 1
            file.name = file.name.rename(self.directory / f"log.{self._renames}")

    def rename_back(self, n: int) -> None:
        rotated = [file for file in self.files if file.name]
        if rotated and self.at_path() is None:
            file = rotated[n % len(rotated)]
            assert file.name
            file.name = file.name.rename(self.path)

    def delete(self, _: int) -> None:
        if file := self.at_path():
            self.path.unlink()
            file.name = None

    def move_directory(self, _: int) -> None:
        self.directory.rename(Path(tempfile.mkdtemp(dir=self._root)))
        self.directory.mkdir()
        for file in self.files:
            file.name = None

    def truncate(self, n: int) -> None:
        """As copytruncate does. A writer without O_APPEND goes on at its offset and leaves a hole."""
        file = self.at_path()
        if file and not file.denied:
            os.ftruncate(file.fd, 0)
            if n & 1:
                os.lseek(file.fd, 10_000, os.SEEK_CUR)
            file.epoch += 1
            file.lines, file.partial, file.mark = [], b"", b""

    def wait(self, n: int) -> None:
        self.now += n / 2

    def _append(self, length: int, *, whole: bool) -> None:
        file = self.writer
        if file is None or not (mark := file.mark or next(self._marks, b"")):
            return
        data = mark * length
        if not file.partial and length > 2 and mark < b"\x40":
            data = mark + b"\0" + mark * (length - 2)
        os.write(file.fd, data + b"\n" * whole)
        file.partial += data
        file.mark = mark
        if whole:
            file.lines.append(file.partial + b"\n")
            file.partial = file.mark = b""


Mark = tuple[Written, int, int, bool]  # file, epoch, lines given of it, and whether the next was flushed


@dataclass
class Reading:
    """How far the tailer has come in one file, in lines."""

    file: Written
    epoch: int = 0
    given: int = 0
    flushed: bool = False  # the partial line was given; what comes of it is dropped
    seen: bytes = b""  # of the partial line
    grown_at: float = 0.0
    old_lines: int = 0  # history
    old_partial: bytes = b""  # history, if it never grows

    def mark(self) -> Mark:
        return self.file, self.epoch, self.given, self.flushed

    def begun(self) -> bool:
        return self.given > 0 or self.flushed or self.seen != b""


class Expected:
    """What one run of the tailer must give. *saved* are the marks in the checkpoint."""

    def __init__(self, world: World, saved: list[Mark], from_start: bool) -> None:
        self.saved = saved
        self.live: list[bytes] = []
        self.history: list[bytes] = []
        self.rotations = self.truncations = 0
        self.reason = ""
        self._world = world
        self._from_start = from_start
        self._resume = saved[0] if saved else None
        self._left = saved
        self._readings: list[Reading] = []
        self._existed: Reading | None = None
        self._first = True

    def poll(self) -> None:
        self.live, self.history = [], []
        self._look(self._world.at_path())
        while self._readings:
            reading = self._readings[0]
            last = len(self._readings) == 1 or self._readings[1].file.empty
            self._drain(reading, leave=not last)
            if last:
                break
            self._leave(0)
        if self._readings:
            self.saved = self._marks(self._readings[0])

    def _look(self, found: Written | None) -> None:
        if self._first:
            self._first = False
            if self._resume:
                rotated = self._resume[0]
                if rotated is not found and rotated.name and not rotated.denied and _fits(self._resume):
                    self._open(rotated)
            elif found and not self._from_start:
                old = len(found.lines), found.partial
                self._existed = Reading(found, found.epoch, old_lines=old[0], old_partial=old[1])
        last = self._readings[-1].file if len(self._readings) > 1 else None
        if found and last and last is not found and last.empty:
            self._leave(-1)
        self.reason = "" if found else "missing"
        if found and all(reading.file is not found for reading in self._readings):
            if found.denied:
                self.reason = "permission"
            else:
                self._open(found)

    def _open(self, file: Written) -> None:
        left = next((mark for mark in self._left if mark[0] is file), None)
        reading = Reading(file, file.epoch)
        if left and _fits(left):
            if left[1] == file.epoch:
                reading = Reading(*left)
            if left == self._resume:
                self.history += file.lines[: reading.given]
        elif left and left == self._resume:
            self.truncations += 1
        elif self._readings or self._resume:
            self.rotations += 1
        elif self._existed and self._existed.file is file:
            reading = self._existed
        self._readings.append(reading)

    def _leave(self, index: int) -> None:
        reading = self._readings.pop(index)
        self._left = self._marks(reading)[:REMEMBERED_FILES]

    def _marks(self, reading: Reading) -> list[Mark]:
        return [reading.mark(), *(mark for mark in self._left if mark[0] is not reading.file)]

    def _drain(self, reading: Reading, *, leave: bool) -> None:
        file, now = reading.file, self._world.now
        if reading.epoch != file.epoch:
            self.truncations += reading.begun()
            self._readings[self._readings.index(reading)] = reading = Reading(file, file.epoch)
        lines = file.lines[reading.given :]
        if lines or file.partial != reading.seen:
            reading.grown_at = now
        for number, line in enumerate(lines, reading.given):
            if not reading.flushed:
                (self.history if number < reading.old_lines else self.live).append(line)
            reading.flushed = False
        reading.given, reading.seen = len(file.lines), file.partial
        idle = now - reading.grown_at >= FLUSH_SECONDS
        if file.partial and not reading.flushed and (idle or leave):
            old = reading.given == reading.old_lines and file.partial == reading.old_partial
            (self.history if old else self.live).append(file.partial + b"\n")
            reading.flushed = True


def _fits(mark: Mark) -> bool:
    file, epoch, given, flushed = mark
    return epoch == file.epoch or (given == 0 and not flushed)


OPERATIONS: dict[str, Callable[[World, int], None]] = {
    "write": World.write,
    "part": World.part,
    "create": World.create,
    "reopen": World.reopen,
    "allow": World.allow,
    "rename": World.rename,
    "rename back": World.rename_back,
    "delete": World.delete,
    "move directory": World.move_directory,
    "truncate": World.truncate,
    "wait": World.wait,
}
OFTEN = {"write": 10, "part": 6, "poll": 20, "create": 5, "reopen": 3, "wait": 4, "rename": 3, "truncate": 2}
STEPS = [name for name in [*OPERATIONS, "poll", "stop", "stop"] for _ in range(OFTEN.get(name, 1))]

QUIET = ["write"] * 5 + ["part"] * 2 + ["chunk"] * 12 + ["rename", "create", "create", "reopen", "stop"]


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    """In memory where there is such a place: it is the histories that matter, not the disk."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else None) as name:
        yield Path(name)


class Run:
    """A world, and what follows it when it is up: a Tailer, or LogFiles if there is a pattern."""

    def __init__(self, root: Path, pattern: str = "", **options: object) -> None:
        self.home = Path(tempfile.mkdtemp(dir=root))
        self.world = World(self.home)
        self._make = partial(
            LogFiles if pattern else Tailer,  # type: ignore[arg-type]
            self.world.directory / pattern if pattern else self.world.path,
            checkpoint=Checkpoint(self.home / "state"),
            clock=lambda: self.world.now,
            wall=lambda: self.world.now,
            opener=self.world.open,
            **options,
        )
        self._source: LineSource | None = None
        (self.home / "state").mkdir()

    def up(self) -> LineSource:
        self._source = self._source or self._make()
        return self._source

    def live(self) -> bytes:
        return b"".join(chunk.data for chunk in self.up().poll() if not chunk.history)

    def stop(self) -> None:
        if self._source:
            self._source.close()
        self._source = None

    def close(self) -> None:
        self.stop()
        self.world.close()
        shutil.rmtree(self.home)


@histories(HISTORIES)
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 7)), min_size=30, max_size=60),
    from_start=st.booleans(),
    chunk_bytes=st.sampled_from([13, 64, 64 * 1024]),
)
def test_each_poll_gives_what_the_contract_says(
    root: Path, steps: list[tuple[str, int]], from_start: bool, chunk_bytes: int
) -> None:
    run = Run(root, from_start=from_start, chunk_bytes=chunk_bytes)
    world = run.world
    expected: Expected | None = None
    saved: list[Mark] = []
    given_live: list[bytes] = []
    lines = 0
    try:
        for step, n in [("create", 4), ("reopen", 0), *steps, ("poll", 0), ("wait", 7), ("poll", 0)]:
            if step in OPERATIONS:
                OPERATIONS[step](world, n)
                continue
            if step == "stop":
                run.stop()
                saved, expected, lines = expected.saved if expected else saved, None, 0
                continue
            tailer = run.up()
            expected = expected or Expected(world, saved, from_start)
            chunks = list(tailer.poll())
            expected.poll()
            live = b"".join(chunk.data for chunk in chunks if not chunk.history)
            assert live == b"".join(expected.live)
            assert b"".join(c.data for c in chunks if c.history) == b"".join(expected.history)
            assert all(chunk.data.endswith(b"\n") for chunk in chunks)
            lines += len(expected.live)
            assert tailer.stats.lines == lines
            assert tailer.stats.reason == expected.reason
            assert tailer.stats.rotations == expected.rotations
            assert tailer.stats.truncations == expected.truncations
            given_live += expected.live
        assert len(set(given_live)) == len(given_live), "the model itself gave a line twice"
        event(f"lines: {len(given_live) // 10 * 10} or more")
    finally:
        run.close()


@histories(HISTORIES // 4)
@given(
    steps=st.lists(st.tuples(st.sampled_from(QUIET), st.integers(0, 7)), min_size=30, max_size=60),
    chunk_bytes=st.sampled_from([13, 64, 200]),
)
def test_nothing_is_lost_when_files_change_between_two_chunks(
    root: Path, steps: list[tuple[str, int]], chunk_bytes: int
) -> None:
    """Writes, rotations and restarts at any chunk: all lines come, once, in the order written."""
    run = Run(root, from_start=True, chunk_bytes=chunk_bytes)
    world = run.world
    live = b""
    poll = None
    settled: Written | None = None  # the tailer has finished a poll that began with lines of this file there
    begun_with: Written | None = None
    try:
        for step, n in [("create", 0), *steps]:
            if step == "chunk":
                if poll is None:
                    here = world.at_path()
                    begun_with = here if here and not here.empty else None
                    poll = run.up().poll()
                for _ in range(n + 1):
                    chunk = next(poll, None)
                    if chunk is None:
                        poll, settled = None, begun_with or settled
                        break
                    live += b"" if chunk.history else chunk.data
            elif step == "stop":
                run.stop()
                poll = None
            elif step == "create":
                world.create(n & 6)  # readable
            elif step != "rename" or (settled and settled is world.at_path() is world.writer):
                OPERATIONS[step](world, n)
        live += b"".join(chunk.data for chunk in poll or () if not chunk.history)
        live += run.live()
        world.now += FLUSH_SECONDS
        live += run.live()
        ends = [[file.partial + b"\n"] if file.partial else [] for file in world.files]
        written = [line for file, end in zip(world.files, ends, strict=True) for line in file.lines + end]
        assert live == b"".join(written)
        event(f"lines: {len(written) // 10 * 10} or more")
        event(f"files: {len(world.files)}")
    finally:
        run.close()


CHAIN = ["write"] * 5 + ["poll"] * 6 + ["rotate", "rotate", "create", "create", "stop"]


@histories(HISTORIES // 4)
@given(
    steps=st.lists(st.tuples(st.sampled_from(CHAIN), st.integers(0, 7)), min_size=30, max_size=60),
    rotated=st.sampled_from(["log.%d", "a-log.%d"]),
)
def test_files_rotated_down_a_chain_of_matching_names_are_read_once(
    root: Path, steps: list[tuple[str, int]], rotated: str
) -> None:
    """The pattern matches every name a file takes; restarts come at any point between two polls."""
    run = Run(root, pattern="*log*")
    world = run.world
    live = b""
    settled: Written | None = None  # what the writer had begun to fill at the last poll
    try:
        for step, n in [("create", 0), ("poll", 0), *steps, ("poll", 0), ("poll", 0)]:
            if step == "poll":
                world.now += 1
                live += run.live()
                settled = world.writer if world.writer and not world.writer.empty else None
            elif step == "stop":
                run.stop()
            elif step == "create":
                world.create(4)
            elif step == "write":
                world.write(n)
            elif settled and settled is world.at_path():
                for number in range(len(world.files), -1, -1):
                    older = world.directory / (rotated % number) if number else world.path
                    for file in world.files:
                        if file.name == older:
                            file.name = older.rename(world.directory / (rotated % (number + 1)))
        written = [line for file in world.files for line in file.lines]
        assert sorted(BytesIO(live)) == sorted(written)
    finally:
        run.close()

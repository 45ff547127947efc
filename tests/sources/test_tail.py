"""Following logs, one clause of the contract a test; nothing sleeps and every clock is moved by hand."""

import errno
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from exporter.sources.checkpoint import Checkpoint
from exporter.sources.chunks import Chunk, LineSource
from exporter.sources.files import LogFiles
from exporter.sources.stdin import StandardInput
from exporter.sources.tail import Tailer, open_to_read

KIB = 1024
MIB = 1024 * KIB


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def wall() -> float:
    return 1_700_000_000.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    directory = tmp_path / "logs"
    directory.mkdir()
    return directory / "server.log"


@pytest.fixture
def state(tmp_path: Path) -> Checkpoint:
    (tmp_path / "state").mkdir()
    return Checkpoint(tmp_path / "state")


@pytest.fixture
def follow(log: Path, clock: Clock) -> Iterator[Callable[..., Tailer]]:
    """Makes tailers of *log* and closes those the test leaves open."""
    made: list[Tailer] = []

    def make(path: Path = log, *, checkpoint: Checkpoint | None = None, **options: object) -> Tailer:
        made.append(Tailer(path, checkpoint=checkpoint, clock=clock, wall=wall, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for tailer in made:
        tailer.close()


@pytest.fixture
def match(log: Path, clock: Clock) -> Iterator[Callable[..., LogFiles]]:
    """Makes LogFiles of a pattern in the directory of *log*, and closes them."""
    made: list[LogFiles] = []

    def make(pattern: str, checkpoint: Checkpoint | None = None, from_start: bool = False) -> LogFiles:
        made.append(
            LogFiles(log.parent / pattern, checkpoint=checkpoint, clock=clock, wall=wall, from_start=from_start)
        )
        return made[-1]

    yield make
    for files in made:
        files.close()


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def rotate(path: Path, suffix: str = ".1") -> Path:
    return path.rename(path.with_name(path.name + suffix))


def live(source: LineSource) -> bytes:
    """What one poll gives as live; nothing it gives may be half a line."""
    return b"".join(chunk.data for chunk in chunks(source) if not chunk.history)


def history(source: LineSource) -> bytes:
    return b"".join(chunk.data for chunk in chunks(source) if chunk.history)


def chunks(source: LineSource) -> list[Chunk]:
    given = list(source.poll())
    assert all(chunk.data.endswith(b"\n") for chunk in given)
    return given


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


# Lines


def test_partial_line_waits_for_its_newline(follow, log):
    tailer = follow()
    assert live(tailer) == b""
    append(log, b"ERROR CUDA out of mem")
    assert [live(tailer) for _ in range(3)] == [b""] * 3
    append(log, b"ory\nnext")
    assert live(tailer) == b"ERROR CUDA out of memory\n"
    append(log, b"\n")
    assert live(tailer) == b"next\n"
    assert (tailer.stats.lines, tailer.stats.bytes) == (2, 30)


def test_last_line_without_newline_is_flushed_once_after_two_seconds(follow, log, clock):
    tailer = follow()
    live(tailer)
    append(log, b"Killed")
    assert live(tailer) == b""
    clock.now += 1.9
    assert live(tailer) == b""
    clock.now += 0.1
    assert live(tailer) == b"Killed\n"
    clock.now += 10
    assert live(tailer) == b""
    assert tailer.stats.dropped_bytes == 0


def test_growth_puts_the_flush_off(follow, log, clock):
    tailer = follow()
    live(tailer)
    for part in (b"a", b"b", b"c"):
        append(log, part)
        assert live(tailer) == b""
        clock.now += 1.5
    append(log, b"\n")
    assert live(tailer) == b"abc\n"


def test_what_arrives_of_a_flushed_line_is_dropped_and_counted(follow, log, clock):
    tailer = follow()
    live(tailer)
    append(log, b"half")
    live(tailer)
    clock.now += 2
    assert live(tailer) == b"half\n"
    append(log, b" and ha")
    assert live(tailer) == b""
    append(log, b"lf\nnext\n")
    assert live(tailer) == b"next\n"
    assert tailer.stats.dropped_bytes == len(b" and half")
    assert tailer.stats.lines == 2


def test_carriage_returns_stay_in_the_line(follow, log):
    tailer = follow()
    live(tailer)
    append(log, b"one\r\nprogress 1%\rprogress 2%\r")
    assert live(tailer) == b"one\r\n"
    append(log, b"\n")
    assert live(tailer) == b"progress 1%\rprogress 2%\r\n"


def test_nul_and_broken_utf8_pass_through(follow, log):
    tailer = follow()
    live(tailer)
    append(log, b"a\0b\xff\xfe\n\xc3\n")
    assert live(tailer) == b"a\0b\xff\xfe\n\xc3\n"


def test_nul_before_a_line_is_not_content(follow, log):
    tailer = follow()
    live(tailer)
    append(log, b"\0\0one\n\0\0two\n\0\0")
    assert live(tailer) == b"one\ntwo\n"
    append(log, b"\0thr")
    assert live(tailer) == b""
    append(log, b"ee\0\n")
    assert live(tailer) == b"three\0\n"


def test_over_long_line_gives_its_head_and_the_rest_is_dropped(follow, log):
    tailer = follow()
    live(tailer)
    append(log, b"x" * 5 * MIB + b"\nERROR connection reset by peer\n")
    assert live(tailer) == b"x" * 64 * KIB + b"\nERROR connection reset by peer\n"
    assert tailer.stats.dropped_bytes == 5 * MIB - 64 * KIB
    assert tailer.stats.lines == 2


@pytest.mark.parametrize("length", [MIB - 1, MIB, MIB + 1])
@pytest.mark.parametrize("piece", [7_000, 64 * KIB])
def test_the_longest_whole_line_is_one_mebibyte_however_it_arrives(follow, log, length, piece):
    tailer = follow(chunk_bytes=piece)
    live(tailer)
    append(log, b"before\n" + b"y" * length + b"\nafter\n")
    given = live(tailer)
    kept = length if length <= MIB else 64 * KIB
    assert given == b"before\n" + b"y" * kept + b"\nafter\n"
    assert tailer.stats.dropped_bytes == length - kept


def test_chunks_are_bounded_whatever_the_burst(follow, log):
    tailer = follow()
    live(tailer)
    append(log, b"0123456789abcde\n" * 100_000)
    sizes = [len(chunk.data) for chunk in chunks(tailer)]
    assert sum(sizes) == 1_600_000
    assert max(sizes) <= 64 * KIB + 16
    assert tailer.stats.lines == 100_000


def test_lag_and_last_line_time_are_told(follow, log):
    tailer = follow()
    live(tailer)
    assert tailer.stats.last_line_at is None
    append(log, b"0123456789abcde\n" * 10_000)
    lags = [tailer.stats.lag_bytes for _ in tailer.poll()]
    assert lags[0] == 160_000 - 64 * KIB
    assert lags == sorted(lags, reverse=True)
    assert tailer.stats.lag_bytes == 0
    assert tailer.stats.last_line_at == wall()


# Start


def test_first_start_gives_what_exists_as_history_and_later_lines_live(follow, log):
    append(log, b"KV cache size: 100 tokens\nERROR old\n")
    tailer = follow()
    assert chunks(tailer) == [Chunk(b"KV cache size: 100 tokens\nERROR old\n", history=True)]
    append(log, b"new\n")
    assert chunks(tailer) == [Chunk(b"new\n", history=False)]
    assert tailer.stats.lines == 1


def test_line_being_written_at_the_first_start_is_live(follow, log):
    append(log, b"old\nhalf")
    tailer = follow()
    assert history(tailer) == b"old\n"
    append(log, b" a line\n")
    assert live(tailer) == b"half a line\n"


def test_unfinished_line_left_by_a_dead_writer_is_history(follow, log, clock):
    append(log, b"old\nKilled")
    tailer = follow()
    assert history(tailer) == b"old\n"
    clock.now += 2
    assert history(tailer) == b"Killed\n"
    assert tailer.stats.lines == 0


def test_lines_written_while_history_is_read_are_live(follow, log):
    append(log, b"o" * 99 + b"\n")
    append(log, b"old\n" * 50_000)
    tailer = follow()
    poll = tailer.poll()
    first = next(poll)
    append(log, b"new\n" * 3)
    rest = list(poll)
    assert first.history
    assert b"".join(chunk.data for chunk in rest if not chunk.history) == b"new\n" * 3


def test_from_start_gives_everything_live(follow, log):
    append(log, b"one\n")
    assert live(follow(from_start=True)) == b"one\n"


def test_file_that_appears_after_the_start_is_live_from_its_beginning(follow, log):
    tailer = follow()
    assert live(tailer) == b""
    assert (tailer.stats.readable, tailer.stats.reason) == (False, "missing")
    append(log, b"one\n")
    assert live(tailer) == b"one\n"
    assert (tailer.stats.readable, tailer.stats.reason, tailer.stats.rotations) == (True, "", 0)


# Rotation


def test_rotation_drains_the_old_file_then_reads_the_new_one_from_its_start(follow, log):
    tailer = follow()
    live(tailer)
    append(log, b"one\n")
    assert live(tailer) == b"one\n"
    append(log, b"two\nlast")
    rotate(log)
    append(log, b"three\n")
    assert live(tailer) == b"two\nlast\nthree\n"
    assert tailer.stats.rotations == 1


def test_appends_to_the_renamed_file_are_read_until_its_successor_has_begun(follow, log):
    """Writers go on in the old file until they reopen, which is after the new one was made."""
    tailer = follow()
    append(log, b"one\n")
    live(tailer)
    old = rotate(log)
    append(old, b"two\n")
    assert live(tailer) == b"two\n"
    log.touch()
    assert live(tailer) == b""
    append(old, b"three\n")
    assert live(tailer) == b"three\n"
    append(old, b"four\n")
    append(log, b"five\n")
    assert live(tailer) == b"four\nfive\n"
    assert tailer.stats.rotations == 1


def test_late_and_at_first_unreadable_successor(follow, log, caplog):
    denied: set[int] = set()

    def opener(path: Path) -> int:
        if path.stat().st_ino in denied:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return open_to_read(path)

    tailer = follow(opener=opener)
    append(log, b"old error\n")
    assert live(tailer) == b""
    old = rotate(log)
    append(old, b"error 1\n")
    assert live(tailer) == b"error 1\n"
    assert (tailer.stats.readable, tailer.stats.reason) == (False, "missing")
    log.touch()
    denied.add(log.stat().st_ino)
    append(log, b"error 2\n")
    append(old, b"error 3\n")
    assert live(tailer) == b"error 3\n"
    assert (tailer.stats.readable, tailer.stats.reason) == (False, "permission")
    assert "fsGroup" in caplog.text
    denied.clear()
    assert live(tailer) == b"error 2\n"
    assert (tailer.stats.readable, tailer.stats.rotations, tailer.stats.lines) == (True, 1, 3)


def test_a_reason_is_logged_when_it_changes_and_not_at_each_poll(follow, log, caplog):
    caplog.set_level(logging.INFO)
    tailer = follow()
    for _ in range(5):
        live(tailer)
    append(log, b"x\n")
    live(tailer)
    live(tailer)
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]


def test_file_unreadable_at_the_first_start_is_history_up_to_its_size_then(follow, log):
    denied = True

    def opener(path: Path) -> int:
        if denied:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return open_to_read(path)

    append(log, b"old\n")
    tailer = follow(opener=opener)
    assert live(tailer) == b""
    append(log, b"new\n")
    assert live(tailer) == b""
    denied = False
    assert chunks(tailer) == [Chunk(b"old\n", history=True), Chunk(b"new\n", history=False)]


def test_directory_moved_and_recreated(follow, log):
    tailer = follow()
    append(log, b"one\n")
    live(tailer)
    moved = log.parent.rename(log.parent.with_name("logs.old"))
    append(moved / log.name, b"two\n")
    assert live(tailer) == b"two\n"
    assert tailer.stats.reason == "missing"
    log.parent.mkdir()
    assert live(tailer) == b""
    append(log, b"three\n")
    append(moved / log.name, b"four\n")
    assert live(tailer) == b"four\nthree\n"
    assert tailer.stats.rotations == 1


def test_deleted_file_is_read_on_until_the_path_has_another(follow, log):
    tailer = follow()
    live(tailer)
    with log.open("ab", buffering=0) as writer:
        writer.write(b"one\n")
        assert live(tailer) == b"one\n"
        log.unlink()
        writer.write(b"two\n")
        assert live(tailer) == b"two\n"
        assert tailer.stats.reason == "missing"
    append(log, b"three\n")
    assert live(tailer) == b"three\n"


def test_file_renamed_back_is_read_on_where_it_was_left(follow, log):
    tailer = follow()
    live(tailer)
    append(log, b"one\n")
    live(tailer)
    old = rotate(log)
    append(log, b"two\n")
    assert live(tailer) == b"two\n"
    rotate(log, ".2")
    old.rename(log)
    append(log, b"three\n")
    assert live(tailer) == b"three\n"


def test_symlink_turned_to_another_file_is_a_rotation(follow, log):
    first, second = log.with_name("1.log"), log.with_name("2.log")
    append(first, b"one\n")
    append(second, b"two\n")
    log.symlink_to(first)
    tailer = follow()
    assert history(tailer) == b"one\n"
    log.unlink()
    log.symlink_to(second)
    assert live(tailer) == b"two\n"
    assert tailer.stats.rotations == 1


@pytest.mark.parametrize("used", [True, False], ids=["each written to", "never written to"])
def test_descriptors_are_released_over_two_hundred_rotations(follow, log, used):
    tailer = follow()
    log.touch()
    live(tailer)
    before = open_files()
    for number in range(200):
        if used:
            append(log, b"%d\n" % number)
        rotate(log, f".{number}")
        log.touch()
        live(tailer)
    assert open_files() <= before + 1  # the file being read and a successor not begun yet
    assert (tailer.stats.rotations, tailer.stats.lines) == (200, 200 if used else 0)
    tailer.close()
    assert open_files() == before - 1


# Truncation


def copytruncate(path: Path) -> None:
    path.with_name(path.name + ".1").write_bytes(path.read_bytes())
    os.truncate(path, 0)


def test_smaller_file_is_read_again_from_its_start(follow, log):
    tailer = follow()
    live(tailer)
    append(log, b"x" * MIB + b"\nerror 1\nerror 2\nerror 3\nunfinished")
    assert live(tailer).count(b"error") == 3
    copytruncate(log)
    append(log, b"error 4\nerror 5\n")
    assert live(tailer) == b"error 4\nerror 5\n"
    assert (tailer.stats.truncations, tailer.stats.rotations) == (1, 0)
    assert tailer.stats.dropped_bytes == len(b"unfinished")


def test_regrowth_past_the_old_size_is_noticed(follow, log):
    tailer = follow()
    live(tailer)
    append(log, b"error 1\nerror 2\n")
    live(tailer)
    copytruncate(log)
    append(log, b"error 3 is longer\nerror 4 too\n")
    assert live(tailer) == b"error 3 is longer\nerror 4 too\n"
    assert tailer.stats.truncations == 1


def test_regrowth_is_noticed_though_the_last_read_was_only_a_newline(follow, log):
    tailer = follow()
    live(tailer)
    for part in (b"error 1", b"\n"):
        append(log, part)
        live(tailer)
    copytruncate(log)
    append(log, b"error 2\nerror 3\n")
    assert live(tailer) == b"error 2\nerror 3\n"


def test_same_first_kibibyte_confuses_nothing(follow, log):
    banner = b"INFO Starting server with the usual arguments\n" * 30
    tailer = follow()
    live(tailer)
    append(log, banner + b"error 1\n")
    live(tailer)
    copytruncate(log)
    append(log, banner + b"error 2\nerror 3\n")
    assert live(tailer) == banner + b"error 2\nerror 3\n"
    assert tailer.stats.truncations == 1


def test_held_part_is_not_glued_to_what_overwrites_it(follow, log):
    tailer = follow()
    live(tailer)
    append(log, b"half of a")
    live(tailer)
    log.write_bytes(b"overwritten in place\n")
    assert live(tailer) == b"overwritten in place\n"


def test_hole_left_by_a_writer_that_keeps_its_offset_is_not_read(follow, log):
    tailer = follow()
    live(tailer)
    with log.open("wb", buffering=0) as writer:
        writer.write(b"one\n")
        live(tailer)
        writer.seek(300 * MIB)  # the offset of a writer that wrote all this
        os.truncate(log, 0)
        writer.write(b"two\n")
        assert live(tailer) == b"two\n"
        assert tailer.stats.lag_bytes == 0
        os.truncate(log, 0)
        writer.write(b"three\n")
        assert live(tailer) == b"three\n"
    assert tailer.stats.truncations == 2


def test_truncation_between_two_chunks(follow, log):
    tailer = follow()
    live(tailer)
    append(log, b"old line\n" * 20_000)
    poll = tailer.poll()
    next(poll)
    copytruncate(log)
    append(log, b"new line\n")
    assert [chunk.data for chunk in poll] == [b"new line\n"]


def test_rotation_between_two_chunks(follow, log):
    tailer = follow()
    live(tailer)
    append(log, b"old line\n" * 20_000)
    poll = tailer.poll()
    given = next(poll).data
    rotate(log)
    append(log, b"new line\n")
    given += b"".join(chunk.data for chunk in poll) + live(tailer)
    assert given == b"old line\n" * 20_000 + b"new line\n"


def test_last_lines_of_the_old_file_written_while_a_chunk_is_handled(follow, log, clock):
    tailer = follow()
    live(tailer)
    append(log, b"half")
    live(tailer)
    old = rotate(log)
    log.touch()
    clock.now += 2
    poll = tailer.poll()
    assert next(poll).data == b"half\n"
    append(old, b" done\nlate\n")
    append(log, b"new\n")
    assert b"".join(chunk.data for chunk in poll) + live(tailer) == b"late\nnew\n"


def test_abandoned_poll_loses_nothing(follow, log):
    tailer = follow()
    live(tailer)
    append(log, b"".join(b"%d\n" % number for number in range(40_000)))
    first = next(tailer.poll()).data
    assert first + live(tailer) == log.read_bytes()


# Things that are no log


def test_directory_and_fifo_are_told_and_not_opened(follow, log):
    log.mkdir()
    tailer = follow()
    assert live(tailer) == b""
    assert (tailer.stats.readable, tailer.stats.reason) == (False, "not_a_file")
    log.rmdir()
    os.mkfifo(log)
    assert live(tailer) == b""
    assert tailer.stats.reason == "not_a_file"
    log.unlink()
    append(log, b"one\n")
    assert live(tailer) == b"one\n"


def test_file_where_a_directory_should_be_is_missing(follow, log):
    tailer = follow(log / "below")
    log.touch()
    assert live(tailer) == b""
    assert tailer.stats.reason == "missing"


def test_failing_open_is_a_state(follow, log):
    def opener(path: Path) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))

    log.touch()
    tailer = follow(opener=opener)
    assert live(tailer) == b""
    assert tailer.stats.reason == "io_error"


def test_failing_read_is_a_state_and_the_successor_is_still_read(follow, log):
    writable_only = True

    def opener(path: Path) -> int:
        return os.open(path, os.O_WRONLY) if writable_only else open_to_read(path)

    log.touch()
    tailer = follow(opener=opener)
    append(log, b"one\n")
    assert live(tailer) == b""
    assert (tailer.stats.readable, tailer.stats.reason) == (False, "io_error")
    writable_only = False
    rotate(log)
    append(log, b"two\n")
    assert live(tailer) == b"two\n"
    assert live(tailer) == b""
    assert tailer.stats.readable


# Restart


def test_lines_written_while_down_are_live_once(follow, log, state):
    append(log, b"old\n" * 100)
    tailer = follow(checkpoint=state)
    assert live(tailer) == b""
    append(log, b"error 1\n")
    assert live(tailer) == b"error 1\n"
    tailer.close()
    append(log, b"error 2\n")
    tailer = follow(checkpoint=state)
    assert chunks(tailer) == [
        Chunk(b"old\n" * 100 + b"error 1\n", history=True),
        Chunk(b"error 2\n", history=False),
    ]
    assert (tailer.stats.lines, tailer.stats.rotations, tailer.stats.truncations) == (1, 0, 0)


def test_held_line_is_read_again_after_a_restart(follow, log, state):
    tailer = follow(checkpoint=state)
    live(tailer)
    append(log, b"one\nhal")
    assert live(tailer) == b"one\n"
    tailer.close()
    append(log, b"f\n")
    assert live(follow(checkpoint=state)) == b"half\n"


def test_flushed_line_is_not_given_again_after_a_restart(follow, log, state, clock):
    tailer = follow(checkpoint=state)
    live(tailer)
    append(log, b"hal")
    live(tailer)
    clock.now += 2
    assert live(tailer) == b"hal\n"
    tailer.close()
    append(log, b"f\nnext\n")
    assert live(follow(checkpoint=state)) == b"next\n"


def test_stop_within_a_hole_leaves_the_next_line_whole(follow, log, state):
    tailer = follow(checkpoint=state)
    live(tailer)
    append(log, b"one\n\0\0")
    assert live(tailer) == b"one\n"
    tailer.close()
    append(log, b"two\n")
    assert live(follow(checkpoint=state)) == b"two\n"


def test_rotation_while_down(follow, log, state):
    tailer = follow(checkpoint=state)
    live(tailer)
    append(log, b"one\n")
    live(tailer)
    tailer.close()
    append(log, b"two\nlast")
    old = rotate(log)
    append(log, b"three\n")
    rotate(old)
    tailer = follow(checkpoint=state)
    assert chunks(tailer) == [
        Chunk(b"one\n", history=True),
        Chunk(b"two\n", history=False),
        Chunk(b"last\n", history=False),
        Chunk(b"three\n", history=False),
    ]
    assert tailer.stats.rotations == 1


def test_rotated_file_gone_while_down(follow, log, state):
    tailer = follow(checkpoint=state)
    append(log, b"one\n")
    live(tailer)
    tailer.close()
    with rotate(log).open() as keeps_the_inode:
        os.unlink(keeps_the_inode.name)  # noqa: PTH108
        append(log, b"two\n")
        tailer = follow(checkpoint=state)
        assert chunks(tailer) == [Chunk(b"two\n", history=False)]
    assert tailer.stats.rotations == 1


def test_rotated_while_down_and_successor_late(follow, log, state):
    tailer = follow(checkpoint=state)
    append(log, b"one\n")
    live(tailer)
    tailer.close()
    append(log, b"two\n")
    old = rotate(log)
    tailer = follow(checkpoint=state)
    assert live(tailer) == b"two\n"
    append(old, b"three\n")
    assert live(tailer) == b"three\n"
    append(log, b"four\n")
    assert live(tailer) == b"four\n"


@pytest.mark.parametrize("content", [b"2\n", b"a longer line than before\n"], ids=["smaller", "regrown"])
def test_truncation_while_down(follow, log, state, content):
    tailer = follow(checkpoint=state)
    live(tailer)
    append(log, b"one line\n")
    live(tailer)
    tailer.close()
    copytruncate(log)
    append(log, content)
    tailer = follow(checkpoint=state)
    assert chunks(tailer) == [Chunk(content, history=False)]
    assert (tailer.stats.truncations, tailer.stats.rotations) == (1, 0)


@pytest.mark.parametrize("restarts", [1, 2])
def test_earlier_file_back_at_the_path_after_restarts_is_not_read_again(follow, log, state, restarts):
    tailer = follow(checkpoint=state)
    live(tailer)
    append(log, b"one\n")
    live(tailer)
    old = rotate(log)
    append(log, b"two\n")
    assert live(tailer) == b"two\n"
    for _ in range(restarts):
        tailer.close()
        tailer = follow(checkpoint=state)
        live(tailer)
    tailer.close()
    rotate(log, ".2")
    old.rename(log)
    append(log, b"three\n")
    assert live(follow(checkpoint=state)) == b"three\n"


def test_file_left_since_the_last_save_is_not_read_again_after_a_restart(follow, log, state):
    tailer = follow(checkpoint=state)
    append(log, b"one\n")
    live(tailer)
    first = rotate(log)
    append(log, b"two\n")
    assert live(tailer) == b"two\n"
    second = rotate(log, ".2")
    first.rename(log)
    live(tailer)
    tailer.close()
    rotate(log)
    second.rename(log)
    assert live(follow(checkpoint=state)) == b""


def test_checkpoint_is_written_at_most_once_a_second(follow, log, state, tmp_path, clock):
    def saved() -> bytes:
        return b"".join(file.read_bytes() for file in (tmp_path / "state").iterdir())

    tailer = follow(checkpoint=state)
    append(log, b"1\n")
    live(tailer)
    first = saved()
    append(log, b"2\n")
    live(tailer)
    assert saved() == first
    clock.now += 1
    live(tailer)
    assert saved() != first


def test_killed_sidecar_gives_at_most_the_last_second_again(follow, log, state, clock):
    tailer = follow(checkpoint=state)
    live(tailer)
    append(log, b"one\n")
    clock.now += 1
    live(tailer)
    append(log, b"two\n")
    live(tailer)
    assert live(follow(checkpoint=state)) == b"two\n"


def test_restart_amid_history_takes_nothing_for_new(follow, log, state):
    append(log, b"old\n" * 50_000)
    tailer = follow(checkpoint=state)
    next(tailer.poll())
    tailer.close()
    tailer = follow(checkpoint=state)
    assert live(tailer) == b""
    append(log, b"new\n")
    assert live(tailer) == b"new\n"
    tailer.close()
    tailer = follow(checkpoint=state)
    next(tailer.poll())
    tailer.close()
    append(log, b"newer\n")
    assert live(follow(checkpoint=state)) == b"newer\n"


def test_chunk_being_handled_at_the_stop_is_not_given_again(follow, log, state):
    tailer = follow(checkpoint=state)
    live(tailer)
    append(log, b"".join(b"%d\n" % number for number in range(40_000)))
    first = next(tailer.poll()).data
    tailer.close()
    assert first + live(follow(checkpoint=state)) == log.read_bytes()


# Patterns


def test_plain_path_is_one_tailer(match, log):
    files = match(log.name)
    assert live(files) == b""
    assert files.stats.reason == "missing"
    append(log, b"one\n")
    assert live(files) == b"one\n"
    assert (files.stats.lines, files.stats.readable) == (1, True)


def test_existing_name_with_signs_of_a_pattern_is_a_path(match, log):
    append(log.with_name("server[1].log"), b"one\n")
    assert history(match("server[1].log")) == b"one\n"


def test_pattern_follows_each_match_and_new_ones_from_their_start(match, log, clock):
    append(log.with_name("a.log"), b"old a\n")
    files = match("*.log")
    assert chunks(files) == [Chunk(b"old a\n", history=True)]
    append(log.with_name("a.log"), b"new a\n")
    append(log.with_name("b.log"), b"new b\n")
    assert live(files) == b"new a\n"
    clock.now += 1
    assert live(files) == b"new b\n"
    assert (files.stats.lines, files.stats.readable) == (2, True)


def test_what_is_history_is_settled_for_all_matches_before_any_is_read(match, log):
    append(log.with_name("a.log"), b"old a\n" * 50_000)
    append(log.with_name("b.log"), b"old b\n")
    poll = match("*.log").poll()
    assert next(poll).history
    append(log.with_name("b.log"), b"new b\n")
    assert [chunk.data for chunk in poll if not chunk.history] == [b"new b\n"]


def test_pattern_without_a_match_is_missing(match, log, clock):
    files = match("*.log")
    assert live(files) == b""
    assert (files.stats.readable, files.stats.reason) == (False, "missing")
    append(log, b"one\n")
    clock.now += 1
    assert live(files) == b"one\n"
    assert files.stats.readable


def test_pattern_over_directories_and_what_is_no_log(match, log, clock):
    files = match("**/*")
    live(files)
    (log.parent / "rank0").mkdir()
    append(log.parent / "rank0" / "worker", b"one\n")
    append(log.parent / "old.gz", b"\x1f\x8b\n")
    os.mkfifo(log.parent / "fifo")
    clock.now += 1
    assert live(files) == b"one\n"
    assert files.stats.readable


def test_file_rotated_into_another_match_is_read_once(match, log, clock):
    append(log, b"zero\n")
    append(log.with_name("server.log.1"), b"older\n")
    files = match("server.log*")
    assert live(files) == b""
    given = b""
    for number in range(5):
        append(log, b"before %d\n" % number)
        given += live(files)
        rotate(log.with_name("server.log.1"), f".{number}")
        append(rotate(log), b"late %d\n" % number)
        clock.now += 1
        given += live(files)
        append(log, b"after %d\n" % number)
        clock.now += 1
        given += live(files)
    expected = [b"%s %d\n" % (word, number) for number in range(5) for word in (b"before", b"late", b"after")]
    assert given == b"".join(expected)
    assert files.stats.rotations == 5


def test_files_of_a_pattern_rotated_while_down_are_read_once(match, log, state):
    append(log, b"zero\n")
    append(log.with_name("a-server.log"), b"older\n")
    files = match("*server.log", state)
    assert live(files) == b""
    append(log, b"one\n")
    assert live(files) == b"one\n"
    files.close()
    append(log, b"two\n")
    log.rename(log.with_name("a-server.log"))
    append(log, b"three\n")
    assert live(match("*server.log", state)) == b"two\nthree\n"


def test_file_rotated_while_down_with_its_successor_late_is_read_once(match, log, state, clock):
    log.touch()
    files = match("server.log*", state)
    assert live(files) == b""
    append(log, b"one\n")
    assert live(files) == b"one\n"
    files.close()
    append(rotate(log), b"two\n")
    files = match("server.log*", state)
    assert live(files) == b"two\n"
    append(log, b"three\n")
    clock.now += 1
    assert live(files) == b"three\n"
    files.close()
    assert live(match("server.log*", state)) == b""


def test_match_that_vanished_is_forgotten_and_its_totals_stay(match, log, clock):
    append(log.with_name("b.log"), b"")
    files = match("*.log")
    live(files)
    before = open_files()
    append(log, b"one\n")
    clock.now += 1
    assert live(files) == b"one\n"
    log.unlink()
    clock.now += 1
    live(files)
    assert files.stats.readable
    clock.now += 60
    live(files)
    assert open_files() == before
    assert files.stats.lines == 1
    append(log, b"two\n")
    clock.now += 1
    assert live(files) == b"two\n"
    assert files.stats.lines == 2


# Standard input


@pytest.fixture
def pipe() -> Iterator[tuple[int, list[int]]]:
    """The reading end, and the writing end in a list that a test empties when it closes it."""
    reading, writing = os.pipe()
    ends = [writing]
    yield reading, ends
    for end in (reading, *ends):
        os.close(end)


def test_standard_input_gives_whole_lines_and_never_waits(pipe, clock):
    reading, [writing] = pipe
    source = StandardInput(clock=clock, wall=wall, fd=reading)
    assert live(source) == b""
    os.write(writing, b"one\ntw")
    assert live(source) == b"one\n"
    os.write(writing, b"o\nthree")
    assert live(source) == b"two\n"
    clock.now += 2
    assert live(source) == b"three\n"
    os.write(writing, b" more\nfour\n")
    assert live(source) == b"four\n"
    assert (source.stats.lines, source.stats.dropped_bytes) == (4, 5)
    assert os.get_blocking(reading)


def test_closed_pipe_is_read_to_its_end_and_told(pipe, clock):
    reading, ends = pipe
    source = StandardInput(clock=clock, wall=wall, fd=reading)
    os.write(ends[0], b"one\nlast")
    os.close(ends.pop())
    assert live(source) == b"one\n"
    assert (source.stats.readable, source.stats.reason) == (False, "missing")
    clock.now += 2
    assert live(source) == b"last\n"
    source.close()
    os.fstat(reading)


def test_standard_input_may_be_a_file(log, clock):
    append(log, b"one\n")
    with log.open("rb") as file:
        source = StandardInput(clock=clock, wall=wall, fd=file.fileno())
        assert live(source) == b"one\n"
        append(log, b"two\n")
        assert live(source) == b"two\n"
        assert source.stats.readable

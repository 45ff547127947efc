"""The checkpoint: a place comes back as it was saved, and nothing it cannot do stops the rest."""

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter.sources.checkpoint import Checkpoint, Place


@pytest.fixture
def log_fd(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "log").write_bytes(b"first line\nsecond line\n")
    fd = os.open(tmp_path / "log", os.O_RDONLY)
    yield fd
    os.close(fd)


PATH = Path("/logs/a.log")


def place(offset: int = 11, tail: bytes = b"first line\n") -> Place:
    return Place.after((7, 42), offset, tail)


def test_saved_places_are_loaded_in_their_order_by_another_run(tmp_path: Path) -> None:
    Checkpoint(tmp_path).save(PATH, [place(), place(500)])
    assert Checkpoint(tmp_path).load(PATH) == [place(), place(500)]
    assert place().identity == (7, 42)


def test_each_path_has_its_own_places(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(PATH, [place()])
    checkpoint.save(Path("/logs/b.log"), [place(3, b"xy\n")])
    assert checkpoint.load(PATH) == [place()]
    assert checkpoint.load(Path("/logs/c.log")) == []
    assert checkpoint.load_all() == [place(3, b"xy\n"), place()]


def test_later_places_replace_the_earlier_ones_and_leave_no_draft(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(PATH, [place()])
    checkpoint.save(PATH, [place(500)])
    assert checkpoint.load(PATH) == [place(500)]
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]


def test_no_log_text_is_kept(tmp_path: Path) -> None:
    Checkpoint(tmp_path).save(PATH, [place(tail=b"a secret prompt\n")])
    assert b"secret" not in b"".join(file.read_bytes() for file in tmp_path.iterdir())


def test_a_name_that_is_not_utf8_is_remembered(tmp_path: Path) -> None:
    path = Path(os.fsdecode(b"/logs/\xff.log"))
    Checkpoint(tmp_path).save(path, [place()])
    assert Checkpoint(tmp_path).load(path) == [place()]


@pytest.mark.parametrize(
    ("offset", "tail", "fits"),
    [
        pytest.param(11, b"first line\n", True, id="same bytes"),
        pytest.param(0, b"", True, id="nothing read yet"),
        pytest.param(11, b"other line\n", False, id="other bytes"),
        pytest.param(99, b"first line\n", False, id="file is shorter"),
        pytest.param(3, b"first line\n", False, id="more bytes than there are before it"),
    ],
)
def test_place_knows_its_file_by_the_bytes_before_it(log_fd: int, offset: int, tail: bytes, fits: bool) -> None:
    assert place(offset, tail).tail_in(log_fd) == (tail if fits else None)


def test_without_a_directory_nothing_is_remembered() -> None:
    checkpoint = Checkpoint(None)
    checkpoint.save(PATH, [place()])
    assert checkpoint.load(PATH) == []
    assert checkpoint.load_all() == []


def test_an_absent_directory_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = Checkpoint(tmp_path / "absent")
    for _ in range(3):
        checkpoint.save(PATH, [place()])
    assert checkpoint.load(PATH) == []
    assert checkpoint.load_all() == []
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_directory_that_cannot_be_written_is_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file in its place stands for read-only mounts, which root would need a mount to make."""
    (tmp_path / "state").write_bytes(b"")
    checkpoint = Checkpoint(tmp_path / "state")
    checkpoint.save(PATH, [place()])
    checkpoint.save(PATH, [place()])
    assert checkpoint.load(PATH) == []
    assert checkpoint.load_all() == []
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def written(**changed: int) -> bytes:
    kept = {"device": 7, "inode": 42, "offset": 11, "tail_bytes": 11, "tail_hash": ""} | changed
    return json.dumps({"path": "/logs/a.log", "places": [kept]}).encode()


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b'{"path": "/logs/a.log"}', b"\xff\x00", b"[" * 100_000),
        *(written(offset=2**80), written(offset=-1), written(offset=2**40, tail_bytes=2**40)),
    ],
)
def test_a_damaged_file_is_as_none(tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes) -> None:
    checkpoint = Checkpoint(tmp_path)
    checkpoint.save(PATH, [place()])
    for file in tmp_path.iterdir():
        file.write_bytes(content)
    assert checkpoint.load(PATH) == []
    assert checkpoint.load_all() == []
    assert len(caplog.records) == 1
    checkpoint.save(PATH, [place()])
    assert checkpoint.load(PATH) == [place()]

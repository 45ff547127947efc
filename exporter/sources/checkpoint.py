"""Where following stopped, kept on disk, so that a restarted sidecar counts every line once.

One small JSON file for each followed path.  It holds no log text: of the bytes before a place
only their hash is kept, enough to know the file again.
"""

import hashlib
import logging
import os
from pathlib import Path
from typing import Annotated, Self

import msgspec

log = logging.getLogger(__name__)

TAIL_BYTES = 64  # what is compared before a place: most log lines are longer, so this is rarely a repeat

Identity = tuple[int, int]
"""Device and inode: the file itself, whatever its name."""

_Natural = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Tail = Annotated[int, msgspec.Meta(ge=0, le=TAIL_BYTES)]


class Place(msgspec.Struct, frozen=True):
    """A byte offset in one file, and how to recognise that file there."""

    device: int
    inode: int
    offset: _Natural
    tail_bytes: _Tail
    tail_hash: str

    @classmethod
    def after(cls, identity: Identity, offset: int, tail: bytes) -> Self:
        """The place at *offset*; *tail* is the last (up to 64) bytes before it."""
        return cls(*identity, offset, len(tail), _hash(tail))

    @property
    def identity(self) -> Identity:
        return self.device, self.inode

    def tail_in(self, fd: int) -> bytes | None:
        """The bytes before the place in the open file, or None if they are not those once read there."""
        if self.tail_bytes > self.offset:
            return None
        tail = os.pread(fd, self.tail_bytes, self.offset - self.tail_bytes)
        return tail if len(tail) == self.tail_bytes and _hash(tail) == self.tail_hash else None


class _Record(msgspec.Struct):
    path: str
    places: list[Place]


class Checkpoint:
    """Places on disk, in *directory*, which is not created.

    Without a directory, or with one that cannot be written, nothing is remembered and the
    rest works: following then begins anew at each start. That is logged once.
    """

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        self._warned = False

    def load(self, path: Path) -> list[Place]:
        """The places last saved for *path*: in the file being read, then in those read before."""
        record = self._read(self._file(self._directory, _text(path))) if self._directory else None
        return record.places if record and record.path == _text(path) else []

    def load_all(self) -> list[Place]:
        """The places of all paths; where a file was read under several, the furthest comes last."""
        files = list(self._directory.glob("tail-*.json")) if self._directory else []
        places = [place for record in map(self._read, files) if record for place in record.places]
        return sorted(places, key=lambda place: place.offset)

    def save(self, path: Path, places: list[Place]) -> None:
        """Replace what was saved for *path*; a reader sees the old or the new, never half.

        Not synced to the disk: after a power cut the last seconds may be counted twice.
        """
        if self._directory is None:
            return
        file = self._file(self._directory, _text(path))
        draft = file.with_suffix(".tmp")
        try:
            draft.write_bytes(msgspec.json.encode(_Record(_text(path), places)))
            draft.replace(file)
        except OSError as error:
            self._warn(error)

    def _read(self, file: Path) -> _Record | None:
        try:
            return msgspec.json.decode(file.read_bytes(), type=_Record)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, RecursionError) as error:
            self._warn(error)
            return None

    @staticmethod
    def _file(directory: Path, path: str) -> Path:
        return directory / f"tail-{_hash(path.encode())}.json"

    def _warn(self, error: Exception) -> None:
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        log.log(
            level, "no checkpoint: lines written while down are not counted; state_dir=%s error=%s",
            self._directory, error,
        )  # fmt: skip


def _text(path: Path) -> str:
    return os.fsencode(path).decode(errors="backslashreplace")  # names need not be UTF-8; JSON must be


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()

"""What the engine said of itself at its start, kept on disk.

A log is cut and rotated, and a restarted sidecar then finds its beginning gone: without it the engine would seem to be
set up otherwise, and there would be no baseline for it. The file holds facts only: names, sizes, limits; no log text.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from exporter import catalog
from exporter.catalog import Family
from exporter.lifecycle import LABEL, Lifecycle
from exporter.signals import Labels
from exporter.sources.lines import Lines

log = logging.getLogger(__name__)

_MAX_AGE_SECONDS = 3600.0
"""After a longer absence, and where no page tells when the engine was started, nothing is believed."""
_GAUGES = {family.name: family for family in catalog.FAMILIES if family.kind == "gauge"}


class _Fact(msgspec.Struct, array_like=True):
    family: str
    labels: tuple[str, ...]
    value: float


class _Record(msgspec.Struct):
    started_at: float | None
    info: dict[str, str]
    facts: dict[str, list[_Fact]]
    """By log."""


class Facts:
    """In *directory*; without one, or where it cannot be written, nothing is kept."""

    def __init__(self, directory: Path | None, lifecycle: Lifecycle) -> None:
        self._file = directory / "engine.json" if directory else None
        self._lifecycle = lifecycle
        self._saved = b""

    def recall(self, logs: Mapping[str, Lines], now: float) -> None:
        """Take up what was kept, as far as it can still be true at the Unix time *now*.

        A page that tells another start, or a log that tells one, makes it void.
        """
        record = self._read(now)
        if record is None:
            return
        told = {name: text for name, text in record.info.items() if LABEL.fullmatch(text)}
        self._lifecycle.recall(told, record.started_at)
        for source, facts in record.facts.items():
            if source in logs:
                logs[source].recall(_known(facts))

    def keep(self, logs: Mapping[str, Lines]) -> None:
        """Write down what is known now, if it has changed."""
        if self._file is None:
            return
        facts = {
            source: [_Fact(family.name, labels, value) for (family, labels), value in lines.facts.items()]
            for source, lines in logs.items()
        }
        record = _Record(self._lifecycle.started_at, self._lifecycle.info, facts)
        data = msgspec.json.encode(record, order="sorted")
        try:
            if data == self._saved:
                os.utime(self._file)  # still true
                return
            draft = self._file.with_suffix(".tmp")
            draft.write_bytes(data)
            draft.replace(self._file)
        except OSError as error:
            log.debug("facts of the engine not kept: file=%s error=%s", self._file, error)
            return
        self._saved = data

    def _read(self, now: float) -> _Record | None:
        if self._file is None:
            return None
        try:
            age = now - self._file.stat().st_mtime
            record = msgspec.json.decode(self._file.read_bytes(), type=_Record)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError, RecursionError) as error:
            log.warning("facts of the engine not recalled: file=%s error=%s", self._file, error)
            return None
        return record if record.started_at is not None or age <= _MAX_AGE_SECONDS else None


def _known(facts: list[_Fact]) -> dict[tuple[Family, Labels], float]:
    """Those that this version has; a file may be of another, or have been changed."""
    return {
        (family, fact.labels): fact.value
        for fact in facts
        if (family := _GAUGES.get(fact.family))
        and len(fact.labels) == len(family.labels)
        and all(not text or LABEL.fullmatch(text) for text in fact.labels)
    }

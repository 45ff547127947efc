"""The logs: can they be read, do they grow, and are their lines understood?"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from exporter import catalog, remedies
from exporter.doctor.findings import NOT_TRIED, Finding, listed, shown, size, unreadable
from exporter.remedies import plain
from exporter.sidecar import Sidecar
from exporter.sources.logs import LogSource


def findings(sidecar: Sidecar, grown: Counter[str], seconds: float) -> Iterator[Finding]:
    """*grown* is by how many bytes each log grew in *seconds*."""
    if not sidecar.logs:
        remedy = "give --log: errors, phases and layout are told there"
        yield Finding("log", "warning", "no log is followed: log.paths is not set", remedy)
    for source in sidecar.logs:
        yield from _log(sidecar, source, grown[source.source], seconds)


def readable(sidecar: Sidecar) -> bool:
    """Whether any log can be read."""
    readings = (sidecar.store.readings.get(source.source) for source in sidecar.logs)
    return any(reading is not None and reading.ok for reading in readings)


def matched(sidecar: Sidecar, *sources: str) -> Counter[str]:
    """Lines by pattern, of the logs *sources*; patterns that fit none are left out."""
    told = sidecar.store.counters[catalog.LOG_MATCHED].items()
    return Counter({pattern: int(n) for (source, pattern), n in told if n and source in sources})


def understood(sidecar: Sidecar) -> bool:
    """Whether any log has a line that a pattern knows, so that it is the engine's."""
    return bool(matched(sidecar, *(source.source for source in sidecar.logs)))


def _log(sidecar: Sidecar, source: LogSource, grown: int, seconds: float) -> Iterator[Finding]:
    name, store = shown(source.source), sidecar.store
    reading = store.readings.get(source.source)
    if reading is None:
        yield Finding("log", "failed", f"{name} was not read", NOT_TRIED)
        return
    if not reading.ok:
        yield unreadable("log", name, remedies.LOG, reading.reason)
        return
    yield Finding("log", "ok", f"{name} can be read{_files(source.paths, store.wall())}")
    if lag := store.gauges().get(catalog.LOG_LAG, {}).get((source.source,)):
        yield Finding("log", "note", f"{size(lag)} of it are not read yet", "watch longer with --seconds")
    if grown:
        yield Finding("log", "ok", f"it grew by {size(grown)} in {seconds:g} s")
    else:
        remedy = "an idle engine may be silent: send it a request; else compare the path with where the server writes"
        yield Finding("log", "note", f"nothing was written to it in {seconds:g} s", remedy)
    lines = store.counters[catalog.LOG_LINES][source.source,]
    if patterns := matched(sidecar, source.source):
        understood = listed(f"{pattern} {n}" for pattern, n in patterns.most_common())
        yield Finding("log", "ok", f"lines read: {lines:.0f}; understood, by pattern: {understood}")
    elif lines:
        remedy = plain(f"{remedies.UNMATCHED.remedy}; `stopline explain FILE` shows what each line becomes")
        yield Finding("log", "warning", f"lines read: {lines:.0f}; no pattern understands one", remedy)
    if unparsed := store.counters[catalog.LOG_UNPARSED].get((source.source,)):
        text = f"lines that look like known ones and read differently: {unparsed:.0f}"
        yield Finding("log", "warning", text, plain(remedies.UNPARSED.remedy))


def _files(paths: list[Path], now: float) -> str:
    """How many, how large, and how old: a log that nobody writes to any more is often the wrong one."""
    found = []
    for path in paths:
        try:
            found.append(path.stat())
        except OSError:  # gone meanwhile
            continue
    if not found:
        return ""
    files = f"{len(found)} files, " if len(found) > 1 else ""
    written = max(0.0, now - max(stat.st_mtime for stat in found))
    return f": {files}{size(sum(stat.st_size for stat in found))}, last written {_age(written)} ago"


def _age(seconds: float) -> str:
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"

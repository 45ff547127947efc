"""What the doctor found, and how it is told: to a person as lines, to a program as one object."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import click

from exporter import remedies
from exporter.remedies import Advice

Group = Literal["settings", "log", "engine", "gpus", "prometheus", "grafana"]
Status = Literal["ok", "note", "warning", "failed"]

NOT_TRIED = "it did not answer in time; watch longer with --seconds"

_COLOURS: dict[Status, str] = {"ok": "green", "note": "cyan", "warning": "yellow", "failed": "red"}
_VAGUE = ("unreachable", "tls", "timeout", "credentials", "too_large", "broken", "not_its_api", "unknown")
_LISTED = 8
_LONGEST = 100
_USER = re.compile(r"//[^/\s]*@")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. *remedy* is empty where nothing need be done."""

    group: Group
    status: Status
    finding: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a stop line can be judged, and from what, or why not."""

    line: Literal["latency", "errors", "memory"]
    judged: bool
    why: str


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found, findings by group."""

    findings: tuple[Finding, ...]
    lines: tuple[Verdict, ...]

    @property
    def exit_code(self) -> int:
        return 0 if all(verdict.judged for verdict in self.lines) else 1

    def as_text(self) -> Iterator[str]:
        """Lines for a terminal."""
        for group, findings in groupby(self.findings, lambda finding: finding.group):
            yield click.style(group, bold=True)
            for found in findings:
                yield f"  {click.style(f'{found.status:8}', fg=_COLOURS[found.status])} {found.finding}"
                if found.remedy:
                    yield f"           {found.remedy}"
        yield click.style("stop lines", bold=True)
        for verdict in self.lines:
            can, colour = ("can be judged", "green") if verdict.judged else ("cannot be judged", "red")
            yield f"  {verdict.line:8} {click.style(can, fg=colour)}: {verdict.why}"


def unreadable(group: Group, what: str, table: Mapping[str, Advice], reason: str, detail: str = "") -> Finding:
    """*what* cannot be read for *reason*, a row of *table*; *detail* is more on it, from outside."""
    cause, remedy = map(remedies.plain, remedies.of(table, reason))
    vague = reason in _VAGUE or reason.startswith("http_")
    more = f" ({shown(detail)})" if vague and detail and detail not in what else ""
    return Finding(group, "failed", f"{what} cannot be read: {reason}, {cause}{more}", remedy)


def printable(text: str) -> str:
    """*text* without what could move the cursor of who reads it."""
    return "".join(c if c.isprintable() else "·" for c in text)


def shown(text: str) -> str:
    """Text from outside as it may stand in a finding: printable, cut, and without the password of an address."""
    text = _USER.sub("//", printable(text))
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def listed(items: Iterable[str]) -> str:
    """The first of *items*, and how many more there are."""
    every = [shown(item) for item in items]
    more = f" and {len(every) - _LISTED} more" if len(every) > _LISTED else ""
    return ", ".join(every[:_LISTED]) + more


def size(count: float) -> str:
    """Bytes, short."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"

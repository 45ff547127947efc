"""Numbers as a person reads them, and rows of them as a table for a terminal or in Markdown."""

import math
import re
from collections.abc import Sequence

UNKNOWN = "-"


def time(seconds: float | None) -> str:
    """In ms below a second; infinite is the time of a request that failed."""
    if seconds is None or math.isnan(seconds):
        return UNKNOWN
    if seconds == math.inf:
        return "failed"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def number(value: float | None, digits: int = 1) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def size(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value / 2**30:.1f} GiB"


def share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0%}"


def change(value: float | None) -> str:
    """A relative change, with its sign."""
    if value is None or math.isnan(value):
        return UNKNOWN
    return "failed" if math.isinf(value) else f"{value:+.1%}"


def counts(values: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(values.items())) or "0"


def text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines for a terminal, the columns aligned; one that nobody knows anything of is left out."""
    columns = [column for column in zip(header, *rows, strict=True) if not rows or set(column[1:]) - {UNKNOWN, ""}]
    widths = [max(map(len, column)) for column in columns]
    left = [not any(re.match(r"[+-]?\d", cell) for cell in column[1:]) for column in columns]
    return [
        "  ".join(
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(line, widths, left, strict=True)
        ).rstrip()
        for line in zip(*columns, strict=True)
    ]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The same with all its columns, for a document."""
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines]

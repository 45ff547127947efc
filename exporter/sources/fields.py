"""Known fields of a line, as ``key=value``, ``key: value`` or JSON, and nothing that a client wrote."""

import re
from collections.abc import Iterator

from exporter.engines.profile import UNITS, Signal
from exporter.sources.peel import Record

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
_UNIT = r"(?:\s?(ms|us|µs|μs|ns|s|%)(?![\w/%]))?"
_QUANTITY = re.compile(rf"({_NUMBER}){_UNIT}")
# a quote that is never closed takes the rest of the line with it, so that no line is gone through twice
_PROSE = re.compile(r'"(?:[^"\\]++|\\.)*+"?|(?<=[=:\s(\[{,])\'(?:[^\'\\]++|\\.)*+\'?')
_STRANGERS = re.compile(r"\b(?:prompt|messages|content|input_text|query|body)[\"']?\s*[=:]")
_LONGEST_WORD = 40


class Fields:
    """A mapping from names to signals, applied wherever a line carries one of the names with a number."""

    def __init__(self, mapping: dict[str, Signal | tuple[Signal, ...]]) -> None:
        self._signals = {name: (s,) if isinstance(s, Signal) else s for name, s in mapping.items()}
        self._rank = {name: rank for rank, name in enumerate(mapping)}
        names = "|".join(re.escape(name) for name in sorted(mapping, key=len, reverse=True))
        self._regex = re.compile(rf'(?<![\w.\-])({names})["\']?\s*[=:]\s*["\']?({_NUMBER}){_UNIT}(?![\w.])')

    def find(self, record: Record) -> Iterator[tuple[Signal, float]]:
        """Signals of *record* with their values in base units.

        What stands in quoted prose, or behind the name of a field that holds a client's text, is not looked at.
        A line that tells the same twice, under two names, tells it once; the name that is first in the mapping counts.
        """
        found = self._in_json(record) or self._in_text(record)
        said = set()
        for name, text, unit in sorted(found, key=lambda field: self._rank[field[0]]):
            for signal in self._signals[name]:
                what = (signal.signal, *signal.labels.items())
                value = number(signal.value, signal.unit) if signal.value else number(text, unit or signal.unit)
                if value is not None and what not in said:
                    said.add(what)
                    yield signal, value

    def _in_json(self, record: Record) -> list[tuple[str, str, str]]:
        told = record.fields or {}
        known = ((name, _QUANTITY.fullmatch(str(told[name]))) for name in self._signals if name in told)
        return [(name, match[1], match[2] or "") for name, match in known if match]

    def _in_text(self, record: Record) -> list[tuple[str, str, str]]:
        text = _STRANGERS.split(_PROSE.sub(_blank, record.text), maxsplit=1)[0]
        return [(m[1], m[2], m[3] or "") for m in self._regex.finditer(text)]


def number(text: str, unit: str) -> float | None:
    """*text* in base units; None if it is no number. Commas only part thousands."""
    try:
        return float(text.replace(",", "") if "," in text else text) * UNITS[unit]
    except ValueError:
        return None


def _blank(quoted: re.Match[str]) -> str:
    """Keep a short quoted word or number (a key or a value), blank anything that reads like text."""
    text = quoted[0]
    return text if len(text) <= _LONGEST_WORD and not re.search(r"[\s=]", text[1:-1].strip()) else '""'

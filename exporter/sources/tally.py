"""Lines that only tell numbers: what they tell is gathered, and added up or replaced for many lines at once."""

import re
from collections.abc import Mapping

from exporter.engines.profile import GROUP, Pattern, Signal, is_number


class Tally:
    """A pattern that tells no more than values for histograms and counters with fixed labels, and gauges.

    Of a gauge the last line counts.
    """

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.match = pattern.regex.match
        self.added = tuple(s for s in pattern.signals if s.family.kind != "gauge")
        self.gauges = tuple(s for s in pattern.signals if s.family.kind == "gauge")
        self.group = next(iter(_groups(self.added)), 0)
        self.told: list[str | None] = []
        """The text of the group, line by line."""
        self._last: dict[tuple[str | None, ...], tuple[re.Match[str], Mapping[str, str]]] = {}
        named = {"rank", *(name for s in self.gauges for label in s.labels.values() for name in GROUP.findall(label))}
        self._named = sorted(named & set(pattern.regex.groupindex))

    @staticmethod
    def fits(pattern: Pattern) -> bool:
        """Whether *pattern* does no more than that."""
        if pattern.startup or pattern.phase or pattern.info or pattern.begin or pattern.end or pattern.spoils:
            return False
        added = tuple(s for s in pattern.signals if s.family.kind != "gauge")
        return len(_groups(added)) <= 1 and all(map(_plain, added))

    def keep(self, match: re.Match[str], ranks: Mapping[str, str]) -> None:
        """The gauges of a line, until the next one of the same rank."""
        self._last[*(match[name] for name in self._named), *ranks.values()] = match, ranks

    def empty(self) -> tuple[list[str | None], list[tuple[re.Match[str], Mapping[str, str]]]]:
        """What was gathered, oldest first: the text of each line, and the last lines with gauges."""
        told, last = self.told, [*self._last.values()]
        self.told = []
        self._last.clear()
        return told, last


def _groups(signals: tuple[Signal, ...]) -> set[str]:
    return {s.value for s in signals if not is_number(s.value or "1")}


def _plain(signal: Signal) -> bool:
    fixed = "rank" not in signal.family.labels and not any("$" in value for value in signal.labels.values())
    return fixed and not (signal.times or signal.over or signal.weight or signal.total or signal.value == "elapsed")

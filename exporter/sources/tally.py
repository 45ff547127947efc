"""Lines that only tell numbers: what they tell is gathered, and added up or replaced for many lines at once."""

import re
from collections.abc import Mapping

from exporter.engines.profile import GROUP, Pattern, Signal, is_number


class Tally:
    """A pattern that tells no more than values for histograms and counters with fixed labels, and gauges."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.match = pattern.regex.match
        self.added = tuple(s for s in pattern.signals if s.family.kind != "gauge")
        self.gauges = tuple(s for s in pattern.signals if s.family.kind == "gauge")
        self.group = next(iter(_groups(self.added)), 0)
        self.told: list[str | None] = []
        """The text of the group, line by line."""
        named = {"rank", *(name for s in self.gauges for label in s.labels.values() for name in GROUP.findall(label))}
        self._named = sorted(named & set(pattern.regex.groupindex))

    @staticmethod
    def fits(pattern: Pattern) -> bool:
        """Whether *pattern* does no more than that."""
        if pattern.startup or pattern.phase or pattern.info or pattern.begin or pattern.end or pattern.spoils:
            return False
        added = tuple(s for s in pattern.signals if s.family.kind != "gauge")
        return len(_groups(added)) <= 1 and all(map(_plain, added))

    def rank(self, match: re.Match[str], ranks: Mapping[str, str]) -> tuple[object, ...]:
        """Whose gauges a line tells: those of a later line with the same replace them."""
        return (self, *(match[name] for name in self._named), *ranks.values())

    def empty(self) -> list[str | None]:
        """What was gathered, oldest first."""
        told, self.told = self.told, []
        return told


def _groups(signals: tuple[Signal, ...]) -> set[str]:
    return {s.value for s in signals if not is_number(s.value or "1")}


def _plain(signal: Signal) -> bool:
    fixed = "rank" not in signal.family.labels and not any("$" in value for value in signal.labels.values())
    return fixed and not (signal.times or signal.over or signal.weight or signal.total or signal.value == "elapsed")

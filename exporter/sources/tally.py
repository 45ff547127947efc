"""Lines that only tell numbers: a match gathers the text, and many are added up at once."""

from exporter.engines.profile import Pattern, Signal, is_number


class Tally:
    """A pattern of which nothing counts but values that go into histograms and counters with fixed labels."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.match = pattern.regex.match
        self.signals = tuple((s, None if is_number(s.value or "1") else s.value) for s in pattern.signals)
        self.told: list[str | None] = []
        """The text of the group, line by line."""
        groups = {group for _, group in self.signals if group}
        self.group = groups.pop() if groups else 0

    @staticmethod
    def fits(pattern: Pattern) -> bool:
        """Whether *pattern* does no more than that, with one number in a line."""
        if pattern.startup or pattern.phase or pattern.info or pattern.begin or pattern.end or pattern.spoils:
            return False
        values = {s.value for s in pattern.signals if not is_number(s.value or "1")}
        return len(values) <= 1 and "elapsed" not in values and all(map(_adds, pattern.signals))

    def empty(self) -> list[str | None]:
        """What was gathered, oldest first."""
        told, self.told = self.told, []
        return told


def _adds(signal: Signal) -> bool:
    plain = not (signal.times or signal.over or signal.weight or signal.total)
    fixed = "rank" not in signal.family.labels and not any("$" in value for value in signal.labels.values())
    return plain and fixed and signal.family.kind != "gauge"

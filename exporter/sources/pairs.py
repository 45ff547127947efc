"""How long something took, from two lines with the same id."""

from exporter.engines.profile import Pattern

_MAX_OPEN = 10_000
_LONGEST = 3600.0


class Orphan(ValueError):
    """An end without its begin, or a begin that was given up, or a clock that was set in between."""


class Pairs:
    """Open beginnings by id; bounded, the oldest goes first. Times are seconds of whatever clock the caller has."""

    def __init__(self) -> None:
        self._began: dict[tuple[str, str], float] = {}

    def __len__(self) -> int:
        return len(self._began)

    def clear(self) -> None:
        self._began.clear()

    def begin(self, pattern: Pattern, identity: str, at: float) -> None:
        """Raises Orphan if an older one had to be given up for it."""
        self._began[pattern.begin, identity] = at
        if len(self._began) > _MAX_OPEN:
            del self._began[next(iter(self._began))]
            raise Orphan

    def end(self, pattern: Pattern, identity: str, at: float) -> float:
        """Seconds since the beginning. Raises Orphan if that is not known."""
        began = self._began.pop((pattern.end, identity), None)
        if began is None or not 0 <= at - began <= _LONGEST:
            raise Orphan
        return at - began

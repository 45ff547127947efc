"""Which source may speak for a signal, so that no event is counted from two of them."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from exporter.signals import Origin

EXACT_VALUES: tuple[Origin, ...] = ("trace", "log", "metrics")
"""Per-request values, most exact first: a span or a line tells one request, a page only sums."""

EXACT_COUNTS: tuple[Origin, ...] = ("metrics", "log", "trace")
"""Counts, most exact first: a counter misses nothing, lines and spans can be dropped."""

_MISSED = 20
_SILENT_SECONDS = 30.0


@dataclass(slots=True)
class _Claim:
    owner: Origin
    missed: int = 0
    missed_since: float = 0.0
    told: float = 0.0
    """Events counted from the owner since told_at."""
    told_at: float = 0.0
    owed: float = 0.0
    """Events that the owner before has told already."""


class Claims:
    """One owner for each signal: the most exact source that has spoken.

    A more exact source takes a signal over at once. A less exact one takes it only when the owner has said
    nothing for 30 s during which the other spoke 20 times (a flag was dropped, a format changed); what it said
    until then is not counted. From a page nothing is taken that way. What a page has told a moment before a log takes
    over is not taken from the log once more; *twice* is how many seconds later the log may be read.
    """

    def __init__(self, clock: Callable[[], float], twice: float) -> None:
        self._clock = clock
        self._twice = twice
        self._claims: dict[Hashable, _Claim] = {}
        self._orders: dict[Hashable, tuple[Origin, ...]] = {}

    def order(self, signal: Hashable, order: tuple[Origin, ...]) -> None:
        """Let *order*, most exact first, decide for *signal*: a family, or a pair of one and a part of it."""
        self._orders[signal] = order

    def take(self, signal: Hashable, origin: Origin, default: tuple[Origin, ...]) -> bool:
        """*origin* can tell *signal*, even if nothing has happened yet; whether it took it from another source.

        What it tells of the time before is then told already.
        """
        claim = self._claims.get(signal)
        if claim is None or self._rank(signal, origin, default) < self._rank(signal, claim.owner, default):
            self._claims[signal] = _Claim(origin)
            return claim is not None
        return False

    def admits(self, signal: Hashable, origin: Origin, default: tuple[Origin, ...], count: float = 1) -> bool:
        """Whether *count* events of *signal* told by *origin* are to be counted."""
        claim = self._claims.get(signal)
        now = self._clock()
        if claim is None:
            claim = self._claims[signal] = _Claim(origin)
        elif claim.owner != origin and self._rank(signal, origin, default) < self._rank(signal, claim.owner, default):
            owed = claim.told if now - claim.told_at <= self._twice else 0.0
            claim = self._claims[signal] = _Claim(origin, owed=owed)
        if claim.owner == origin:
            claim.missed = 0
            if claim.owed >= count:
                claim.owed -= count
                return False
            if now - claim.told_at > self._twice:
                claim.told, claim.told_at = 0.0, now
            claim.told += count
            return True
        if claim.owner == "metrics":  # a page that is late will tell it all the same: counters forget nothing
            return False
        if claim.missed == 0:
            claim.missed_since = now
        claim.missed += int(count)
        if claim.missed >= _MISSED and now - claim.missed_since >= _SILENT_SECONDS:
            self._claims[signal] = _Claim(origin)
        return False

    def owes(self, signal: Hashable, origin: Origin) -> bool:
        """Whether it is not plain that *origin* has the word: its events are then to be admitted one by one."""
        claim = self._claims.get(signal)
        return claim is None or claim.owner != origin or claim.owed > 0

    def reset(self) -> None:
        """Forget every owner: the engine was started anew, perhaps with other flags."""
        self._claims.clear()

    def _rank(self, signal: Hashable, origin: Origin, default: tuple[Origin, ...]) -> int:
        whole = signal[0] if isinstance(signal, tuple) else signal
        order = self._orders.get(signal) or self._orders.get(whole, default)
        return order.index(origin) if origin in order else len(order)

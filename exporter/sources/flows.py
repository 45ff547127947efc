"""Differences of counters over several polls: what another family counts already, and who went away."""

from collections import deque
from collections.abc import Iterable

from exporter.sources.page import Page

_OWED_POLLS = 4


class Owed:
    """What another family counts already and is to be taken off; told twice, it need not be told in the same poll."""

    def __init__(self) -> None:
        self._polls: deque[float] = deque(maxlen=_OWED_POLLS)

    def off(self, more: float, amount: float) -> float:
        """How much is to be taken off *amount*, now that the other grew by *more*."""
        self._polls.append(more)
        taken = 0.0
        for n, each in enumerate(self._polls):
            part = min(each, amount - taken)
            self._polls[n] -= part
            taken += part
        return taken


class Flow:
    """Requests on their way through the engine: admitted, and then finished, open, or gone."""

    def __init__(self) -> None:
        self._admitted = 0.0
        self._excess = 0.0

    def gone(self, net: float, still: float | None) -> float:
        """How many went away. *net* were admitted and have not finished, *still* are open, None if that is not known.

        Never too many: two polls must show it, for a gauge may lag behind the counters. Those that were open at the
        first poll are not known to have been admitted, until nothing is open.
        """
        self._admitted += net
        excess = max(0.0, self._admitted - still) if still is not None else 0.0
        gone = min(excess, self._excess)
        self._admitted -= gone
        self._excess = excess - gone
        if still == 0 and not self._excess:
            self._admitted = 0.0
        return gone


class Presence:
    """Whether a page has all it had before of some metrics, and each of them whole."""

    def __init__(self) -> None:
        self._had: set[str] = set()

    def whole(self, page: Page, names: Iterable[str]) -> bool:
        names = set(names)
        present = {name for name in names if page.samples.get(name)}
        lost = (self._had & names) - present
        self._had |= present
        return not lost and not page.dropped.keys() & names

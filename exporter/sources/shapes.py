"""How the values of a histogram on a page are likely to be spread: what `refine` is told beside the page's counts.

Queue waits are spread as the times to first token of those requests which may be ending now: as many of the last first
tokens as requests are running and have ended. Who gets a first token between two polls was scheduled in turn and waited
about as long as the one before, so these are placed as near to one another as their buckets allow. All other times mix
requests of all sorts, and are spread as the last of their own are.
"""

from collections import defaultdict

from exporter import catalog, refine
from exporter.catalog import Family
from exporter.signals import Labels

_OWN = 30  # values; with 10 of them the P50 of the latency is a third further off, with 100 its P90


class Shapes:
    """What was placed lately, by family, labels and rank."""

    def __init__(self) -> None:
        self._recent: dict[tuple[Family, Labels, str], refine.Recent] = defaultdict(refine.Recent)

    def place(
        self, family: Family, labels: Labels, rank: str, window: refine.Window, longest: float, running: float
    ) -> refine.Placed | None:
        """Values in seconds for *window*, as `refine.values` has them; *running* requests have not ended."""
        count = sum(window.counts)
        shape: refine.Placed = []
        if family is catalog.QUEUE_WAIT:
            shape = self._recent[catalog.FIRST_TOKEN, labels, rank].last(running + count)
        if family is not catalog.FIRST_TOKEN:
            shape = shape or self._recent[family, labels, rank].last(_OWN)
        placed = refine.values(window, longest, shape)
        if placed:
            self._recent[family, labels, rank].add(placed)
        return placed

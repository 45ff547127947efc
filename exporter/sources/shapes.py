"""How the values of a histogram on a page are likely to be spread: what `refine` is told beside the page's counts.

Queue waits are spread as the times to first token of those requests which may be ending now, less the time that serving
took. Where the page tells how long ago the first tokens of those that end were (their decode times), these are the
first tokens of then; else as many of the last as requests are running and have ended. Latencies are spread as those
first tokens and what has passed since are together, where that is known closely enough. All other times mix requests of
all sorts, and are spread as the last of their own are.

Who gets a first token between two polls was scheduled in turn and waited about as long as the one before, so these
times are near to one another: over a part of their bucket only.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from exporter import catalog, refine
from exporter.catalog import Family
from exporter.signals import Labels

_OWN = 30  # values; with 10 of them the P50 of the latency is a third further off, with 100 its P90
_NEAR = 0.2  # of their bucket, over which first tokens of one poll are spread
_NEAR_PARTS = 3
_SERVED = 0.75  # of the mean time that serving takes before the first token: what nobody was served faster
_TELLING = 0.3  # of the width of the latencies' buckets, below which those of the decode times tell more than the last
_MOST = 4096  # values remembered
_POLLS = 16  # from which first tokens are taken, at most


@dataclass(frozen=True, slots=True)
class Ended:
    """What else the page tells of the requests that a window is of: when their first tokens were.

    *serving* is their mean time to first token without the wait, in seconds; None where that is not known.
    """

    decode: refine.Window
    serving: float | None = None


@dataclass(frozen=True, slots=True)
class _Poll:
    began: float
    ended: float
    placed: refine.Placed
    count: float


@dataclass(slots=True)
class _Recent:
    """The last values of one histogram, poll by poll."""

    polls: list[_Poll] = field(default_factory=list)
    count: float = 0.0

    def add(self, began: float, ended: float, placed: refine.Placed) -> None:
        poll = _Poll(began, ended, placed, sum(n for _, n in placed))
        self.polls.append(poll)
        self.count += poll.count
        if self.count - self.polls[0].count >= _MOST:
            gone = 0
            while self.count - self.polls[gone].count >= _MOST:
                self.count -= self.polls[gone].count
                gone += 1
            del self.polls[:gone]

    def last(self, count: float) -> refine.Placed:
        """So many, or a few more: whole polls, the newest first."""
        found: list[tuple[float, float]] = []
        for poll in reversed(self.polls):
            if count <= 0:
                break
            found += poll.placed
            count -= poll.count
        return found

    def before(self, ages: refine.Window, began: float, ended: float, *, aged: bool = False) -> refine.Placed:
        """Those that were so long ago, seen from some moment between *began* and *ended*; if *aged*, with that time."""
        now = (began + ended) / 2
        found: list[tuple[float, float]] = []
        for low, high, count in zip((0.0, *ages.bounds), (*ages.bounds, math.inf), ages.counts, strict=True):
            if count > 0:
                polls = list(self._between(began - high, ended - low))
                total = sum(n for _, n in polls)
                for index, n in polls:
                    poll = self.polls[index]
                    age = min(max(now - (poll.began + poll.ended) / 2, low), high) if aged else 0.0
                    found += [(value + age, each * count * n / total / poll.count) for value, each in poll.placed]
        return found

    def _between(self, began: float, ended: float) -> Iterator[tuple[int, float]]:
        """Which polls these moments are in, and how many values of each."""
        first = bisect_right(self.polls, began, key=lambda poll: poll.ended)
        last = bisect_right(self.polls, ended, key=lambda poll: poll.began)
        for index in range(first, last, 1 + (last - first) // _POLLS):
            poll = self.polls[index]
            lasted = poll.ended - poll.began
            part = (min(poll.ended, ended) - max(poll.began, began)) / lasted if lasted else 1.0
            if part > 0:
                yield index, part * poll.count


class Shapes:
    """What was placed lately, by family, labels and rank."""

    def __init__(self) -> None:
        self._recent: dict[tuple[Family, Labels, str], _Recent] = defaultdict(_Recent)
        self._before = self._now = -math.inf

    def turn(self, now: float) -> None:
        """A new page has come."""
        self._before, self._now = self._now, now

    def place(
        self,
        family: Family,
        labels: Labels,
        rank: str,
        window: refine.Window,
        longest: float,
        running: float,
        ended: Ended | None = None,
    ) -> list[tuple[float, int]] | None:
        """Values in seconds for *window*, as `refine.values` has them; *running* requests have not ended."""
        own = self._recent[family, labels, rank]
        shape: refine.Placed = []
        least = None
        parts = refine.PARTS
        if family is catalog.FIRST_TOKEN:
            parts = _NEAR_PARTS
            shape = refine.even(window, _NEAR, parts)
        elif family is catalog.QUEUE_WAIT:
            first = self._recent[catalog.FIRST_TOKEN, labels, rank]
            if ended is not None:
                shape = first.before(ended.decode, self._before, self._now)
                least = None if ended.serving is None else max(0.0, _SERVED * ended.serving)
            shape = shape or first.last(running + sum(window.counts))
        elif family is catalog.LATENCY and ended is not None and ended.decode.width < _TELLING * window.width:
            first = self._recent[catalog.FIRST_TOKEN, labels, rank]
            shape = first.before(ended.decode, self._before, self._now, aged=True)
        placed = refine.values(window, longest, shape or own.last(_OWN), least, parts)
        if placed:
            own.add(self._before, self._now, placed)
        return placed

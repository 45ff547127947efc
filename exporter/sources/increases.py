"""What an engine's counters and histograms grew by from page to page."""

import math
from collections.abc import Iterable, Iterator, Mapping

from exporter.refine import Window
from exporter.sources.page import Key, Page

Group = dict[str, list[tuple[Key, float]]]
"""The samples of one histogram series by suffix."""

_ROUNDING = 1e-9
_MOST_REMEMBERED = 200_000  # series; more than any engine has, and what a page that churns labels may cost
_RESTART_SECONDS = 0.5  # a start time that differs by less is the same start, told anew


class Increases:
    """What counters and histograms grew by, page after page. The first page only sets the reference.

    A series that is new on a later page has grown from 0. A value below the last means that the engine started
    anew: the value is the increase. That is so for every series if the start time of the process has changed, or,
    where the page does not tell it, if most series fell.
    """

    def __init__(self) -> None:
        self._last: dict[Key, float] = {}
        self._before: dict[Key, float] = {}
        self._unknown: set[Key] = set()
        self._started_at: float | None = None
        self._first = True
        self.restarted = False

    def turn(self, page: Page) -> None:
        """A new page has come: see whether the engine was started since the last."""
        self.restarted = not self._first and self._is_restart(page)
        now = {key: value for series in page.samples.values() for key, value in series.items()}
        self._before = {} if self.restarted else self._last
        if len(self._before) > _MOST_REMEMBERED:  # what vanished is forgotten, what is there keeps its reference
            self._before = {key: value for key, value in self._before.items() if key in now}
        self._unknown = (self._unknown - self._last.keys() | page.bad) - self._before.keys()
        self._last = {**self._before, **now}
        self._started_at = page.started_at

    def end(self) -> None:
        """The page has been used, if it was the engine's."""
        self._first = False

    def of(self, key: Key, value: float) -> float:
        """What the counter *key* grew by, 0 on the first page."""
        grown = value - self._reference(key, value)
        if grown < 0 and -grown <= _ROUNDING * value:
            return 0.0
        return grown if grown >= 0 else value

    def window(self, group: Mapping[str, Iterable[tuple[Key, float]]]) -> Window | None:
        """What came into one histogram series; None if its buckets make no sense.

        *group* holds the series' samples by suffix: ``_bucket``, ``_sum`` and ``_count``.
        """
        try:
            buckets = sorted((float(dict(key[1])["le"]), key, value) for key, value in group.get("_bucket", ()))
        except (KeyError, ValueError):
            return None
        if not buckets:  # a summary, or a histogram without its buckets: one bucket for all
            buckets = [(math.inf, key, value) for key, value in group.get("_count", ())]
        if not buckets or not math.isinf(buckets[-1][0]) or not group.get("_sum"):
            return None
        _, everything, count = buckets[-1]
        anew = count < self._reference(everything, count)  # the count of all fell: the series was born anew
        # from here on a fall is no restart but a value that cannot be: it stays negative, and is dropped as such
        cumulative = [round(value - (0.0 if anew else self._reference(key, value))) for _, key, value in buckets]
        counts = [after - before for before, after in zip([0, *cumulative], cumulative, strict=False)]
        total = sum(value - (0.0 if anew else self._reference(key, value)) for key, value in group.get("_sum", ()))
        return Window(tuple(bound for bound, _, _ in buckets[:-1]), tuple(counts), total)

    def _reference(self, key: Key, value: float) -> float:
        known = not (self._first or key in self._unknown)
        return self._before.get(key, 0.0 if known else value)

    def _is_restart(self, page: Page) -> bool:
        if page.started_at is not None and self._started_at is not None:
            return abs(page.started_at - self._started_at) > _RESTART_SECONDS
        fell = kept = 0
        for name, series in page.samples.items():
            if name in page.growing and not name.endswith("_bucket"):
                for key, value in series.items():
                    before = self._last.get(key, 0.0)
                    fell += value < before
                    kept += 0 < before <= value
        return fell > kept


def histograms(page: Page, name: str) -> Iterator[tuple[dict[str, str], Group]]:
    """The series of the histogram *name*: its labels without ``le``, and its samples by suffix."""
    groups: dict[tuple[tuple[str, str], ...], Group] = {}
    for suffix in ("_bucket", "_sum", "_count"):
        for key, value in page.samples.get(name + suffix, {}).items():
            labels = tuple(pair for pair in key[1] if pair[0] != "le")
            groups.setdefault(labels, {}).setdefault(suffix, []).append((key, value))
    for labels, group in groups.items():
        yield dict(labels), group


def totals(page: Page, name: str, count: str) -> Iterator[tuple[dict[str, str], Group]]:
    """The same for an engine that tells a sum (*name*) and how many it is of (*count*) as two counters."""
    counts = {key[1]: (key, value) for key, value in page.samples.get(count, {}).items()}
    for key, value in page.samples.get(name, {}).items():
        if key[1] in counts:
            yield dict(key[1]), {"_sum": [(key, value)], "_count": [counts[key[1]]]}

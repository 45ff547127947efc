"""The engine's metrics endpoint: polled, recognised, and turned into a reading and into increases."""

import asyncio
import contextlib
import logging
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator

from exporter import catalog, refine
from exporter.catalog import Family
from exporter.engines import profile as profiles
from exporter.engines.profile import PageRule, Profile
from exporter.lifecycle import Lifecycle
from exporter.signals import Labels, Reading, Sample
from exporter.sources.fetch import Server, Unreadable
from exporter.sources.flows import Flow, Owed, Presence
from exporter.sources.increases import Group, Increases, histograms, totals
from exporter.sources.page import Key, NotAPage, Page, PageReader, names_of
from exporter.sources.shapes import Ended, Shapes
from exporter.store import OTHER, Store

log = logging.getLogger(__name__)

SOURCE = "metrics"
_LONGEST = 86400.0
_HEALTH_EVERY = 5.0
_ELSEWHERE_EVERY = 30.0
_ELSEWHERE = ("http_404", "not_metrics", "not_recognised")
_LARGE = 1 << 18
_RANKS = 1024
_MAX_LABEL = 128
_BEYOND = 1e18
_FULL = 1.001  # of a share, with what an engine rounds up
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?")


class ScrapeSource:
    """Polls *server* at the profile's path every *tick*; at most one request is under way.

    *profile* None means: find out from the page. *recognised* is called once with what was found.
    """

    def __init__(
        self,
        server: Server,
        profile: Profile | None,
        store: Store,
        lifecycle: Lifecycle,
        *,
        tick: Callable[[], Awaitable[None]],
        clock: Callable[[], float],
        recognised: Callable[[Profile], None] = lambda _: None,
        model: str = "",
    ) -> None:
        self._server = server
        self._store = store
        self._lifecycle = lifecycle
        self._tick = tick
        self._clock = clock
        self._recognised = recognised
        self._model = model
        self.page: Page | None = None
        """The last that was read."""
        self._profile: Profile | None = None
        self._health_at = -_HEALTH_EVERY
        self._elsewhere_at = -_ELSEWHERE_EVERY
        self._path = ""
        self._spared: set[str] = set()
        self._models_served: set[str] = set()
        self._seen: dict[str, set[str]] = defaultdict(set)
        self._odd: set[Key] = set()
        self._state = "-"
        if profile is not None:
            self.use(profile)

    def use(self, profile: Profile) -> None:
        """Read the page by *profile* from here on."""
        if profile is not self._profile:
            self._profile = profile
            self._spared |= {profile.iterations_path} - {""}
            self._reader = PageReader(profile)
            self._increases = Increases()
            self._owed: dict[tuple[int, Labels], Owed] = defaultdict(Owed)
            self._flows: dict[tuple[int, Labels], Flow] = defaultdict(Flow)
            self._presence = Presence()
            self._shapes = Shapes()
            for name, order in profile.order.items():
                family, _, of = name.partition(".")
                signal = catalog.BY_SHORT[family]
                self._store.claims.order((signal, of) if of else signal, order)

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.once()
            await self._tick()

    async def once(self) -> None:
        """One attempt; what goes wrong becomes a failed reading."""
        began = self._clock()
        reason = detail = ""
        samples: tuple[Sample, ...] = ()
        try:
            self.page = page = await self._page()
            healthy = await self._health()
            samples = self._translate(page, healthy)
            if healthy is False:  # what was counted counts, but what it shows is no longer so
                raise Unreadable("unhealthy", f"{self._in_use.health_path} says so, though the page still answers")
            self._tell("", "")
        except Unreadable as error:
            reason, detail, samples = error.reason, error.detail, ()
            if reason != "unhealthy":
                self._lifecycle.silent(refused=reason == "refused")
            self._tell(reason, str(error))
        self._store.publish(
            Reading(
                SOURCE,
                "metrics",
                ok=not reason,
                at=self._store.wall(),
                samples=samples,
                reason=reason,
                seconds=self._clock() - began,
                detail=detail,
            )
        )

    @property
    def path(self) -> str:
        """Where the page is: where it was found, else where it ought to be."""
        return self._path or (self._profile.metrics_path if self._profile else "/metrics")

    # fetching

    async def _page(self) -> Page:
        """The page, from where it was last; now and then also looked for where other engines have theirs."""
        usual = self.path
        try:
            return await self._page_at(usual)
        except Unreadable as error:
            if error.reason not in _ELSEWHERE or self._clock() - self._elsewhere_at < _ELSEWHERE_EVERY:
                raise
            self._elsewhere_at = self._clock()
            for path in profiles.metrics_paths():
                if path not in (usual, *self._spared):
                    with contextlib.suppress(Unreadable):
                        page = await self._page_at(path)
                        self._path = path
                        return page
            raise

    async def _page_at(self, path: str) -> Page:
        text, openmetrics = await self._server.get(path)
        if text[:64].lstrip().startswith("["):  # TensorRT-LLM's records, which are gone once they are read
            self._spared.add(path)
            self._path = next((p for p in profiles.metrics_paths() if p not in self._spared), path)
            raise Unreadable("not_metrics", "the answer is a list of iterations")
        if self._profile is None:
            self.use(self._find(text))
            self._recognised(self._in_use)
        try:
            if len(text) > _LARGE:  # a page of megabytes must not hold up everything else
                page = await asyncio.to_thread(self._reader.read, text, openmetrics=openmetrics)
            else:
                page = self._reader.read(text, openmetrics=openmetrics)
        except NotAPage as error:
            raise Unreadable("not_metrics", str(error)) from None
        if not self._reader.knows(page):
            raise Unreadable(
                "not_recognised", f"the page has no metric of {self._in_use.engine} (a gateway? metrics off?)"
            )
        return page

    def _find(self, text: str) -> Profile:
        names = names_of(text)
        if not names:
            raise Unreadable("not_metrics", "the answer is no metrics page")
        engine = profiles.of_page(names)
        if not engine:
            raise Unreadable("not_recognised", "the page has no metrics of a known engine (a gateway? metrics off?)")
        log.info("engine recognised: engine=%s by=metrics", engine)
        return profiles.bundled(engine)

    @property
    def _in_use(self) -> Profile:
        if self._profile is None:
            raise RuntimeError("no profile in use")
        return self._profile

    async def _health(self) -> bool | None:
        """What /health says, asked now and then only: some engines write a line for each question."""
        path = self._in_use.health_path
        doubtful = self._state == "unhealthy" or self._lifecycle.phase == "dead"
        if not path or (not doubtful and self._clock() - self._health_at < _HEALTH_EVERY):
            return None
        self._health_at = self._clock()
        try:
            await self._server.get(path)
        except Unreadable as error:
            return False if error.reason.startswith("http_5") else None
        return True

    # translating

    def _translate(self, page: Page, healthy: bool | None) -> tuple[Sample, ...]:
        profile, increases = self._in_use, self._increases
        increases.turn(page)
        models = self._models(page)
        if increases.restarted or (self._models_served and self._models_served.isdisjoint(models)):
            self._owed.clear()
            self._flows.clear()
            self._shapes = Shapes()
            log.info("engine restarted: url=%s", self._server.url)
            self._store.keep_models(models)
        self._models_served = set(models) - {""}
        self._shapes.turn(self._clock())
        self._longest = _LONGEST
        if page.started_at is not None:
            self._longest = max(60.0, self._store.wall() - page.started_at)
        self._gauges: dict[tuple[Family, Labels], float] = {}
        self._grouped: dict[str, list[tuple[dict[str, str], Group]]] = {}
        gauges = self._gauges
        moved = False
        for short, rules in sorted(profile.page_rules().items(), key=_turn):
            family = catalog.BY_SHORT[short]
            for rule in rules:
                name = next((n for n in rule.names if page.has(n)), None)
                if name is None:
                    if not rule.optional:
                        gauges[catalog.METRIC_MISSING, (rule.names[0],)] = 1.0
                    elif family in catalog.EVENTS:  # many engines show a counter only once it has counted
                        for model in models if models != [""] or not profile.labels.model else ():
                            self._store.create(family, self._labels(family, rule, {}, model), origin="metrics")
                    continue
                if family.kind == "counter" and name not in page.samples and name + "_total" in page.samples:
                    name += "_total"
                if page.dropped[name]:
                    self._store.drop(family, page.dropped[name])
                if family.kind == "gauge":
                    self._gauge(page, family, rule, name, gauges)
                else:
                    expected = [self._labels(family, rule, {}, model) for model in models]
                    taken = [self._store.expect(family, labels, origin="metrics") for labels in expected]
                    read = self._histogram if family.kind == "histogram" else self._counter
                    read = read if rule.above is None else self._observed_above
                    moved |= read(page, family, rule, name, models[0], told=any(taken))
        self._drop_unknown_reasons(page)
        increases.end()
        self._lifecycle.answered(
            healthy=healthy,
            moved=moved and not profile.health_path,  # a dead engine's server still counts the answers it refuses
            started_at=page.started_at,
            restarted=increases.restarted,
        )
        for what, info in profile.info.items():
            for native, _, _ in _matching(page, info.sample, PageRule(info.sample)):
                self._lifecycle.tell(what, native.get(info.label))
        return tuple(Sample(family, labels, value) for (family, labels), value in gauges.items())

    def _models(self, page: Page) -> list[str]:
        label = self._in_use.labels.model
        found = {
            value: None
            for series in page.samples.values()
            for _, labels in series
            for name, value in labels
            if name == label
        }
        if self._model:
            return [self._model]
        if found:
            self._lifecycle.info["model"] = self._bounded("model", next(iter(found)), self._store.cap)
        return list(found)[: self._store.cap] or [self._lifecycle.info.get("model", "")]

    def _labels(self, family: Family, rule: PageRule, native: dict[str, str], model: str) -> Labels:
        """Our labels for a series of the page; *model* where the series tells none."""
        known = self._in_use.labels
        rank = native.get(known.rank, "0")
        values = {
            "model": self._model or self._bounded("model", native.get(known.model, model), self._store.cap),
            "rank": self._bounded("rank", rank, _RANKS),
            **rule.labels,
        }
        return tuple(values[label] for label in family.labels if label != "source")

    def _bounded(self, label: str, value: str, most: int) -> str:
        """*value*, or ``other`` once there are too many; gauges, too, must not follow whatever a page says."""
        seen = self._seen[label]
        if value not in seen and (len(seen) >= most or len(value) > _MAX_LABEL or not value.isprintable()):
            return OTHER
        seen.add(value)
        return value

    def _gauge(
        self,
        page: Page,
        family: Family,
        rule: PageRule,
        name: str,
        gauges: dict[tuple[Family, Labels], float],
    ) -> None:
        """Series that fall together add up, but shares do not: of those the fullest counts."""
        model = self._lifecycle.info.get("model", "")
        for native, key, number in _matching(page, name, rule):
            value = _gauge_value(page, rule, native, key, number)
            if value is None:
                continue
            if value < 0 or (family is catalog.KV_USAGE and value > _FULL):
                self._store.drop(family)
                continue
            ours = (family, self._labels(family, rule, native, model))
            if family.name.endswith("_ratio") or rule.label_value:
                gauges[ours] = max(gauges.get(ours, 0.0), value)
            else:
                gauges[ours] = gauges.get(ours, 0.0) + value

    def _counter(self, page: Page, family: Family, rule: PageRule, name: str, model: str, *, told: bool) -> bool:
        """Count what grew; not if *told*: until now another source counted the same."""
        grown: dict[Labels, float] = defaultdict(float)
        for native, key, value in _matching(page, name, rule):
            grown[self._labels(family, rule, native, model)] += self._increases.of(key, value)
        moved = any(grown.values())
        less: dict[Labels, float] = defaultdict(float)
        for other in rule.less:
            for native, key, value in _matching(page, other, PageRule(other)):
                less[self._labels(family, rule, native, model)] += self._increases.of(key, value)
        if rule.open:
            self._gone(page, family, rule, model, {k: grown[k] - less[k] for k in grown}, told=told)
            return moved
        for labels, amount in grown.items():
            amount -= self._owed[id(rule), labels].off(less[labels], amount)
            if amount > 0 and not told:
                self._store.count(family, labels, amount * rule.scale, origin="metrics")
        return moved

    def _observed_above(self, page: Page, family: Family, rule: PageRule, name: str, model: str, *, told: bool) -> bool:
        """Count what a histogram of the page observed above the rule's bound."""
        grown: dict[Labels, int] = defaultdict(int)
        for native, group in self._series(page, name):
            window = self._increases.window(group) if _fits(native, rule) else None
            if window is not None:
                above = window.counts[bisect_right(window.bounds, rule.above or 0.0) :]
                grown[self._labels(family, rule, native, model)] += sum(n for n in above if n > 0)
        for labels, amount in grown.items():
            if amount and not told:
                self._store.count(family, labels, amount, origin="metrics")
        return any(grown.values())

    def _drop_unknown_reasons(self, page: Page) -> None:
        """Requests that ended in a way that the profile does not know are counted as that, and said once."""
        for name, known in self._in_use.reasons.items():
            for native, key, value in _matching(page, name, PageRule(name)):
                grown = self._increases.of(key, value)
                if grown > 0 and not _fits(native, PageRule(name, where=known)):
                    self._store.drop(catalog.REQUESTS, round(grown))
                    if key not in self._odd and len(self._odd) < self._store.cap:
                        self._odd.add(key)
                        told = ", ".join(f"{label}={native.get(label, '')[:64]!r}" for label in known)
                        log.warning("requests ended in an unknown way and count as none: metric=%s %s", name, told)

    def _gone(
        self, page: Page, family: Family, rule: PageRule, model: str, net: dict[Labels, float], *, told: bool
    ) -> None:
        """Count who was admitted (*net* of those that finished) and is not open any more."""
        whole = self._presence.whole(page, (*rule.open, *rule.less))
        still: dict[Labels, float] = defaultdict(float)
        for gauge in rule.open:
            for native, _, value in _matching(page, gauge, PageRule(gauge)):
                still[self._labels(family, rule, native, model)] += value
                whole = whole and value >= 0
        for labels, amount in net.items():
            gone = self._flows[id(rule), labels].gone(amount, still[labels] if whole else None)
            if gone and not told:
                self._store.count(family, labels, gone * rule.scale, origin="metrics")

    def _histogram(self, page: Page, family: Family, rule: PageRule, name: str, model: str, *, told: bool) -> bool:
        """Observe what came; not if *told*: until now another source observed the same."""
        moved = False
        for native, group in totals(page, name, rule.count) if rule.count else self._series(page, name):
            if not _fits(native, rule):
                continue
            window = self._increases.window(group)
            if window is None:
                self._store.drop(family)
                continue
            if told or not any((*window.counts, window.sum)):
                continue
            moved = True
            scaled = _scaled(window, rule.scale)
            labels = self._labels(family, rule, native, model)
            engine = self._labels(catalog.RUNNING, rule, native, model)
            running = self._gauges.get((catalog.RUNNING, engine), 0.0)
            ended = self._ended(page, rule, native, scaled)
            placed = self._shapes.place(family, labels, engine[-1], scaled, self._longest, running, ended)
            if placed is None:
                self._store.drop(family, max(1, sum(n for n in window.counts if n > 0)))
                continue
            for value, count in placed:
                self._store.observe(family, labels, value, count, origin="metrics")
        return moved

    def _series(self, page: Page, name: str) -> list[tuple[dict[str, str], Group]]:
        """`histograms`, once a page: what ends with a request asks for two others, for each rank."""
        if name not in self._grouped:
            self._grouped[name] = list(histograms(page, name))
        return self._grouped[name]

    def _ended(self, page: Page, rule: PageRule, native: dict[str, str], window: refine.Window) -> Ended | None:
        """What the page tells beside the *window* of the requests that ended; None without their decode times."""
        latency, decode = (self._beside(page, name, native, rule.scale) for name in (rule.latency, rule.decode))
        if decode is None or not sum(window.counts):
            return None
        if latency is None:
            return Ended(decode)
        return Ended(decode, (latency.sum - decode.sum - window.sum) / sum(window.counts))

    def _beside(self, page: Page, name: str, native: dict[str, str], scale: float) -> refine.Window | None:
        """What came into another histogram of the same labels."""
        group = next((group for told, group in self._series(page, name) if told == native), None) if name else None
        window = None if group is None else self._increases.window(group)
        return None if window is None else _scaled(window, scale)

    def _tell(self, reason: str, detail: str) -> None:
        """Say what has changed; repeats are not worth a line."""
        if reason != self._state:
            self._state = reason
            if reason:
                log.warning("engine not readable: url=%s reason=%s detail=%r", self._server.url, reason, detail)
            else:
                log.info("engine readable: url=%s", self._server.url)


def _turn(rules: tuple[str, object]) -> tuple[bool, bool]:
    """Gauges first and first tokens before other times: how queue waits are spread is taken from both."""
    family = catalog.BY_SHORT[rules[0]]
    return family.kind != "gauge", family is not catalog.FIRST_TOKEN


def _scaled(window: refine.Window, scale: float) -> refine.Window:
    return refine.Window(tuple(bound * scale for bound in window.bounds), window.counts, window.sum * scale)


def _fits(native: dict[str, str], rule: PageRule) -> bool:
    return all(regex.fullmatch(native.get(label, "")) for label, regex in rule.where.items())


def _matching(page: Page, name: str, rule: PageRule) -> Iterator[tuple[dict[str, str], Key, float]]:
    for key, value in page.samples.get(name, {}).items():
        native = dict(key[1])
        if _fits(native, rule):
            yield native, key, value


def _gauge_value(page: Page, rule: PageRule, native: dict[str, str], key: Key, number: float) -> float | None:
    """What one series says by *rule*; None if something it needs is not there, or it would be divided by nothing."""

    def other(name: str) -> float | None:
        return page.samples.get(name, {}).get((name, key[1]))

    value: float | None = number if rule.sample else 1.0
    if rule.label_value:
        value = _label_number(native, rule.label_value)
    times = _label_number(native, rule.times) if rule.label_value else other(rule.times)
    for wanted, factor in ((rule.times, times), (rule.over, 1 / divisor if (divisor := other(rule.over)) else None)):
        if wanted and value is not None:
            value = None if factor is None else value * factor
    if value is None:
        return None
    off = next((less for name in rule.less if (less := other(name)) is not None), 0.0)
    told = rule.scale * (value - off)
    return told if abs(told) < _BEYOND else -1.0


def _label_number(native: dict[str, str], label: str) -> float | None:
    text = native.get(label, "")
    return float(text) if _NUMBER.fullmatch(text) else None

"""The engine: is it known, is its page whole and cheap to read, and what could it tell besides?"""

import math
from collections.abc import Iterator, Sequence
from statistics import median

from exporter import catalog, remedies
from exporter.catalog import Family
from exporter.doctor import logs
from exporter.doctor.findings import NOT_TRIED, Finding, listed, shown, size, unreadable
from exporter.engines import profile as profiles
from exporter.engines.profile import Hint, Profile
from exporter.remedies import plain
from exporter.sidecar import Sidecar
from exporter.sources import scrape
from exporter.sources.page import Page

_SLOW = 0.5  # share of the interval
_NO_PAGE = ("http_404", "http_501", "not_metrics", "not_recognised")
_BY = {"settings": "as the settings say", "metrics": "recognised by its page", "log": "recognised by its log"}


def findings(sidecar: Sidecar, polls: Sequence[float]) -> Iterator[Finding]:
    """*polls* are the seconds that each poll of the page took."""
    profile, life = sidecar.profile, sidecar.lifecycle
    if profile is not None:
        version = f" {shown(life.info['version'])}" if "version" in life.info else ""
        yield Finding("engine", "ok", f"{_title(profile)}{version}, {_BY[sidecar.recognised_by]}")
    elif life.engine:
        yield Finding("engine", "ok", "none that is known; the fields of its log are read")
    elif not life.watched:
        yield Finding("engine", "note", "none is watched", "give --engine-url and --log, unless it is to be GPUs alone")
    else:
        remedy = f"set engine.name (--engine) to one of {', '.join(profiles.names())}, or write a profile"
        yield Finding("engine", "failed", "it is not recognised", remedy)
    if life.engine:
        yield _phase(sidecar)
    yield from _page(sidecar, polls)
    if model := sidecar.config.engine.model or life.info.get("model", ""):
        yield Finding("engine", "ok", f"model {shown(model)}")
    elif life.engine:
        remedy = plain(f"{remedies.MODEL_UNKNOWN.remedy} (`--model`)")
        yield Finding("engine", "warning", "the model's name is not known", remedy)
    yield from _pins(sidecar, model)
    if profile is not None:
        yield from _layout(sidecar, profile)
        for hint in profile.hints:
            if _silent(sidecar, hint):
                unseen = "; no line shows it yet" if hint.patterns else ""
                remedy = f"start {_title(profile)} with {plain(hint.flag)}{unseen}"
                yield Finding("engine", "note", f"could tell: {plain(hint.gives)}", remedy)


def page(sidecar: Sidecar) -> Page | None:
    """Its page, if that could be read at last."""
    reading = sidecar.store.readings.get(scrape.SOURCE)
    return sidecar.scrape.page if sidecar.scrape and reading and reading.ok else None


def told_by(profile: Profile) -> set[Family]:
    """What *profile* can get from page and patterns."""
    signals = {signal.family for pattern in profile.log.patterns for signal in pattern.signals}
    return signals | {catalog.BY_SHORT[short] for short in profile.page_rules()}


def _pins(sidecar: Sidecar, model: str) -> Iterator[Finding]:
    """Baselines that are pinned for an engine other than this one."""
    if not sidecar.lifecycle.engine:
        return
    config = sidecar.lifecycle.config(sidecar.store.gauges())
    for pin in sidecar.pins:
        served = f"model {shown(pin.model)}" if pin.model not in ("", model) else ""
        other = f"config {shown(pin.config)}" if pin.config not in ("", config) else ""
        if served or other:
            text = f"the pin of {pin.signal} P{pin.quantile * 100:g} does not hold: it is for {served or other}"
            here = f"{shown(model)}" if served else config
            yield Finding("engine", "warning", f"{text}, and this is {here}", "measure it again, or take the pin out")


def _title(profile: Profile) -> str:
    return profile.title or profile.engine


def _phase(sidecar: Sidecar) -> Finding:
    phase = sidecar.lifecycle.phase
    if sidecar.lifecycle.up:
        return Finding("engine", "ok", f"it is up, phase {phase}")
    if phase == "dead":
        return Finding("engine", "failed", "it is dead", remedies.PAGE["unhealthy"].remedy)
    remedy = "wait while it loads; without a page it counts as starting until it is seen at work"
    if phase in ("stopping", "serving"):
        remedy = "start it again, if it is to serve"
    return Finding("engine", "note", f"it is not up, phase {phase}", remedy)


def _page(sidecar: Sidecar, polls: Sequence[float]) -> Iterator[Finding]:
    config, reading = sidecar.config, sidecar.store.readings.get(scrape.SOURCE)
    if not config.engine.url:
        remedy = "give --engine-url: the page has exact counts"
        yield Finding("engine", "warning", "no metrics page is read: engine.url is not set", remedy)
        return
    path = sidecar.scrape.path if sidecar.scrape else "/metrics"
    name = shown(config.engine.url.rstrip("/") + path)
    if reading is None:
        yield Finding("engine", "failed", f"{name} was not read", NOT_TRIED)
        return
    if not reading.ok:
        yield unreadable("engine", name, remedies.PAGE, reading.reason, reading.detail)
        if sidecar.profile is None and reading.reason in _NO_PAGE:
            yield _some_have_no_page()
        return
    seconds, read = median(polls or [reading.seconds]), page(sidecar) or Page()
    share = seconds / config.scrape.interval
    text = f"{name} is {size(read.size)}, read in {seconds * 1000:.0f} ms: {share:.1%} of scrape.interval"
    if share > _SLOW:
        yield Finding("engine", "warning", text, plain(remedies.PAGE["timeout"].remedy))
    else:
        yield Finding("engine", "ok", text)
    rules = [rule for rules in sidecar.profile.page_rules().values() for rule in rules] if sidecar.profile else []
    if missing := [name for (name,) in sidecar.store.gauges().get(catalog.METRIC_MISSING, {})]:
        remedy = plain(f"{remedies.METRIC_MISSING.cause}: {remedies.METRIC_MISSING.remedy}")
        yield Finding("engine", "warning", f"missing on its page: {listed(missing)}", remedy)
    elif wanted := len({rule.names for rule in rules if not rule.optional}):
        yield Finding("engine", "ok", f"all {wanted} metrics that its page must have are there")


def _some_have_no_page() -> Finding:
    """Nobody knows which engine it is: it may be one that has no page until it is told to."""
    known = map(profiles.bundled, profiles.names())
    flags = [f"{_title(p)} with {plain(hint.flag)}" for p in known for hint in p.hints if hint.page]
    return Finding("engine", "note", "some engines have no page by themselves", f"start {'; '.join(flags)}")


def _layout(sidecar: Sidecar, profile: Profile) -> Iterator[Finding]:
    """Facts of the start, as far as this engine tells them at all."""
    could, gauges = told_by(profile), sidecar.store.gauges()
    facts = {
        "parallelism": {catalog.PARALLELISM},
        "limits": {catalog.ENGINE_LIMIT},
        "KV cache capacity": {catalog.KV_TOKENS, catalog.KV_BYTES},
    }
    told = {name: any(f in gauges for f in families) for name, families in facts.items() if families & could}
    if any("version" in pattern.info for pattern in profile.log.patterns):
        told["version"] = "version" in sidecar.lifecycle.info
    if known := [name for name, known in told.items() if known]:
        yield Finding("engine", "ok", f"known of its start: {', '.join(known)}")
    if unknown := [name for name, known in told.items() if not known]:
        remedy = "the log tells these where the engine starts: give --log a file that holds its start"
        yield Finding("engine", "note", f"not known of its start: {', '.join(unknown)}", remedy)


def _silent(sidecar: Sidecar, hint: Hint) -> bool:
    """Whether what *hint* is about is not told, as far as can be seen; what cannot be read shows nothing."""
    reading, read = sidecar.store.readings.get(scrape.SOURCE), page(sidecar)
    if hint.page:
        return reading is not None and reading.reason in _NO_PAGE
    if hint.metrics and hint.bucket_below:
        bounds = [bound for name in hint.metrics for bound in _bounds(read or Page(), name)]
        return bool(bounds) and min(bounds) >= hint.bucket_below
    if hint.metrics:
        return read is not None and not any(read.has(name) for name in hint.metrics)
    if hint.patterns:
        seen = logs.matched(sidecar, *(source.source for source in sidecar.logs))
        return logs.readable(sidecar) and seen.keys().isdisjoint(hint.patterns)
    return True


def _bounds(read: Page, name: str) -> Iterator[float]:
    """The finite bounds of a histogram's buckets."""
    for _, labels in read.samples.get(f"{name}_bucket", ()):
        try:
            bound = float(dict(labels).get("le", "inf"))
        except ValueError:
            continue
        if math.isfinite(bound):
            yield bound

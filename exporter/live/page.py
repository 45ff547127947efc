"""The live page as HTML: whole for a browser without JavaScript, in sections for one that renews them.

Both come from here, so they cannot differ: page.js puts the sections of /api/state?sections in place of those that
were served. The style sheet and the script stand in the page, and the Content-Security-Policy allows these two by
their hashes, and nothing else.
"""

import base64
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from exporter import catalog
from exporter.history import STEP_SECONDS
from exporter.judge import FAST, Verdict
from exporter.live import pictures, words
from exporter.live.markup import Html, join, tag
from exporter.live.state import LEVEL_NEEDS, PARTLY, SHOWN_SECONDS, Capacity, Gpu, Source, State
from exporter.live.words import ago, seconds, short_gib

_HERE = Path(__file__).parent
_CSS = (_HERE / "page.css").read_text(encoding="utf-8")
_JS = (_HERE / "page.js").read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


POLICY = (
    f"default-src 'none'; style-src {_hash(_CSS)}; script-src {_hash(_JS)}; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content-Security-Policy of the page."""


def render(state: State) -> str:
    """The whole page."""
    parts = sections(state)
    at = time.strftime("%H:%M:%S", time.gmtime(state.at))
    body = [
        tag(
            "header",
            tag("h1", "Stopline"),
            tag("p", parts["about"], id="about"),
            tag("p", f"as of {at} UTC", id="live"),
        ),
        tag("div", parts["headline"], id="headline", role="status"),
        tag(
            "main",
            tag("section", parts["lines"], id="lines", class_="lines", aria_label="The three stop lines"),
            tag("section", parts["gpus"], id="gpus", class_="card wide", aria_label="Memory of the GPUs"),
            tag(
                "section",
                parts["charts"],
                id="charts",
                class_="charts",
                aria_label="The last quarter of an hour, and capacity",
            ),
            tag("section", parts["rest"], id="rest", class_="rest", aria_label="Engine and sources"),
        ),
        tag(
            "footer",
            tag("a", "Metrics", href="metrics"),
            " · ",
            tag("a", "state as JSON", href="api/state"),
            " · ",
            tag("a", "healthy", href="-/healthy"),
            " · ",
            tag("a", "ready", href="-/ready"),
            f" · version {state.version}",
        ),
        pictures.hatching(),
    ]
    head = [
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'),
        Html('<noscript><meta http-equiv="refresh" content="10"></noscript>'),
        tag("title", title(state)),
        tag("style", Html(_CSS)),
    ]
    script = tag("script", Html(_JS))
    return "<!doctype html>\n" + tag("html", tag("head", *head), tag("body", *body, script), lang="en") + "\n"


def sections(state: State) -> dict[str, Html]:
    """What is renewed, by the id of the element that it is in."""
    return {
        "about": _about(state),
        "headline": _headline(state),
        "lines": join(*(_line(verdict, state) for verdict in state.lines)),
        "gpus": join(*_gpus(state.gpus, state)),
        "charts": join(*_charts(state)),
        "rest": join(_engine(state), _sources(state.sources, state.at)),
    }


def title(state: State) -> str:
    """What the browser's tab says."""
    return f"{_summary(state)[1]} – Stopline"


def answer(state: State, *, with_sections: bool) -> bytes:
    """The answer of /api/state: the state, and if asked for what page.js puts in place."""
    if not with_sections:
        return msgspec.json.encode(state)
    markup = {name: str(section) for name, section in sections(state).items()}
    return msgspec.json.encode(msgspec.to_builtins(state) | {"title": title(state), "sections": markup})


# the parts


def _about(state: State) -> Html:
    engine = state.engine
    if not engine.phase:
        return join("no engine is watched")
    served = (
        f"{engine.model or 'model not known yet'} on {engine.name or 'an engine not recognised yet'} {engine.version}"
    )
    doing = [
        f"{engine.running:g} running" if engine.running is not None else "",
        f"{engine.waiting:g} waiting" if engine.waiting is not None else "",
    ]
    return join(" · ".join(filter(None, [served.strip(), engine.phase, *doing])))


def _summary(state: State) -> tuple[str, str]:
    """The worst state, and a few words for it."""
    by: dict[str, list[str]] = {}
    for verdict in state.lines:
        by.setdefault(verdict.state, []).append(words.LINES[verdict.line].lower())
    blind = f"Cannot be judged: {_all(by['unknown'])}" if "unknown" in by else ""
    for worst, word in (("tripped", "Stop line"), ("rising", "Rising")):
        if worst in by:
            return worst, ". ".join(filter(None, [f"{word}: {_all(by[worst])}", blind]))
    return ("unknown", blind) if blind else ("ok", "Calm: no stop line is near")


def _all(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def _headline(state: State) -> Html:
    worst, text = _summary(state)
    causes = dict.fromkeys(words.CAUSES.get(v.cause, v.cause) for v in state.lines if v.state == worst and v.cause)
    why = [" ", tag("span", "; ".join(causes), class_="why")] if causes else []
    return tag("p", pictures.icon(worst), tag("span", text, *why), class_=f"headline {worst}")


def _line(verdict: Verdict, state: State) -> Html:
    name = words.LINES[verdict.line]
    heading = tag(
        "h2",
        pictures.icon(verdict.state),
        name,
        tag("span", words.STATES[verdict.state], class_="word"),
        id=f"line-{verdict.line}",
    )
    drawn = {"latency": _latency, "errors": _errors, "memory": _memory}[verdict.line](verdict, state)
    shown = (
        verdict.state == "ok" and verdict.unit in ("seconds", "bytes") and verdict.value is not None
    )  # it says it all
    told = [] if shown else [tag("p", verdict.says)]
    if verdict.cause and verdict.state in ("tripped", "rising"):
        told.append(tag("p", f"Cause: {words.CAUSES.get(verdict.cause, verdict.cause)}.", class_="cause"))
    if verdict.remedy:
        told.append(tag("p", tag("b", "What to do: "), verdict.remedy, class_="remedy"))
    if verdict.alert:
        told.append(tag("p", f"Alert, if it stays so: {verdict.alert}", class_="soft"))
    return tag(
        "article",
        heading,
        *drawn,
        *told,
        class_=f"card line-card {verdict.state}",
        aria_labelledby=f"line-{verdict.line}",
    )


def _big(text: str, unit: str) -> Html:
    return tag("p", text, " ", tag("small", unit), class_="big")


def _latency(verdict: Verdict, state: State) -> Iterator[Html]:
    value, line, base = verdict.value, verdict.threshold, verdict.baseline
    if line is None or base is None:
        yield _big(seconds(value) if value is not None else "?", "P99 of five minutes, nothing to compare it with")
        return
    if verdict.state == "unknown":
        yield _big("?", f"of late {value / base:.1f}× the baseline" if value is not None else "not judged")
    elif value is None:
        yield _big("–", "no request within five minutes")
    else:
        yield _big(f"{value / base:.1f}×", "the baseline")
        yield pictures.gauge(
            value,
            line,
            verdict.warning,
            max(1.5 * line, 1.1 * value),
            ("0", f"line {seconds(line)}"),
            f"P99 {seconds(value)} on a scale from 0; the line is at {seconds(line)}",
        )
    yield _numbers(
        ("P99 now", seconds(value)),
        ("baseline", f"{seconds(base)} ({words.BASELINES.get(verdict.baseline_source, '')})"),
        ("line", seconds(line)),
        *([("model", verdict.model)] if verdict.model and verdict.model != state.engine.model else []),
    )


def _errors(verdict: Verdict, state: State) -> Iterator[Html]:
    if verdict.value is None:
        yield _big("?", "errors are not seen")
        return
    known = max(state.past.seconds_ago, default=0.0) + STEP_SECONDS
    yield _big(f"{verdict.value:g}", "within five minutes" if known >= FAST else "since Stopline started")
    total = sum(state.past.errors)
    label = f"Errors of the last 15 minutes: {total:g}"
    yield pictures.bars(state.past.seconds_ago, state.past.errors, STEP_SECONDS, SHOWN_SECONDS, label)
    yield _numbers(("line", "any error"), ("within 15 min" if known >= SHOWN_SECONDS else "in all", f"{total:g}"))


def _memory(verdict: Verdict, state: State) -> Iterator[Html]:
    value, line = verdict.value, verdict.threshold
    if value is None or line is None:
        yield _big("?", "not judged")
        return
    if verdict.state == "unknown":
        told = (
            f"{value:.0%} of the KV cache in use" if verdict.unit == "ratio" else f"{short_gib(value)} free where seen"
        )
        yield _big("?", told)
        return
    if verdict.unit == "ratio":
        yield _big(f"{value:.0%}", "of the KV cache in use")
        yield pictures.gauge(
            value, line, None, 1.0, ("0", f"line {line:.0%}"), f"KV cache {value:.0%} in use; the line is at {line:.0%}"
        )
        return
    grown = max((g.used_bytes - g.plateau_bytes for g in state.gpus if g.used_bytes and g.plateau_bytes), default=None)
    if verdict.cause == "growth" and grown is not None:
        yield _big(short_gib(grown), "more than at rest")
    else:
        yield _big(short_gib(value), "free at the minute's peak")
    gpu = next((g for g in state.gpus if g.gpu == verdict.gpu), None)
    if gpu is not None:
        yield from _room(gpu, value, line)
    room = [g.effective_headroom_bytes for g in state.gpus if g.effective_headroom_bytes is not None]
    rows = [("line", f"{short_gib(line)} free"), ("free", short_gib(value))]
    if grown is not None:
        rows.append(("above rest", short_gib(max(0.0, grown))))
    if room and verdict.state != "tripped":
        rows.append(("effective headroom", short_gib(min(room))))
    if state.engine.kv_usage_ratio is not None:
        rows.append(("KV cache", f"{state.engine.kv_usage_ratio:.0%} in use"))
    yield _numbers(*rows)


def _room(gpu: Gpu, free: float, least: float) -> Iterator[Html]:
    """Where a GPU is below its line: from its resting use on where growth is what trips, else from nothing on."""
    total, used, limit, rest = gpu.total_bytes, gpu.used_bytes, gpu.limit_bytes, gpu.plateau_bytes
    if total is None or used is None or limit is None:
        return
    if rest is not None and rest < limit < total - least:
        grown, line = max(0.0, used - rest), limit - rest
        told = f"GPU {gpu.gpu} uses {short_gib(grown)} more than at rest; the line is at {short_gib(line)} more"
        labels = ("at rest", f"line {short_gib(line)} more")
        yield pictures.gauge(grown, line, 0.75 * line, max(1.5 * line, 1.1 * grown), labels, told)
        return
    told = f"GPU {gpu.gpu} has {short_gib(free)} free of {short_gib(total)}; the line is at {short_gib(limit)} used"
    labels = ("0", f"line {short_gib(limit)} used")
    yield pictures.gauge(total - free, limit, limit - 0.5 * least, total, labels, told)


def _numbers(*rows: tuple[str, str]) -> Html:
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in rows), class_="numbers")


_SEGMENTS = {
    "weights": "weights",
    "kv_used": "KV cache in use",
    "kv_free": "KV cache free",
    "other": "other",
    "free": "free",
}
_MARKS = {"limit": "memory line", "plateau": "resting use", "peak": "peak of the last minute"}


def _gpus(gpus: tuple[Gpu, ...], state: State) -> Iterator[Html]:
    yield tag("h2", "Room on the GPUs")
    if not gpus:
        seen = next((s for s in state.sources if s.source == "gpu"), None)
        why = seen.cause if seen is not None and not seen.ok else "none is read"
        remedy = (
            seen.remedy if seen is not None and seen.remedy else "let Stopline see them: README, three ways to the GPUs"
        )
        yield tag("p", f"Cannot be shown: {why}. What to do: {remedy}.", class_="lost")
        return
    if state.engine.up is False:
        yield tag("p", "The engine is not up: what is free now is not what it leaves free.", class_="lost")
    yield tag("ul", *(_gpu(gpu, up=state.engine.up is not False) for gpu in gpus), class_="gpus")
    legend = [
        tag(
            "li",
            tag(
                "svg",
                tag("rect", width=22, height=14, class_=f"part {name}"),
                tag("rect", width=22, height=14, class_="hatch-kv") if name == "kv_free" else None,
                tag("rect", width=22, height=14, class_="frame"),
                aria_hidden="true",
            ),
            text,
        )
        for name, text in _SEGMENTS.items()
    ]
    legend += [
        tag("li", tag("svg", tag("path", d="M11 0v14", class_=name), aria_hidden="true"), text)
        for name, text in _MARKS.items()
        if name != "plateau" or any(gpu.plateau_bytes is not None for gpu in gpus)
    ]
    yield tag("ul", *legend, class_="legend", aria_label="Legend")


def _gpu(gpu: Gpu, *, up: bool) -> Html:
    """What is free of an engine that is not *up* is no room; and where the line is reached, only that is said."""
    name = tag("h3", f"GPU {gpu.gpu}")
    if gpu.total_bytes is None or gpu.used_bytes is None:
        why = "does not tell its memory" if gpu.up else "does not answer: it is lost, or the driver hangs"
        return tag("li", name, tag("p", f"Cannot be judged: it {why}.", class_="lost"), class_="gpu")
    free = gpu.free_bytes if gpu.free_bytes is not None else gpu.total_bytes - gpu.used_bytes
    reserved = max(0.0, gpu.total_bytes - gpu.used_bytes - free)
    parts = [*(gpu.parts_bytes.items() or [("other", gpu.used_bytes)]), ("reserved", reserved), ("free", free)]
    marks = [("plateau", gpu.plateau_bytes), ("peak", gpu.peak_bytes), ("limit", gpu.limit_bytes)]
    told = [f"{_SEGMENTS.get(part, part)} {short_gib(amount)}" for part, amount in parts if amount]
    told += [f"{_MARKS[mark]} {short_gib(amount)}" for mark, amount in marks if amount is not None]
    room = gpu.effective_headroom_bytes
    if gpu.over_bytes:
        text = tag(
            "span", f"{short_gib(free)} free · ", tag("b", f"{short_gib(gpu.over_bytes)} over its line"), class_="over"
        )
    elif not up:
        text = tag("span", f"{short_gib(gpu.used_bytes)} held while the engine is not up")
    else:
        effective = f" · {short_gib(room)} effective headroom" if room is not None else None
        text = tag("span", tag("b", short_gib(free)), " free", effective)
    picture = pictures.stack(
        parts,
        gpu.total_bytes,
        [(mark, amount) for mark, amount in marks if amount is not None],
        f"GPU {gpu.gpu}, {short_gib(gpu.total_bytes)}: {', '.join(told)}",
    )
    return tag("li", tag("div", name, text, class_="label"), picture, class_="gpu")


def _charts(state: State) -> Iterator[Html]:
    past = state.past
    for name, p50, p99, signal in (
        ("Wait in the queue", past.queue_wait_p50_seconds, past.queue_wait_p99_seconds, "queue_wait"),
        ("Step of the engine", past.step_p50_seconds, past.step_p99_seconds, "step"),
    ):
        last = next((value for value in reversed(p99) if value is not None), None)
        middle = next((value for value in reversed(p50) if value is not None), None)
        pinned = state.pinned.get(signal)
        label = f"{name}, last 15 minutes: P99 now {seconds(last)}, median {seconds(middle)}"
        picture = pictures.lines(
            past.seconds_ago,
            [("p50", p50), ("p99", p99)],
            ("baseline", pinned) if pinned is not None else None,
            SHOWN_SECONDS,
            words.tick,
            label,
        )
        caption = join("P99 ", tag("b", seconds(last)), " (line) · median ", tag("b", seconds(middle)), " (dots)")
        yield _figure(name, picture, caption)
    yield _capacity(state.capacity)


def _figure(name: str, picture: Html, *captions: Html | None) -> Html:
    return tag("figure", tag("h2", name), picture, *(tag("figcaption", c) for c in captions if c), class_="card")


def _capacity(capacity: Capacity) -> Html:
    levels = capacity.levels
    if capacity.first_over:
        between = f"between {capacity.limit} and" if capacity.limit else "below"
        verdict = f"P99 crosses the line {between} {capacity.first_over} requests at once"
    elif capacity.limit:
        requests = "request" if capacity.limit == "1" else "requests at once"
        verdict = f"Under the line up to {capacity.limit} {requests}, as far as seen"
    elif levels and capacity.line_seconds is None:
        verdict = "Without a baseline there is no line"
    else:
        verdict = f"A level counts from {LEVEL_NEEDS} requests on"
    picture = pictures.curve(
        [level.concurrency for level in levels],
        [level.p99_seconds for level in levels],
        [level.tokens_per_second for level in levels],
        [level.counts for level in levels],
        capacity.line_seconds,
        capacity.first_over,
        words.tick,
        f"P99 and throughput by requests in the engine. {verdict}.",
    )
    caption = join(tag("b", verdict), ". P99 (line; hollow: few requests) and tokens a second (bars).")
    return _figure("Capacity: by requests at once", picture, caption, _levels(capacity) if levels else None)


def _levels(capacity: Capacity) -> Html:
    rows = [
        tag(
            "tr",
            tag("th", level.concurrency, scope="row"),
            tag("td", f"{level.requests:,}"),
            tag("td", seconds(level.p99_seconds)),
            tag("td", "–" if level.tokens_per_second is None else f"{level.tokens_per_second:,.0f}"),
        )
        for level in capacity.levels
    ]
    heads = [tag("th", text, scope="col") for text in ("at once", "requests", "P99", "tokens/s")]
    table = tag("table", tag("thead", tag("tr", *heads)), tag("tbody", *rows))
    return tag("details", tag("summary", "As a table", id="levels-summary"), table, id="levels")


def _engine(state: State) -> Html:
    engine = state.engine
    if not engine.phase:
        watch = "None is watched: neither engine.url, nor log.paths, nor traces.listen_address is set."
        return tag("div", tag("h2", "Engine"), tag("p", watch), class_="card")
    phases = [
        tag("li", phase, class_=phase, aria_current="step" if phase == engine.phase else None)
        for phase in catalog.PHASES
    ]
    up = "answers" if engine.up else "does not answer as a server that serves"
    facts = [
        ("Engine", f"{engine.name or 'not recognised yet'} {engine.version}".strip()),
        ("Model", engine.model or "not known yet"),
        ("Now", up),
    ]
    if engine.started_at is not None:
        facts.append(("Started", f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(engine.started_at))} UTC"))
    facts += [*engine.facts, *([("Configuration", engine.config)] if engine.config else [])]
    listed = [item for name, value in facts for item in (tag("dt", name), tag("dd", value))]
    return tag(
        "div",
        tag("h2", "Engine"),
        tag("ol", *phases, class_="phases", aria_label="Phase"),
        tag("dl", *listed, class_="facts"),
        class_="card",
    )


def _sources(sources: tuple[Source, ...], at: float) -> Html:
    return tag(
        "div", tag("h2", "What is read"), tag("ul", *(_source(s, at) for s in sources), class_="sources"), class_="card"
    )


def _source(source: Source, at: float) -> Html:
    if source.ok:
        return tag("li", pictures.icon("ok"), tag("div", tag("b", source.source), " is read"), class_="ok")
    since = f" Last read {ago(at - source.last_success)}." if source.last_success is not None else ""
    why = f" is read, but {source.cause}." if source.reason == PARTLY else f" cannot be read: {source.cause}.{since}"
    remedy = tag("p", tag("b", "What to do: "), f"{source.remedy}.", class_="remedy") if source.remedy else None
    return tag("li", pictures.icon("unknown"), tag("div", tag("b", source.source), why, remedy), class_="unknown")

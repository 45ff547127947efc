"""Which of the three stop lines can be judged with what the sources tell, and from what."""

from collections.abc import Iterator

from exporter import catalog
from exporter.doctor import engine, logs
from exporter.doctor.findings import Verdict
from exporter.sidecar import Sidecar
from exporter.sources import scrape


def of(sidecar: Sidecar, *, scraped: bool) -> Iterator[Verdict]:
    """Each line; none can be judged by a Prometheus that was not seen to have the page (*scraped*)."""
    for verdict in (_latency(sidecar), _errors(sidecar), _memory(sidecar)):
        yield verdict if scraped else Verdict(verdict.line, False, "Prometheus was not seen to have the page")


def _latency(sidecar: Sidecar) -> Verdict:
    sources = {labels[-1] for labels in sidecar.store.histograms.get(catalog.LATENCY, {})}
    patterns = sidecar.config.log.patterns
    if sidecar.profile is not None:
        patterns += sidecar.profile.log.patterns
    if "log" in sources and logs.readable(sidecar):
        return Verdict("latency", True, "from the log")
    if "metrics" in sources and engine.page(sidecar):
        return Verdict("latency", True, "from the page")
    if logs.readable(sidecar) and any(s.family is catalog.LATENCY for p in patterns for s in p.signals):
        return Verdict("latency", True, "from the log, once a request has finished")
    return Verdict("latency", False, _neither(sidecar, "how long a request takes"))


def _errors(sidecar: Sidecar) -> Verdict:
    known, page = sidecar.profile, engine.page(sidecar)
    rules = known.page_rules().get(catalog.ERRORS.short, ()) if known else ()
    counted = page is not None and any(page.has(name) for rule in rules for name in rule.names)
    if logs.readable(sidecar) and sidecar.lifecycle.engine and logs.understood(sidecar):
        return Verdict("errors", True, "from the log and the page" if counted else "from the log")
    if counted:
        return Verdict("errors", True, "from the page alone, which has answers with 5xx and no crash")
    if logs.readable(sidecar) and not sidecar.lifecycle.engine:
        return Verdict("errors", False, "it is not known which engine writes the log")
    if logs.readable(sidecar):
        return Verdict("errors", False, "no line of the log is understood, so it may be that of something else")
    return Verdict("errors", False, _neither(sidecar, "of errors"))


def _memory(sidecar: Sidecar) -> Verdict:
    gauges = sidecar.store.gauges()
    inputs = {"free memory of the GPUs": catalog.GPU_HEADROOM, "use of the KV cache": catalog.KV_USAGE}
    if told := [name for name, family in inputs.items() if gauges.get(family)]:
        return Verdict("memory", True, f"from the {' and the '.join(told)}")
    return Verdict("memory", False, f"no GPU is read, {_neither(sidecar, 'how full the KV cache is')}")


def _neither(sidecar: Sidecar, what: str) -> str:
    """Why neither page nor log tells *what*."""
    reading = sidecar.store.readings.get(scrape.SOURCE)
    if not sidecar.config.engine.url:
        page = "no page is read"
    elif engine.page(sidecar) is None:
        page = f"the page cannot be read ({reading.reason if reading else 'not in time'})"
    else:
        page = f"the page does not tell {what}"
    if not sidecar.logs:
        return f"{page} and no log is followed"
    if not logs.readable(sidecar):
        return f"{page} and no log can be read"
    return f"{page} and no line tells {what}"

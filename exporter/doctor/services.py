"""What Prometheus and Grafana know of Stopline, asked through their HTTP APIs.

Prometheus: /api/v1/query, /targets and /rules (stable since 2.x). Grafana: /api/health and /api/search.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import aiohttp
import msgspec

from exporter import remedies
from exporter.config import WebConfig
from exporter.doctor.findings import Finding, listed, shown, unreadable
from exporter.sources.fetch import Access, Server, Unreadable
from exporter.sources.page import START_TIME

_T = TypeVar("_T")
_DEADLINE = 5.0  # seconds
_LARGEST = 64 << 20  # bytes; what is told of thousands of targets
_EVERY = 15.0  # seconds between scrapes, as the README's scrape config has it
_DURATION = re.compile(r"(\d+)(ms|[smhdwy])")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "y": 31536000.0}
_SAME_START = 0.001  # seconds; process_start_time_seconds has a hundredth
_ALERTS = (
    "StoplineLatencyDoubled",
    "StoplineLatencyRising",
    "StoplineErrorsAppeared",
    "StoplineErrorRateHigh",
    "StoplineEngineFailed",
    "StoplineEngineStalled",
    "StoplineMemoryNearLimit",
    "StoplineKvCachePressure",
    "StoplineExpertImbalance",
    "StoplineCommunicationBound",
    "StoplineSidecarDown",
    "StoplineEngineUnreachable",
    "StoplineLogSilent",
    "StoplineGpuUnreadable",
    "StoplineBaselineMissing",
    "StoplineInputMissing",
)
_STARTS = "process_start_time_seconds and on (job, instance) stopline_build_info"
_BASELINE = "stopline:request_latency_seconds:p99_baseline"
_TOLD = 5  # targets
_SCRAPE = "add the job of the README's scrape config; an operator wants a PodMonitor that it selects"
_RULES = "load deploy/rules/*.yaml, or apply deploy/rules/kubernetes/prometheusrule.yaml (README: alerts)"
_FAILING = "correct the rule; promtool check rules and its last error say where"
_BOARDS = "import grafana/dashboards/*.json, or have them provisioned (README: Boards)"


@dataclass(frozen=True, slots=True)
class Service:
    """A Prometheus or a Grafana: its base address, a file with a token for it, seconds until it must answer."""

    url: str
    token_file: Path | None = None
    deadline: float = _DEADLINE

    def server(self, session: aiohttp.ClientSession) -> Server:
        access = Access(timeout=self.deadline, max_bytes=_LARGEST, token_file=self.token_file)
        return Server(self.url.rstrip("/"), session, access)


class _Target(msgspec.Struct, rename="camel"):
    labels: dict[str, str]
    scrape_url: str
    health: str
    last_error: str = ""
    scrape_interval: str = ""

    def serves(self, series: list["_Series"]) -> bool:
        """Whether one of *series* came from this target."""
        return any(self.labels.items() <= s.metric.items() for s in series)

    def may_serve(self, port: str) -> bool:
        """Whether it may be a Stopline at *port* that is not up."""
        named = "stopline" in self.labels.get("job", "").lower() or f":{port}/" in self.scrape_url
        return named and self.health != "up"


class _Targets(msgspec.Struct, rename="camel"):
    active_targets: list[_Target]


class _Series(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _Vector(msgspec.Struct):
    result: list[_Series]


class _Rule(msgspec.Struct, rename="camel"):
    name: str
    health: str = ""
    last_error: str = ""


class _RuleGroup(msgspec.Struct):
    rules: list[_Rule]


class _RuleGroups(msgspec.Struct):
    groups: list[_RuleGroup]


class _Answer(msgspec.Struct):
    """What Prometheus wraps its answers in."""

    data: msgspec.Raw


class _Health(msgspec.Struct):
    database: str
    version: str = ""


class _Board(msgspec.Struct):
    title: str
    type: str


async def prometheus(service: Service, session: aiohttp.ClientSession, web: WebConfig) -> tuple[list[Finding], bool]:
    """What a Prometheus has of the Stopline that answers at *web*, and whether it scrapes it.

    If none answers there, any target that serves Stopline's page counts.
    """
    server = service.server(session)
    try:
        served = await _query(server, "last_over_time(stopline_build_info[1h])")
        starts = await _query(server, _STARTS)
        targets = (await _data(server, "/api/v1/targets?state=active", _Targets)).active_targets
        groups = (await _data(server, "/api/v1/rules", _RuleGroups)).groups
    except Unreadable as error:
        return [_unreadable("prometheus", "Prometheus", server, error)], False
    own = _own(session, web)
    port = own.url.rpartition(":")[2]
    targets = [target for target in targets if target.serves(served) or target.may_serve(port)]
    findings, scraped = await _scraped(targets, starts, own)
    return findings + _rules([rule for group in groups for rule in group.rules]), scraped


async def grafana(service: Service, session: aiohttp.ClientSession) -> list[Finding]:
    """What a Grafana has of Stopline."""
    server = service.server(session)
    try:
        health = await _get(server, "/api/health", _Health)
        found = await _get(server, "/api/search?query=Stopline", list[_Board])
    except Unreadable as error:
        return [_unreadable("grafana", "Grafana", server, error)]
    text = f"Grafana {shown(health.version)} answers, database {shown(health.database)}"
    answers = Finding("grafana", "ok", text)
    if boards := [board.title for board in found if board.type == "dash-db"]:
        return [answers, Finding("grafana", "ok", f"boards: {listed(boards)}")]
    return [answers, Finding("grafana", "warning", "no board has Stopline in its title", _BOARDS)]


async def _scraped(targets: list[_Target], starts: list[_Series], own: Server) -> tuple[list[Finding], bool]:
    """Which of *targets* is this Stopline, known by when its process started, and whether it is up."""
    findings = []
    try:
        started_at = _started_at((await own.get("/metrics"))[0])
    except Unreadable:
        started_at = None
    if started_at is None:
        text = f"no stopline run answers at {own.url}, so its target cannot be told from those of others"
        findings.append(Finding("prometheus", "note", text, "start stopline run, then ask again"))
        chosen = targets
    else:
        this = [series for series in starts if abs(_number(series.value[1]) - started_at) < _SAME_START]
        chosen = [target for target in targets if target.serves(this)]
    if not any(target.health == "up" for target in chosen):
        others = sum(target.health == "up" for target in targets)
        text = (
            f"no target serves the page of this Stopline{f', though {others} serve those of others' if others else ''}"
        )
        chosen = [target for target in targets if target.health != "up"]
        remedy = "one of these may be meant for it" if chosen else _SCRAPE
        return [*findings, Finding("prometheus", "failed", text, remedy), *map(_told, chosen[:_TOLD])], False
    return [*findings, *map(_told, chosen[:_TOLD])], True


def _own(session: aiohttp.ClientSession, web: WebConfig) -> Server:
    """The ``stopline run`` that the settings describe."""
    host, port = web.host_port()
    host = {None: "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return Server(f"http://{f'[{host}]' if ':' in str(host) else host}:{port}", session, Access(timeout=_DEADLINE))


def _started_at(page: str) -> float | None:
    """Unix time at which the process behind *page* started; None if the page is not one of ours."""
    found = re.search(rf"(?m)^{START_TIME} (\d\S*)$", page)
    return _number(found[1]) if found and "\nstopline_build_info{" in page else None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _told(target: _Target) -> Finding:
    name = f"target {shown(target.scrape_url)}, job {shown(target.labels.get('job', ''))},"
    if target.health == "down":
        remedy = "start stopline run there; let Prometheus reach its port (listen address, network policy)"
        return Finding("prometheus", "failed", f"{name} is down: {shown(target.last_error)}", remedy)
    if target.health != "up":
        return Finding("prometheus", "note", f"{name} has not been scraped yet", "ask again in a minute")
    every = f"{name} is up" + (f", scraped every {shown(target.scrape_interval)}" if target.scrape_interval else "")
    if _seconds(target.scrape_interval) > _EVERY:
        remedy = "set scrape_interval: 15s for this job; a stop line is seen late, and rates rest on few points"
        return Finding("prometheus", "warning", every, remedy)
    return Finding("prometheus", "ok", every)


def _rules(rules: list[_Rule]) -> list[Finding]:
    alerts = {rule.name for rule in rules if rule.name.startswith("Stopline")}
    if not alerts:
        return [Finding("prometheus", "warning", "no alert rule Stopline… is loaded: nothing judges the lines", _RULES)]
    findings = [Finding("prometheus", "ok", f"alert rules: {listed(sorted(alerts))}")]
    if missing := [name for name in _ALERTS if name not in alerts]:
        findings.append(Finding("prometheus", "warning", f"alert rules not loaded: {listed(missing)}", _RULES))
    if _BASELINE not in {rule.name for rule in rules}:
        text = f"no rule records {_BASELINE}: the latency line has nothing to compare with"
        findings.append(Finding("prometheus", "warning", text, _RULES))
    failing = [f"{r.name}: {r.last_error}" for r in rules if r.health == "err" and _ours(r.name)]
    return findings + [Finding("prometheus", "failed", f"rule {shown(text)}", _FAILING) for text in failing[:_TOLD]]


def _ours(rule: str) -> bool:
    return rule.startswith(("Stopline", "stopline:"))


def _seconds(duration: str) -> float:
    """Seconds in a duration as Prometheus writes it (1m30s); 0 if that is not told."""
    return sum(int(number) * _SECONDS[unit] for number, unit in _DURATION.findall(duration))


# asking


async def _query(server: Server, expression: str) -> list[_Series]:
    return (await _data(server, f"/api/v1/query?query={expression}", _Vector)).result


async def _data(server: Server, path: str, kind: type[_T]) -> _T:
    """What an answer of Prometheus holds. Raises Unreadable."""
    return _decode((await _get(server, path, _Answer)).data, kind)


async def _get(server: Server, path: str, kind: type[_T]) -> _T:
    """An answer in JSON. Raises Unreadable."""
    return _decode((await server.get(path))[0], kind)


def _decode(text: str | msgspec.Raw, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Unreadable("not_its_api", str(error)) from None


def _unreadable(group: Literal["prometheus", "grafana"], what: str, server: Server, error: Unreadable) -> Finding:
    return unreadable(group, f"{what} at {shown(server.url)}", remedies.SERVICE, error.reason, error.detail)

"""What is said of Prometheus and Grafana: a real Prometheus, and answers in the form of both APIs."""

import asyncio
import json
import shutil
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from realengine import free_port
from test_prometheus import eventually, query

from exporter import remedies
from exporter.config import Config, EngineConfig, GpuConfig, WebConfig
from exporter.doctor import services
from exporter.doctor.examine import examine
from exporter.doctor.findings import Finding
from exporter.doctor.services import Service
from exporter.sidecar import Sidecar

START = 1796100000.12
PAGE = f'# TYPE stopline_build_info gauge\nstopline_build_info{{version="0.1.0"}} 1.0\nprocess_start_time_seconds {START!r}\n'
NO_RULES = Finding(
    "prometheus",
    "warning",
    "no alert rule Stopline… is loaded: nothing judges the lines",
    "load deploy/rules/*.yaml, or apply deploy/rules/kubernetes/prometheusrule.yaml (README: alerts)",
)
SCRAPE = "add the job of the README's scrape config; an operator wants a PodMonitor that it selects"
REACH = "start stopline run there; let Prometheus reach its port (listen address, network policy)"


class Api:
    """A server that answers each path with a status and a body; notes the headers of the last request."""

    def __init__(self, answers: dict[str, Any], *, status: int = 200) -> None:
        self.headers: Any = {}
        self._answers, self._status = answers, status
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._server = TestServer(app)

    async def _answer(self, request: web.Request) -> web.Response:
        self.headers = request.headers
        asked = request.query.get("query", "")
        answer = self._answers.get(asked if asked in self._answers else request.path, self._answers.get("*", "no page"))
        text = answer if isinstance(answer, str) else json.dumps(answer)
        return web.Response(status=self._status, text=text)

    async def __aenter__(self) -> str:
        await self._server.start_server()
        return str(self._server.make_url("/"))

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()


def success(data: Any) -> dict[str, Any]:
    return {"status": "success", "data": data}


def target(instance: str, health: str = "up", *, job: str = "stopline", interval: str = "15s", error: str = "") -> dict:
    """One of /api/v1/targets, as Prometheus 2.42 writes it."""
    return {
        "discoveredLabels": {"__address__": instance, "__metrics_path__": "/metrics", "__scheme__": "http", "job": job},
        "labels": {"instance": instance, "job": job},
        "scrapePool": job,
        "scrapeUrl": f"http://{instance}/metrics",
        "globalUrl": f"http://{instance}/metrics",
        "lastError": error,
        "lastScrape": "2026-11-30T10:00:00.529202794Z",
        "lastScrapeDuration": 0.014675125,
        "health": health,
        "scrapeInterval": interval,
        "scrapeTimeout": "10s",
    }


def prometheus(*targets: dict, starts: dict[str, float] | None = None, rules: list[dict] | None = None) -> Api:
    """A Prometheus with these targets, of which *starts* gives those that were scraped, by instance."""
    jobs = {t["labels"]["instance"]: t["labels"]["job"] for t in targets}
    series = [({"instance": i, "job": jobs[i]}, str(start)) for i, start in (starts or {}).items()]

    def vector(values: list[tuple[dict[str, str], str]]) -> dict[str, Any]:
        result = [{"metric": labels, "value": [1796100100.0, value]} for labels, value in values]
        return success({"resultType": "vector", "result": result})

    groups = [{"name": "stopline", "file": "/etc/rules.yml", "interval": 30, "rules": rules or []}]
    return Api(
        {
            "/api/v1/targets": success({"activeTargets": targets, "droppedTargets": []}),
            "/api/v1/rules": success({"groups": groups}),
            services._STARTS: vector(series),
            "last_over_time(stopline_build_info[1h])": vector(
                [(labels | {"version": "0.1.0"}, "1") for labels, _ in series]
            ),
        }
    )


async def ask(api: Api, own: str = PAGE) -> tuple[list[Finding], bool]:
    """What is said of *api* beside a Stopline whose page is *own*; PORT in the findings is where that answers."""
    async with api as url, Api({"/metrics": own}) as beside, aiohttp.ClientSession() as session:
        address = beside.removeprefix("http://").rstrip("/")
        findings, scraped = await services.prometheus(Service(url), session, WebConfig(listen_address=address))
    port = address.rpartition(":")[2]
    return [Finding(f.group, f.status, f.finding.replace(f":{port}", ":PORT"), f.remedy) for f in findings], scraped


# targets


async def test_of_several_that_serve_the_page_its_own_is_told() -> None:
    api = prometheus(
        target("10.0.0.1:10777"),
        target("10.0.0.2:10777"),
        target("10.0.0.3:9100", job="node"),
        starts={"10.0.0.1:10777": START - 0.01, "10.0.0.2:10777": START, "10.0.0.3:9100": START},
    )
    assert await ask(api) == (
        [
            Finding("prometheus", "ok", "target http://10.0.0.2:10777/metrics, job stopline, is up, scraped every 15s"),
            Finding("prometheus", "ok", "target http://10.0.0.3:9100/metrics, job node, is up, scraped every 15s"),
            NO_RULES,
        ],
        True,
    )


@pytest.mark.parametrize(
    ("every", "status"), [("15s", "ok"), ("1m", "warning"), ("1m30s", "warning"), ("500ms", "ok"), ("", "ok")]
)
async def test_a_target_that_is_scraped_too_rarely(every: str, status: str) -> None:
    findings, scraped = await ask(prometheus(target("a:1", interval=every), starts={"a:1": START}))
    remedy = "set scrape_interval: 15s for this job; a stop line is seen late, and rates rest on few points"
    text = "target http://a:1/metrics, job stopline, is up" + (f", scraped every {every}" if every else "")
    assert findings[0] == Finding("prometheus", status, text, remedy if status == "warning" else "")
    assert scraped


async def test_no_target_at_all_and_targets_of_others() -> None:
    missing = Finding("prometheus", "failed", "no target serves the page of this Stopline", SCRAPE)
    assert await ask(prometheus()) == ([missing, NO_RULES], False)
    assert await ask(prometheus(target("node:9100", job="node"))) == ([missing, NO_RULES], False)
    others = prometheus(target("a:10777"), target("b:1"), starts={"a:10777": START - 60, "b:1": START + 60})
    text = "no target serves the page of this Stopline, though 2 serve those of others"
    assert await ask(others) == ([Finding("prometheus", "failed", text, SCRAPE), NO_RULES], False)


async def test_a_target_that_is_down_or_was_not_scraped_yet() -> None:
    """Known by its port: a page that was never read cannot tell which it is."""
    async with Api({"/metrics": PAGE}) as beside, aiohttp.ClientSession() as session:
        address = beside.removeprefix("http://").rstrip("/")
        down = target(address, "down", job="llm", error='Get "http://x": dial tcp: \x1b[2Jconnection refused')
        told = {}
        for state in (down, target(address, "unknown", job="llm")):
            async with prometheus(state, target("b:10777"), starts={"b:10777": START + 60}) as url:
                web = WebConfig(listen_address=address)
                told[state["health"]] = await services.prometheus(Service(url), session, web)
    text = "no target serves the page of this Stopline, though 1 serve those of others"
    none = Finding("prometheus", "failed", text, "one of these may be meant for it")
    text = f'target http://{address}/metrics, job llm, is down: Get "http://x": dial tcp: ·[2Jconnection refused'
    assert told["down"] == ([none, Finding("prometheus", "failed", text, REACH), NO_RULES], False)
    text = f"target http://{address}/metrics, job llm, has not been scraped yet"
    assert told["unknown"] == ([none, Finding("prometheus", "note", text, "ask again in a minute"), NO_RULES], False)


@pytest.mark.parametrize(
    "own", ["", "process_start_time_seconds 5\n", "x\nstopline_build_info{} 1\nprocess_start_time_seconds x\n"]
)
async def test_without_a_page_of_its_own_any_target_counts(own: str) -> None:
    targets = [target(f"10.0.0.{n}:10777") for n in range(7)]
    findings, scraped = await ask(prometheus(*targets, starts={t["labels"]["instance"]: START for t in targets}), own)
    text = "no stopline run answers at http://127.0.0.1:PORT, so its target cannot be told from those of others"
    assert findings[0] == Finding("prometheus", "note", text, "start stopline run, then ask again")
    shown = [f"target http://10.0.0.{n}:10777/metrics, job stopline, is up, scraped every 15s" for n in range(5)]
    assert [f.finding for f in findings[1:-1]] == shown
    assert scraped


@pytest.mark.parametrize(
    ("listens", "asked"),
    [
        (":10777", "http://127.0.0.1:10777"),
        ("0.0.0.0:1", "http://127.0.0.1:1"),
        ("[::]:1", "http://[::1]:1"),
        ("[fd00::7]:1", "http://[fd00::7]:1"),
        ("10.0.0.1:1", "http://10.0.0.1:1"),
    ],
)
def test_its_own_page_is_where_it_listens(listens: str, asked: str) -> None:
    assert services._own(None, WebConfig(listen_address=listens)).url == asked


# rules


def rule(name: str, health: str = "ok", error: str = "") -> dict[str, Any]:
    """One of /api/v1/rules, as Prometheus 2.42 writes it."""
    return {
        "state": "inactive",
        "name": name,
        "query": "vector(1) > 2",
        "duration": 0,
        "keepFiringFor": 0,
        "labels": {},
        "annotations": {},
        "alerts": [],
        "health": health,
        "lastError": error,
        "evaluationTime": 0.0001,
        "lastEvaluation": "2026-11-30T10:00:00Z",
        "type": "alerting",
    }


async def test_all_rules_some_and_one_that_fails() -> None:
    async def told(*rules: dict) -> list[Finding]:
        return (await ask(prometheus(target("a:1"), starts={"a:1": START}, rules=list(rules))))[0][1:]

    every = [rule(name) for name in services._ALERTS]
    baseline = {"name": services._BASELINE, "query": "vector(1)", "health": "ok", "type": "recording"}
    eight = (
        "StoplineBaselineMissing, StoplineCommunicationBound, StoplineEngineFailed, StoplineEngineStalled, "
        "StoplineEngineUnreachable, StoplineErrorRateHigh, StoplineErrorsAppeared, StoplineExpertImbalance and 8 more"
    )
    loaded = Finding("prometheus", "ok", f"alert rules: {eight}")
    assert await told(*every, baseline) == [loaded]
    no_baseline = Finding(
        "prometheus",
        "warning",
        "no rule records stopline:request_latency_seconds:p99_baseline: the latency line has nothing to compare with",
        NO_RULES.remedy,
    )
    assert await told(*every) == [loaded, no_baseline]
    lacks = "alert rules not loaded: StoplineLatencyDoubled, StoplineLatencyRising"
    some = [f for f in await told(*every[2:], baseline) if f.status == "warning"]
    assert some == [Finding("prometheus", "warning", lacks, NO_RULES.remedy)]
    failing = rule("StoplineSidecarDown", "err", "found duplicate series\x07")
    assert await told(*every, baseline, failing, rule("Other", "err")) == [
        loaded,
        Finding(
            "prometheus",
            "failed",
            "rule StoplineSidecarDown: found duplicate series·",
            "correct the rule; promtool check rules and its last error say where",
        ),
    ]


# answers that are none


_FIRST = {"prometheus": "v1/query?query=last_over_time(stopline_build_info[1h])", "grafana": "health"}


@pytest.mark.parametrize("what", _FIRST)
@pytest.mark.parametrize(
    ("status", "answer", "reason", "detail"),
    [
        (401, {"message": "Unauthorized"}, "http_401", "{url}/api/{first}"),
        (404, "404 page not found", "http_404", "{url}/api/{first}"),
        (200, "<!DOCTYPE html>", "not_its_api", "JSON is malformed: invalid character (byte 0)"),
        (200, [], "not_its_api", "Expected `object`, got `array`"),
        (200, {"status": "error"}, "not_its_api", "Object missing required field `{field}`"),
        (200, '{"x":' + "[" * 100_000, "not_its_api", "maximum recursion depth exceeded"),
    ],
)
async def test_what_does_not_answer_as_it_should(what: str, status: int, answer: Any, reason: str, detail: str) -> None:
    async with Api({"*": answer}, status=status) as url, aiohttp.ClientSession() as session:
        (found,) = await said(what, Service(url), session)
    advice, url = remedies.of(remedies.SERVICE, reason), url.rstrip("/")
    field = {"prometheus": "data", "grafana": "database"}[what]
    more = detail.format(url=url, first=_FIRST[what], field=field)
    text = f"{what.capitalize()} at {url} cannot be read: {reason}, {remedies.plain(advice.cause)} ({more}"
    assert found.finding.startswith(text)
    assert (found.group, found.status, found.remedy) == (what, "failed", remedies.plain(advice.remedy))


async def test_an_answer_of_another_shape_within() -> None:
    api = prometheus()
    api._answers["/api/v1/rules"] = success({"groups": [{"rules": [{"title": "no name"}]}]})
    ((found,), scraped) = await ask(api)
    assert not scraped
    assert found.finding.endswith("(Object missing required field `name` - at `$.groups[0].rules[0]`)")


async def said(what: str, service: Service, session: aiohttp.ClientSession) -> list[Finding]:
    if what == "grafana":
        return await services.grafana(service, session)
    findings, scraped = await services.prometheus(service, session, WebConfig())
    assert not scraped
    return findings


async def test_nobody_listens_nobody_answers_and_a_token_that_is_not_there() -> None:
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{free_port()}"
        (down,) = await services.grafana(Service(f"http://user:secret@{url.removeprefix('http://')}"), session)
        assert down.finding == f"Grafana at {url} cannot be read: refused, nothing listens there"
        with socket.socket() as hanging:
            hanging.bind(("127.0.0.1", 0))
            hanging.listen()
            address = f"http://127.0.0.1:{hanging.getsockname()[1]}"
            (late,) = await services.grafana(Service(address, deadline=0.1), session)
        assert late.finding == (
            f"Grafana at {address} cannot be read: timeout, no answer within five seconds (no answer in 0.1 s)"
        )
        (no_token,) = await services.grafana(Service(url, Path("/nowhere/token")), session)
        assert no_token.finding == (
            f"Grafana at {url} cannot be read: credentials, the token file cannot be read "
            "(/nowhere/token: No such file or directory)"
        )


# Grafana


GRAFANA = {"commit": "03f502a94d", "database": "ok", "version": "10.4.2"}


def board(title: str, kind: str = "dash-db") -> dict[str, Any]:
    """One of /api/search, as Grafana 10 writes it."""
    return {
        "id": 7,
        "uid": "cIBgcSjkk",
        "title": title,
        "uri": "db/stopline",
        "url": "/d/cIBgcSjkk/stopline",
        "slug": "",
        "type": kind,
        "tags": ["stopline"],
        "isStarred": False,
        "sortMeta": 0,
    }


async def test_the_boards_that_grafana_has(tmp_path: Path) -> None:
    answers = Finding("grafana", "ok", "Grafana 10.4.2 answers, database ok")
    (tmp_path / "token").write_text("glsa_x\n")
    found = [board("Stopline: latency"), board("Stopline", "dash-folder"), board("Stop\x1b[2Jline")]
    api = Api({"/api/health": GRAFANA, "/api/search": found})
    async with api as url, aiohttp.ClientSession() as session:
        service = Service(url, tmp_path / "token")
        boards = Finding("grafana", "ok", "boards: Stopline: latency, Stop·[2Jline")
        assert await services.grafana(service, session) == [answers, boards]
    assert api.headers["Authorization"] == "Bearer glsa_x"


async def test_a_grafana_without_boards() -> None:
    api = Api({"/api/health": GRAFANA, "/api/search": [board("Stopline", "dash-folder")]})
    async with api as url, aiohttp.ClientSession() as session:
        assert await services.grafana(Service(url), session) == [
            Finding("grafana", "ok", "Grafana 10.4.2 answers, database ok"),
            Finding(
                "grafana",
                "warning",
                "no board has Stopline in its title",
                "import grafana/dashboards/*.json, or have them provisioned (README: Boards)",
            ),
        ]


# the whole


async def test_no_line_can_be_judged_by_a_prometheus_without_the_page() -> None:
    page = (Path(__file__).parent.parent / "fixtures/vllm/0.32.0/metrics-end.txt").read_text()
    nobody = WebConfig(listen_address=f"127.0.0.1:{free_port()}")
    async with Api({"/metrics": page, "/health": "ok"}) as engine, prometheus() as url:
        config = Config(EngineConfig(url=engine), web=nobody, gpus=GpuConfig(devices="none"))
        report = await examine(config, seconds=0, prometheus=Service(url), grafana=Service("http://127.0.0.1:9"))
    assert [(v.judged, v.why) for v in report.lines] == [(False, "Prometheus was not seen to have the page")] * 3
    assert [f.group for f in report.findings][-5:] == ["gpus", "prometheus", "prometheus", "prometheus", "grafana"]
    assert report.exit_code == 1


RULES = "groups:\n- name: stopline\n  rules:\n" + "".join(
    f"  - {{alert: {name}, expr: 'vector(1) > 2'}}\n" for name in services._ALERTS
)
BASELINE = f"  - {{record: '{services._BASELINE}', expr: 'vector(1)'}}\n"


async def test_a_real_prometheus_with_the_target_with_it_down_and_without_it(tmp_path: Path) -> None:
    binary = shutil.which("prometheus")
    assert binary, "prometheus is missing: apt-get install prometheus"
    own, port = free_port(), free_port()
    settings, rules = tmp_path / "prometheus.yml", tmp_path / "rules.yml"
    scrape = f"global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}\nrule_files: ['{rules}']\nscrape_configs:\n"
    settings.write_text(scrape + f"- {{job_name: llm, static_configs: [{{targets: ['127.0.0.1:{own}']}}]}}\n")
    rules.write_text(RULES + BASELINE)
    web = WebConfig(listen_address=f"127.0.0.1:{own}")
    sidecar, stop = Sidecar(Config(gpus=GpuConfig(devices="none"), web=web)), asyncio.Event()
    task = asyncio.create_task(sidecar.run(stop))
    process = subprocess.Popen(
        [
            binary,
            f"--config.file={settings}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--web.enable-lifecycle",
            "--log.level=warn",
        ]
    )
    try:
        async with aiohttp.ClientSession() as session:

            async def told() -> tuple[list[Finding], bool]:
                return await services.prometheus(Service(f"http://127.0.0.1:{port}/"), session, web)

            await eventually(lambda: query(port, f"up == 1 and on () {services._STARTS.partition(' ')[0]}"))
            name, started = f"target http://127.0.0.1:{own}/metrics, job llm,", await told()
            loaded = started[0][-1]
            assert loaded.finding.startswith("alert rules: StoplineBaselineMissing, ")
            assert started == ([Finding("prometheus", "ok", f"{name} is up, scraped every 500ms"), loaded], True)

            stop.set()
            await task
            await eventually(lambda: query(port, "up == 0"))
            away = (
                f"no stopline run answers at http://127.0.0.1:{own}, so its target cannot be told from those of others"
            )
            note = Finding("prometheus", "note", away, "start stopline run, then ask again")
            refused = f'Get "http://127.0.0.1:{own}/metrics": dial tcp 127.0.0.1:{own}: connect: connection refused'
            down = Finding("prometheus", "failed", f"{name} is down: {refused}", REACH)
            none = Finding(
                "prometheus", "failed", "no target serves the page of this Stopline", "one of these may be meant for it"
            )
            assert await told() == ([note, none, down, loaded], False)

            settings.write_text("scrape_configs: []\n")
            request = urllib.request.Request(f"http://127.0.0.1:{port}/-/reload", method="POST")
            await asyncio.to_thread(urllib.request.urlopen, request, timeout=10)
            missing = Finding("prometheus", "failed", "no target serves the page of this Stopline", SCRAPE)
            assert await told() == ([note, missing, NO_RULES], False)
    finally:
        stop.set()
        process.terminate()
        process.wait(20)
        await task

"""The doctor on servers, logs and GPUs in every state: all that it says, and which stop lines it says can be judged."""

import asyncio
import re
from pathlib import Path

import click
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from realengine import free_port

from exporter import remedies
from exporter.baseline import Pin
from exporter.config import BaselineConfig, Config, EngineConfig, GpuConfig, LogConfig, ScrapeConfig, WebConfig
from exporter.doctor import engine, gpus, logs
from exporter.doctor.examine import examine
from exporter.doctor.findings import Finding, Report
from exporter.engines import profile as profiles
from exporter.sidecar import Sidecar
from exporter.signals import Reading
from exporter.simulator import ClosedLoop, LogOptions, Simulation, serve
from exporter.simulator import EngineConfig as SimulatedConfig
from exporter.sources.gpu import GpuSource
from exporter.strictyaml import Seconds

pytest_plugins = ("fake_nvml",)

FIXTURES = Path(__file__).parent.parent / "fixtures"
CAPTURE = FIXTURES / "vllm/0.32.0"
GIB = 1 << 30
NO_GPU = GpuConfig(devices="none")
PATIENT = ScrapeConfig(interval=10)  # one poll, and time for the answer on a machine that is busy
README = (Path(__file__).parent.parent.parent / "README.md").read_text()

UNUSED = """\
gpus
  note     none are read: gpus.devices is none
"""
KEPT = """\
settings
  note     state_dir is not set: lines written while Stopline restarts are not counted
"""
NO_LOG = """\
log
  warning  no log is followed: log.paths is not set
           give --log: errors, phases and layout are told there
"""
TRACES = """\
  note     could tell: the exact wait and latency of each request, if Stopline takes in traces (README: exact times from traces)
           start vLLM with --otlp-traces-endpoint http://127.0.0.1:N/v1/traces and OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf in its environment
"""
COARSE = """\
  note     could tell: buckets below N s for the queue wait and the latency, so that less of them is estimated
           start vLLM with --custom-histogram-buckets '{"request_latency": [0.001, 0.01, …]}' (in 0.32, not yet in 0.22)
"""
NOT_KNOWN_OF_START = """\
  note     not known of its start: parallelism, version
           the log tells these where the engine starts: give --log a file that holds its start
"""


def plain(report: Report, *hidden: tuple[str, str]) -> str:
    """The report as a terminal shows it, what differs from run to run as N; *hidden* are further such texts."""
    text = "".join(click.unstyle(line) + "\n" for line in report.as_text())
    return steady(text, *hidden)


def steady(text: str, *hidden: tuple[str, str]) -> str:
    for what, instead in hidden:
        text = text.replace(what, instead)
    text = re.sub(r"(?<=127\.0\.0\.1:)\d+", "N", text)
    text = text.replace(", ".join(profiles.names()), "ENGINES")
    text = re.sub(r"\b[\d.]+ (k?B|ms|s|min|h|days|GiB)\b", r"N \1", text)
    text = re.sub(r"[\d.]+%", "N%", text)
    text = re.sub(r"N (?:k?B|MB)\b", "N B", text)
    text = re.sub(r"(lines read: )\d+", r"\1N", text)
    return re.sub(r"(by pattern: ).*", r"\1…", text)


class Engine:
    """A server with one page, or one status, at one path."""

    def __init__(self, text: str = "", *, status: int = 200, path: str = "/metrics", health: int = 200) -> None:
        self.asked: list[str] = []
        self._answers = {path: (status, text), "/health": (health, "")}
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        self._server = TestServer(app)

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        status, text = self._answers.get(request.path, (404, ""))
        return web.Response(status=status, text=text)

    async def __aenter__(self) -> str:
        await self._server.start_server()
        return str(self._server.make_url("/"))

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()


async def look(**sections) -> str:
    """What the doctor says of settings with these sections, without GPUs unless given."""
    sections = {"gpus": NO_GPU, "scrape": PATIENT} | sections
    paths = sections["log"].paths if "log" in sections else ()
    folders = [(str(Path(path).parent), "/var/log") for path in paths]
    return plain(await examine(Config(**sections), seconds=0), *folders)


# a server that has everything


async def test_the_readme_shows_what_is_said_beside_the_demo(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    simulation = Simulation(SimulatedConfig.hy3_h20(), seed=1, log=log, log_options=LogOptions(iterations=True))
    simulation.set_load(ClosedLoop(4, seed=1))
    async with serve(simulation) as url:
        config = Config(EngineConfig(url=url), LogConfig(paths=(str(log),)), PATIENT, NO_GPU)
        report = await examine(config, seconds=0.5)
    assert report.exit_code == 0
    match = re.search(r"<!-- example: doctor -->\n```\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert match
    shown = re.sub(r"/tmp/stopline-demo-\w+", "/var/log", match[1])
    assert plain(report, (str(tmp_path), "/var/log")) == steady(shown)


async def test_what_is_written_meanwhile_is_growth_and_what_was_there_is_not(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_bytes((CAPTURE / "serving.log").read_bytes())

    async def pause(_: float) -> None:
        with log.open("a") as out:
            out.write("x" * 499 + "\n")

    config = Config(log=LogConfig(paths=(str(log),)), gpus=NO_GPU)
    idle, grown = await examine(config, seconds=0), await examine(config, seconds=7, sleep=pause)
    assert Finding("log", "ok", "it grew by 500 B in 7 s") in grown.findings
    assert [f.finding for f in idle.findings if "written to it" in f.finding] == ["nothing was written to it in 0 s"]


# the log


@pytest.mark.parametrize("reason", remedies.LOG)
def test_a_log_that_cannot_be_read_has_its_reason_and_its_remedy(reason: str, tmp_path: Path) -> None:
    sidecar = Sidecar(Config(log=LogConfig(paths=("/var/log/x.log",)), gpus=NO_GPU))
    sidecar.build(None)
    sidecar.store.publish(Reading("/var/log/x.log", "log", ok=False, at=0, reason=reason))
    (found,) = logs.findings(sidecar, {"/var/log/x.log": 0}, 5)
    advice = remedies.LOG[reason]
    assert found == Finding(
        "log",
        "failed",
        f"/var/log/x.log cannot be read: {reason}, {remedies.plain(advice.cause)}",
        remedies.plain(advice.remedy),
    )


async def test_a_log_that_is_not_there_and_an_engine_that_is_not_either() -> None:
    said = await look(
        log=LogConfig(paths=("/var/log/none.log",)),
        engine=EngineConfig(url=f"http://127.0.0.1:{free_port()}"),
        gpus=GpuConfig(),
    )
    assert said == (
        KEPT
        + """\
log
  failed   /var/log/none.log cannot be read: missing, there is no such file, or no file fits the pattern, or standard input was closed; with kube:// no such container, or it has not started
           normal until the server writes; else compare the path with what the server writes to, as seen from Stopline's container; kube://NAME where the pod has several
engine
  failed   it is not recognised
           set engine.name (--engine) to one of ENGINES, or write a profile
  failed   http://127.0.0.1:N/metrics cannot be read: refused, nothing listens at engine.url
           normal while the server loads; else compare host and port
gpus
  failed   they cannot be read: library_not_found, no NVIDIA driver library in sight
           let the container runtime inject it (NVIDIA_DRIVER_CAPABILITIES=utility); on a machine without GPUs say --gpus none
stop lines
  latency  cannot be judged: the page cannot be read (refused) and no log can be read
  errors   cannot be judged: the page cannot be read (refused) and no log can be read
  memory   cannot be judged: no GPU is read, the page cannot be read (refused) and no log can be read
"""
    )


async def test_a_directory_in_place_of_a_log(tmp_path: Path) -> None:
    said = await look(log=LogConfig(paths=(str(tmp_path / "x"),)))
    (tmp_path / "x").mkdir()
    assert "x cannot be read: missing" in said
    said = await look(log=LogConfig(paths=(str(tmp_path / "x"),)))
    assert "/var/log/x cannot be read: not_a_file, the path is a directory, a pipe or a device\n" in said


async def test_a_log_alone_that_nobody_writes_to(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    whole = (CAPTURE / "startup.log").read_text() + (CAPTURE / "serving.log").read_text()
    log.write_text(whole[: whole.index("[shutdown]")].rpartition("\n")[0] + "\n")
    assert await look(log=LogConfig(paths=(str(log),))) == (
        KEPT
        + """\
log
  ok       /var/log/vllm.log can be read: N B, last written N s ago
  note     nothing was written to it in N s
           an idle engine may be silent: send it a request; else compare the path with where the server writes
  ok       lines read: N; understood, by pattern: …
engine
  ok       vLLM 0.32.0, recognised by its log
  ok       it is up, phase serving
  warning  no metrics page is read: engine.url is not set
           give --engine-url: the page has exact counts
  ok       model tiny
  ok       known of its start: parallelism, limits, KV cache capacity, version
  note     could tell: the time of each step, by prefill and decode; without it the step is the time between tokens
           start vLLM with --enable-logging-iteration-details; no line shows it yet
"""
        + TRACES
        + UNUSED
        + """\
stop lines
  latency  cannot be judged: no page is read and no line tells how long a request takes
  errors   can be judged: from the log
  memory   can be judged: from the use of the KV cache
"""
    )


async def test_a_log_that_begins_when_the_engine_serves_does_not_tell_its_start(tmp_path: Path) -> None:
    log = tmp_path / "sglang.log"
    log.write_text(
        "[2026-11-30 06:44:54] Decode batch, #running-req: 6, #token: 675, token usage: 0.75, #queue-req: 2\n"
    )
    assert await look(log=LogConfig(paths=(str(log),))) == (
        KEPT
        + """\
log
  ok       /var/log/sglang.log can be read: N B, last written N s ago
  note     nothing was written to it in N s
           an idle engine may be silent: send it a request; else compare the path with where the server writes
  ok       lines read: N; understood, by pattern: …
engine
  ok       SGLang, recognised by its log
  ok       it is up, phase serving
  warning  no metrics page is read: engine.url is not set
           give --engine-url: the page has exact counts
  warning  the model's name is not known
           set engine.model (--model)
  note     not known of its start: parallelism, limits, KV cache capacity
           the log tells these where the engine starts: give --log a file that holds its start
  note     could tell: the exact wait and latency of each request, if Stopline takes in traces (README: exact times from traces)
           start SGLang with --enable-trace --otlp-traces-endpoint http://127.0.0.1:N/v1/traces and OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf in its environment
  note     could tell: the exact queue wait of each request
           start SGLang with --enable-request-time-stats-logging; no line shows it yet
  note     could tell: the balance of experts, where the model has any
           start SGLang with --expert-balancedness-report-mode server_log (before 0.5.23 --enable-expert-distribution-metrics); no line shows it yet
"""
        + UNUSED
        + """\
stop lines
  latency  cannot be judged: no page is read and no line tells how long a request takes
  errors   can be judged: from the log
  memory   can be judged: from the use of the KV cache
"""
    )


async def test_the_fields_of_a_server_nobody_knows_are_enough_for_two_lines(tmp_path: Path) -> None:
    log = tmp_path / "own.log"
    log.write_text("[request_id=xxx] queue_wait_ms=12.3 step_latency_ms=45.6 total_ms=57.9\n")
    assert await look(log=LogConfig(paths=(str(log),))) == (
        KEPT
        + """\
log
  ok       /var/log/own.log can be read: N B, last written N s ago
  note     nothing was written to it in N s
           an idle engine may be silent: send it a request; else compare the path with where the server writes
  ok       lines read: N; understood, by pattern: …
engine
  ok       none that is known; the fields of its log are read
  ok       it is up, phase serving
  warning  no metrics page is read: engine.url is not set
           give --engine-url: the page has exact counts
  warning  the model's name is not known
           set engine.model (--model)
"""
        + UNUSED
        + """\
stop lines
  latency  can be judged: from the log
  errors   can be judged: from the log
  memory   cannot be judged: no GPU is read, no page is read and no line tells how full the KV cache is
"""
    )


async def test_lines_that_nobody_understands(tmp_path: Path) -> None:
    log = tmp_path / "own.log"
    log.write_text("all is well\n" * 3)
    assert await look(log=LogConfig(paths=(str(log),))) == (
        KEPT
        + """\
log
  ok       /var/log/own.log can be read: N B, last written N s ago
  note     nothing was written to it in N s
           an idle engine may be silent: send it a request; else compare the path with where the server writes
  warning  lines read: N; no pattern understands one
           set engine.name; start the engine at level INFO; stopline explain FILE shows what each line becomes
engine
  failed   it is not recognised
           set engine.name (--engine) to one of ENGINES, or write a profile
  warning  no metrics page is read: engine.url is not set
           give --engine-url: the page has exact counts
"""
        + UNUSED
        + """\
stop lines
  latency  cannot be judged: no page is read and no line tells how long a request takes
  errors   cannot be judged: it is not known which engine writes the log
  memory   cannot be judged: no GPU is read, no page is read and no line tells how full the KV cache is
"""
    )


async def test_lines_whose_format_has_changed(tmp_path: Path) -> None:
    log = tmp_path / "sglang.log"
    log.write_text("[2026-11-30 06:44:54] Decode batch, running: 6\n" * 2)
    said = await look(log=LogConfig(paths=(str(log),)), engine=EngineConfig(name="sglang"))
    assert (
        "  warning  lines that look like known ones and read differently: 2\n"
        "           stopline explain FILE shows them; compare them with the samples in the profile\n"
    ) in said


async def test_the_latency_that_a_pattern_can_tell_is_waited_for(tmp_path: Path) -> None:
    log = tmp_path / "tgi.log"
    log.write_text((FIXTURES / "tgi/constructed/serving.log").read_text().partition("\n")[0] + "\n")
    said = await look(log=LogConfig(paths=(str(log),)))
    assert "  latency  can be judged: from the log, once a request has finished\n" in said


async def test_files_of_a_pattern_are_told_together(tmp_path: Path) -> None:
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_text("x\n" * 100)
    said = await look(log=LogConfig(paths=(str(tmp_path / "*.log"),)))
    assert "  ok       /var/log/*.log can be read: 2 files, N B, last written N s ago\n" in said


# the page


async def page_of(engine: Engine, *, name: str = "auto", **sections) -> str:
    async with engine as url:
        return await look(engine=EngineConfig(url=url, name=name), **sections)


async def test_a_page_alone() -> None:
    assert await page_of(Engine((CAPTURE / "metrics-end.txt").read_text())) == (
        NO_LOG
        + """\
engine
  ok       vLLM, recognised by its page
  ok       it is up, phase serving
  ok       http://127.0.0.1:N/metrics is N B, read in N ms: N% of scrape.interval
  ok       all 11 metrics that its page must have are there
  ok       model tiny
  ok       known of its start: limits, KV cache capacity
"""
        + NOT_KNOWN_OF_START
        + COARSE
        + TRACES
        + UNUSED
        + """\
stop lines
  latency  can be judged: from the page
  errors   can be judged: from the page alone, which has answers with 5xx and no crash
  memory   can be judged: from the use of the KV cache
"""
    )


async def test_pins_for_another_engine_are_told() -> None:
    pins = (
        Pin("request", 0.99, Seconds(1.0)),
        Pin("request", 0.99, Seconds(2.0), config="deadbeef"),
        Pin("step", 0.5, Seconds(0.1), model="other"),
    )
    page = Engine((CAPTURE / "metrics-end.txt").read_text())
    told = await page_of(page, baseline=BaselineConfig(pins=pins))
    config = re.search(r"for config deadbeef, and this is ([0-9a-f]{8})\n", told)
    assert config
    assert [line.strip() for line in told.splitlines() if "pin" in line] == [
        f"warning  the pin of request P99 does not hold: it is for config deadbeef, and this is {config[1]}",
        "measure it again, or take the pin out",
        "warning  the pin of step P50 does not hold: it is for model other, and this is tiny",
        "measure it again, or take the pin out",
    ]


async def test_a_page_without_what_must_be_there() -> None:
    kept = ("num_requests_running", "e2e_request_latency")
    lines = (CAPTURE / "metrics-end.txt").read_text().splitlines(keepends=True)
    said = await page_of(Engine("".join(line for line in lines if any(name in line for name in kept))))
    assert said == (
        NO_LOG
        + """\
engine
  ok       vLLM, recognised by its page
  ok       it is up, phase serving
  ok       http://127.0.0.1:N/metrics is N B, read in N ms: N% of scrape.interval
  warning  missing on its page: vllm:num_requests_waiting, vllm:kv_cache_usage_perc, vllm:time_to_first_token_seconds, vllm:request_queue_time_seconds, vllm:inter_token_latency_seconds, vllm:prompt_tokens_total, vllm:generation_tokens_total, vllm:request_success_total and 1 more
           this version of the engine has no such metric, or a flag is off: see flags (README: engines); compare the version with the table
  ok       model tiny
  note     not known of its start: parallelism, limits, KV cache capacity, version
           the log tells these where the engine starts: give --log a file that holds its start
"""
        + TRACES
        + UNUSED
        + """\
stop lines
  latency  can be judged: from the page
  errors   cannot be judged: the page does not tell of errors and no log is followed
  memory   cannot be judged: no GPU is read, the page does not tell how full the KV cache is and no log is followed
"""
    )


async def test_the_page_of_a_gateway_and_no_page_at_all() -> None:
    unknown = (
        NO_LOG
        + """\
engine
  failed   it is not recognised
           set engine.name (--engine) to one of ENGINES, or write a profile
  failed   http://127.0.0.1:N/metrics cannot be read: {}
           {}
  note     some engines have no page by themselves
           start llama.cpp server with --metrics; LMDeploy with no --disable-metrics; SGLang with --enable-metrics; NVIDIA TensorRT-LLM (trtllm-serve) with return_perf_metrics: true in its settings
"""
        + UNUSED
        + """\
stop lines
  latency  cannot be judged: the page cannot be read ({reason}) and no log is followed
  errors   cannot be judged: the page cannot be read ({reason}) and no log is followed
  memory   cannot be judged: no GPU is read, the page cannot be read ({reason}) and no log is followed
"""
    )
    assert await page_of(Engine("istio_requests_total 5\n")) == unknown.format(
        "not_recognised, a metrics page, though not of a known engine, or not of the one that is set",
        "is this a gateway? set engine.name, or write a profile (README: add an engine)",
        reason="not_recognised",
    )
    assert await page_of(Engine(status=404)) == unknown.format(
        "http_404, the server answers with this status in place of its page",
        "404 or 501: switch the engine's metrics on, see flags (README: engines); 401 or 403: give scrape.bearer_token_file or scrape.username",
        reason="http_404",
    )


async def test_an_engine_known_by_its_log_is_told_the_flag_for_its_page(tmp_path: Path) -> None:
    log = tmp_path / "sglang.log"
    log.write_bytes((FIXTURES / "sglang/0.5.23/startup.log").read_bytes())
    said = await page_of(Engine(status=404), log=LogConfig(paths=(str(log),)))
    assert (
        "  note     could tell: the metrics page, off by default\n           start SGLang with --enable-metrics\n"
    ) in said
    assert "some engines" not in said


async def test_a_dead_engine_behind_a_server_that_answers() -> None:
    said = await page_of(Engine((CAPTURE / "metrics-end.txt").read_text(), health=503))
    assert (
        "/metrics cannot be read: unhealthy, the page answers, but /health says 5xx: the engine behind it is dead\n"
        "           read the engine's log; restart it\n"
    ) in said
    assert "  latency  cannot be judged: the page cannot be read (unhealthy) and no log is followed\n" in said


@pytest.mark.parametrize(
    ("phase", "found"),
    [
        ("dead", Finding("engine", "failed", "it is dead", "read the engine's log; restart it")),
        ("stopping", Finding("engine", "note", "it is not up, phase stopping", "start it again, if it is to serve")),
        (
            "loading",
            Finding(
                "engine",
                "note",
                "it is not up, phase loading",
                "wait while it loads; without a page it counts as starting until it is seen at work",
            ),
        ),
    ],
)
def test_an_engine_that_does_not_serve(phase: str, found: Finding) -> None:
    sidecar = Sidecar(Config(engine=EngineConfig(name="vllm", url="http://127.0.0.1:9"), gpus=NO_GPU))
    sidecar.lifecycle.enter(phase)
    assert found in list(engine.findings(sidecar, []))


def test_a_page_that_takes_most_of_the_interval() -> None:
    sidecar = Sidecar(Config(engine=EngineConfig(name="vllm", url="http://127.0.0.1:9"), gpus=NO_GPU))
    sidecar.store.publish(Reading("metrics", "metrics", ok=True, at=0, seconds=0.9))
    assert Finding(
        "engine",
        "warning",
        "http://127.0.0.1:9/metrics is 0 B, read in 700 ms: 70.0% of scrape.interval",
        "the engine's API process is overloaded; raise scrape.interval and with it the timeout",
    ) in list(engine.findings(sidecar, [0.1, 0.7, 0.9]))


@pytest.mark.parametrize("reason", [*(r for r in remedies.PAGE if r != remedies.HTTP), "http_401", "http_503"])
def test_every_reason_of_a_page_has_its_remedy(reason: str) -> None:
    sidecar = Sidecar(Config(engine=EngineConfig(name="vllm", url="http://127.0.0.1:9"), gpus=NO_GPU))
    sidecar.store.publish(Reading("metrics", "metrics", ok=False, at=0, reason=reason, detail="\x1b[2Jdetail" * 20))
    (found,) = (f for f in engine.findings(sidecar, []) if "cannot be read" in f.finding)
    advice = remedies.of(remedies.PAGE, reason)
    start = f"http://127.0.0.1:9/metrics cannot be read: {reason}, {remedies.plain(advice.cause)}"
    told = found.finding.removeprefix(start)
    assert told in ("", f" ({('·[2Jdetail' * 20)[:99]}…)")
    assert found.remedy == remedies.plain(advice.remedy)


def test_what_was_not_answered_in_time_says_so() -> None:
    sidecar = Sidecar(Config(engine=EngineConfig(url="http://127.0.0.1:9"), log=LogConfig(paths=("/x.log",))))
    sidecar.build(None)
    late = "it did not answer in time; watch longer with --seconds"
    assert list(logs.findings(sidecar, {"/x.log": 0}, 5)) == [Finding("log", "failed", "/x.log was not read", late)]
    assert Finding("engine", "failed", "http://127.0.0.1:9/metrics was not read", late) in list(
        engine.findings(sidecar, [])
    )
    assert list(gpus.findings(sidecar)) == [Finding("gpus", "failed", "they were not read", late)]


# what it could tell


async def hints(text: str, log: str, tmp_path: Path, **settings) -> list[str]:
    """The remedies of what the engine could tell, by page and log."""
    path = tmp_path / "server.log"
    path.write_text(log)
    async with Engine(text) as url:
        config = Config(EngineConfig(url=url, **settings), LogConfig(paths=(str(path),)), PATIENT, NO_GPU)
        report = await examine(config, seconds=0)
    return [f.remedy for f in report.findings if f.finding.startswith("could tell: ")]


async def test_a_flag_that_shows_in_the_log_or_on_the_page_is_not_asked_for(tmp_path: Path) -> None:
    idle = (CAPTURE / "metrics-idle.txt").read_text()
    step = (
        "(APIServer pid=1) INFO 11-30 07:26:42 [loggers.py:199] Engine 000: Iteration(1): 0 context requests, 0 context "
        "tokens, 1 generation requests, 1 generation tokens, iteration elapsed time: 13.40 ms, CPU KV cache usage: 0.0%\n"
    )
    gone = "(APIServer pid=1) INFO 11-30 07:26:42 [x.py:1] Request cmpl-1 aborted.\n"
    steps = "start vLLM with --enable-logging-iteration-details; no line shows it yet"
    clients = "start vLLM with --enable-log-requests; no line shows it yet"
    buckets = COARSE.splitlines()[1].strip()
    traces = TRACES.splitlines()[1].strip().replace(":N/", ":4318/")
    assert await hints(idle, "", tmp_path) == [steps, clients, buckets, traces]
    assert await hints(idle, step, tmp_path) == [clients, buckets, traces]
    assert await hints(idle, gone, tmp_path) == [steps, buckets, traces]
    finer = idle.replace('le="0.3"', 'le="0.001"')
    assert await hints(finer, step + gone, tmp_path) == [traces]
    spoilt = re.sub(r'le="[\d.]+"', 'le="x"', idle)
    assert await hints(spoilt, step + gone, tmp_path) == [traces]


async def test_a_metric_that_only_a_flag_gives_is_looked_for() -> None:
    page = (FIXTURES / "trtllm/constructed/metrics-busy.txt").read_text()
    lacks = (
        "  note     could tell: what is running, waiting and in the KV cache\n"
        "           start NVIDIA TensorRT-LLM (trtllm-serve) with enable_iter_perf_stats: true in its settings, "
        "beside return_perf_metrics: true\n"
    )
    assert lacks not in await page_of(Engine(page, path="/prometheus/metrics"))
    page = "".join(line for line in page.splitlines(keepends=True) if "num_requests_running" not in line)
    assert lacks in await page_of(Engine(page, path="/prometheus/metrics"))


# GPUs


async def gpu_findings(devices, *, proc: Path, environ: dict[str, str] | None = None) -> list[Finding]:
    """What is said of the stand-in hardware; engines are looked for in *proc*."""
    sidecar = Sidecar(Config(gpus=GpuConfig(devices=devices)))
    sidecar.gpus = source = GpuSource(devices, sidecar.store, proc=proc, environ=environ or {})
    task = asyncio.create_task(source.run())
    while sidecar.waiting_for() or "gpu" not in sidecar.store.readings:
        await asyncio.sleep(0.01)
    task.cancel()
    return list(gpus.findings(sidecar))


@pytest.fixture
def two(nvml_here):
    nvml_here.set({"count": 2, "gpu0.total": 80 * GIB, "gpu0.used": 72 * GIB, "gpu0.reserved": GIB})
    nvml_here.set({"gpu1.total": 24 * GIB, "gpu1.used": 4 * GIB, "gpu1.name": "NVIDIA L4"})
    return nvml_here


BOTH = Finding("gpus", "ok", "free memory: GPU 0 (NVIDIA H100 80GB HBM3) 7.0 GiB, GPU 1 (NVIDIA L4) 20.0 GiB")


async def test_gpus_that_the_settings_name(two, tmp_path: Path) -> None:
    chosen = Finding("gpus", "ok", "2 of the 2 that can be seen: as gpus.devices says")
    assert await gpu_findings("all", proc=tmp_path) == [chosen, BOTH]
    assert await gpu_findings(("1", "GPU-none"), proc=tmp_path) == [
        Finding("gpus", "ok", "1 of the 2 that can be seen: as gpus.devices says"),
        Finding("gpus", "warning", "not found: GPU-none", "compare it with nvidia-smi -L in this container"),
        Finding("gpus", "ok", "free memory: GPU 1 (NVIDIA L4) 20.0 GiB"),
    ]


async def test_gpus_of_the_engine_where_its_process_can_be_seen(two, tmp_path: Path) -> None:
    assert await gpu_findings("auto", proc=tmp_path) == [
        Finding(
            "gpus",
            "note",
            "2 of the 2 that can be seen: no process of an engine was seen to tell which are its own",
            "if some are not the engine's: name its GPUs with --gpus, or let it be seen (README: three ways to the GPUs)",
        ),
        BOTH,
    ]
    (process := tmp_path / "7").mkdir()
    (process / "cmdline").write_bytes(b"vllm\0serve\0")
    (process / "environ").write_bytes(b"CUDA_VISIBLE_DEVICES=1\0")
    assert await gpu_findings("auto", proc=tmp_path) == [
        Finding("gpus", "ok", "1 of the 2 that can be seen: those of the engine's process"),
        Finding("gpus", "ok", "free memory: GPU 1 (NVIDIA L4) 20.0 GiB"),
    ]


async def test_a_gpu_that_is_lost_and_one_that_tells_no_memory(two, tmp_path: Path) -> None:
    unsupported = {f"gpu1.err.nvmlDeviceGetMemoryInfo{v}": "NOT_SUPPORTED" for v in ("", "_v2")}
    two.set({"gpu0.err": "GPU_IS_LOST"} | unsupported)
    assert await gpu_findings("all", proc=tmp_path) == [
        Finding("gpus", "ok", "2 of the 2 that can be seen: as gpus.devices says"),
        Finding(
            "gpus",
            "failed",
            "GPU 0 cannot be read: gpu_lost, a GPU fell off the bus or wants a reset",
            "look for Xid in the kernel's log; reset the GPU or reboot the node",
        ),
        Finding(
            "gpus",
            "warning",
            "no memory is told by GPU 1",
            "this device or its driver does not tell it; take it from a node-wide exporter",
        ),
    ]


@pytest.mark.parametrize("reason", remedies.GPU)
def test_every_reason_of_the_gpus_has_its_remedy(reason: str) -> None:
    sidecar = Sidecar(Config())
    sidecar.build(None)
    sidecar.store.publish(Reading("gpu", "gpu", ok=False, at=0, reason=reason))
    advice = remedies.GPU[reason]
    text = f"they cannot be read: {reason}, {remedies.plain(advice.cause)}"
    assert list(gpus.findings(sidecar)) == [Finding("gpus", "failed", text, remedies.plain(advice.remedy))]


async def test_memory_can_be_judged_by_the_gpus_alone(two) -> None:
    report = await examine(Config(gpus=GpuConfig(devices="all")), seconds=0)
    assert plain(report).splitlines()[-1] == "  memory   can be judged: from the free memory of the GPUs"


# a sidecar beside, and strangers


async def test_it_does_no_harm_to_the_sidecar_beside(tmp_path: Path) -> None:
    """Its port may be in use, its directory is not written to, and records that can be read once are left to it."""
    log, state = tmp_path / "server.log", tmp_path / "state"
    log.write_text("x\n")
    engine = Engine((FIXTURES / "trtllm/constructed/metrics-busy.txt").read_text(), path="/prometheus/metrics")
    other = TestServer(web.Application())
    await other.start_server()
    async with engine as url:
        config = Config(
            engine=EngineConfig(name="trtllm", url=url),
            log=LogConfig(paths=(str(log),)),
            scrape=ScrapeConfig(interval=10, iterations=True),
            web=WebConfig(listen_address=f"127.0.0.1:{other.port}"),
            gpus=NO_GPU,
            state_dir=state,
        )
        report = await examine(config, seconds=0)
    await other.close()
    assert not state.exists()
    assert set(engine.asked) == {"/prometheus/metrics", "/health"}
    assert report.findings[0] == Finding(
        "settings", "note", "scrape.iterations was left out: what is read there is gone for stopline run"
    )


async def test_a_source_that_fails_through_a_bug_is_not_taken_for_a_finding(monkeypatch) -> None:
    async def once(_: object) -> None:
        raise KeyError("a bug of ours")

    monkeypatch.setattr("exporter.sources.logs.LogSource.once", once)
    with pytest.raises(ExceptionGroup):
        await examine(Config(log=LogConfig(paths=("/none.log",)), gpus=NO_GPU), seconds=60)


async def test_what_a_stranger_wrote_cannot_move_the_cursor_nor_fill_the_screen() -> None:
    model = "\x1b]0;title\x07\x1b[2J" + "m" * 5000
    said = await page_of(Engine(f'vllm:num_requests_running{{model_name="{model}"}} 1\n'))
    assert "  ok       model other\n" in said
    assert all(c.isprintable() or c == "\n" for c in said)

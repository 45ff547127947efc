"""The whole process: start, stop, reload, failure. Subprocesses where signals and exit codes matter."""

import asyncio
import errno
import logging
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from harness import Clock
from process import Process, assert_free, eventually, fetch
from realengine import free_port

from exporter import catalog
from exporter.config import Config, EngineConfig, GpuConfig, LogConfig, WebConfig
from exporter.sidecar import Sidecar

SEED = "[request_id=xxx] queue_wait_ms=12.3 step_latency_ms=45.6 total_ms=57.9\n"
LOCAL = WebConfig(listen_address="127.0.0.1:0")
NO_GPU = GpuConfig(devices="none")


class Hanging:
    """An engine that takes every connection and never says a word."""

    async def run(self) -> None:
        await asyncio.Event().wait()


class Broken:
    async def run(self) -> None:
        raise KeyError("a bug of ours")


class Returning:
    async def run(self) -> None:
        return


async def test_it_answers_from_the_first_second_and_releases_the_port(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.touch()
    sidecar = Sidecar(Config(log=LogConfig(paths=(str(log),)), web=LOCAL, gpus=NO_GPU))
    stop = asyncio.Event()
    task = asyncio.create_task(sidecar.run(stop))
    while sidecar.address is None:
        await asyncio.sleep(0)
    page = await asyncio.to_thread(fetch, sidecar.address[1])
    assert "stopline_engine_up 0.0" in page
    for kind in catalog.ERROR_KINDS:
        assert f'stopline_errors_total{{kind="{kind}",source="log"}} 0.0' in page
    stop.set()
    await asyncio.wait_for(task, 5)
    assert_free(sidecar.address[1])


@pytest.mark.parametrize(("source", "error"), [(Broken(), KeyError), (Returning(), RuntimeError)])
async def test_a_source_that_fails_through_a_bug_ends_the_process(source, error) -> None:
    sidecar = Sidecar(Config(web=LOCAL, gpus=NO_GPU))
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(sidecar.run(asyncio.Event(), extra={"bug": source}), 5)
    assert isinstance(caught.value.exceptions[0], error)
    assert sidecar.address is not None
    assert_free(sidecar.address[1])


@pytest.mark.parametrize(
    "line", ["{}\n", "2026-11-30T08:00:00.1Z stderr F {}\n", '{{"log":"{}\\n","stream":"stderr"}}\n']
)
async def test_the_engine_is_recognised_from_the_log_of_a_container_too(tmp_path: Path, line: str) -> None:
    log = tmp_path / "server.log"
    log.write_text(line.format("(APIServer pid=914) INFO 11-30 07:26:03 [api_utils.py:286] non-default args: {}"))
    sidecar, stop = Sidecar(Config(log=LogConfig(paths=(str(log),)), web=LOCAL, gpus=NO_GPU)), asyncio.Event()
    task = asyncio.create_task(sidecar.run(stop))
    while sidecar.waiting_for():
        await asyncio.sleep(0.01)
    stop.set()
    await asyncio.wait_for(task, 5)
    assert sidecar.lifecycle.engine == "vllm"


async def test_the_engine_is_recognised_from_the_page_and_the_log_follows(tmp_path: Path) -> None:
    app = web.Application()

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text='vllm:num_requests_running{model_name="m"} 1\n')

    app.router.add_get("/metrics", metrics)
    log = tmp_path / "server.log"
    log.touch()
    async with TestServer(app) as server:
        config = Config(
            engine=EngineConfig(url=str(server.make_url("/"))),
            log=LogConfig(paths=(str(log),)),
            web=LOCAL,
            gpus=NO_GPU,
        )
        sidecar, stop = Sidecar(config), asyncio.Event()
        task = asyncio.create_task(sidecar.run(stop))
        while sidecar.waiting_for() or not sidecar.lifecycle.engine:
            await asyncio.sleep(0.01)
        with log.open("a") as out:
            out.write(
                "(APIServer pid=1) INFO 11-30 07:26:42 [loggers.py:199] Engine 000: Iteration(0): 1 context requests, 4 "
                "context tokens, 0 generation requests, 0 generation tokens, iteration elapsed time: 35.20 ms, x\n"
            )
        while not sidecar.store.histograms.get(catalog.STEP_LATENCY):
            await asyncio.sleep(0.01)
        stop.set()
        await asyncio.wait_for(task, 5)
    assert sidecar.lifecycle.engine == "vllm"


def test_a_line_is_on_the_page_within_half_a_second(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.touch()
    with Process("--log", str(log), "--gpus", "none") as run:
        eventually(lambda: "stopline_log_lines_total" in fetch(run.port))
        with log.open("a") as out:
            out.write(SEED)
        began = time.monotonic()
        eventually(lambda: 'stopline_requests_total{model="",outcome="ok"} 1.0' in fetch(run.port))
        took = time.monotonic() - began
        assert run.end()[0] == 0
    assert took < 5.0  # half a second is the promise, and what a quiet machine needs


def test_sigterm_ends_it_in_time_though_the_engine_hangs(tmp_path: Path) -> None:
    with socket.socket() as hanging:
        hanging.bind(("127.0.0.1", 0))
        hanging.listen()
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        with Process("--engine-url", url) as run:
            eventually(lambda: 'reason="timeout",source="metrics"' in fetch(run.port))
            began = time.monotonic()
            code, errors = run.end()
    assert (code, "Traceback" in errors) == (0, False)
    assert time.monotonic() - began < 5


def test_a_port_in_use_is_one_clear_line_and_2() -> None:
    with Process() as first:
        result = subprocess.run(
            [sys.executable, "-m", "exporter", "run", "--web.listen-address", f"127.0.0.1:{first.port}"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1] == (
        f"web.listen_address 127.0.0.1:{first.port}: already in use; stop what listens there or choose another"
    )
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("host", ["no.such.host.invalid", "256.1.1.1"])
def test_an_address_that_cannot_be_had_is_one_clear_line_and_2(host: str) -> None:
    command = [sys.executable, "-m", "exporter", "run", "--web.listen-address", f"{host}:10777"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"web.listen_address {host}:10777: ")
    assert "Traceback" not in result.stderr


async def test_one_failure_told_by_two_logs_of_an_engine_is_one(tmp_path: Path) -> None:
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    for log in logs:
        log.touch()
    paths = (*map(str, logs), f"{tmp_path}/./a.log")
    clock = Clock()
    sidecar = Sidecar(Config(log=LogConfig(paths=paths), gpus=NO_GPU), clock=clock)
    async with aiohttp.ClientSession() as session:
        sources = sidecar.build(session)
    assert list(sources) == [str(log) for log in logs]
    for lines in sidecar.lines:
        lines.feed(b"2026-11-30 10:00:00 ERROR CUDA error: boom\n", history=False)
        lines.feed(b"2026-11-30 10:00:01 INFO next\n", history=False)
    clock.pass_(1.0)
    for source in sources.values():
        await source.once()
    assert sidecar.store.counters[catalog.ERRORS]["cuda", "log"] == 1


@pytest.mark.parametrize("before", ["2026-11-30T10:00:00.123456789Z stderr F ", "\x1b[0;36m"])
async def test_an_engine_is_recognised_through_what_a_runtime_puts_around_its_lines(
    tmp_path: Path, before: str
) -> None:
    log = tmp_path / "server.log"
    log.touch()
    sidecar = Sidecar(Config(log=LogConfig(paths=(str(log),)), gpus=NO_GPU))
    async with aiohttp.ClientSession() as session:
        source = sidecar.build(session)[str(log)]
    await source.once()
    after = "\x1b[0;0m" if before.startswith("\x1b") else ""
    log.write_text(f"{before}(APIServer pid=1){after} INFO 11-30 07:26:03 [api_utils.py:286] non-default args: {{}}\n")
    await source.once()
    assert sidecar.lifecycle.engine == "vllm"


async def test_bytes_that_are_no_http_and_too_many_connections_do_not_fill_the_log(caplog) -> None:
    sidecar, stop = Sidecar(Config(web=LOCAL, gpus=NO_GPU)), asyncio.Event()
    task = asyncio.create_task(sidecar.run(stop))
    while sidecar.address is None:
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_connection(*sidecar.address)
    writer.write(b"\x00forged\r\n\r\n")
    assert b" 400 " in await reader.readline()
    writer.close()
    loop = asyncio.get_running_loop()
    for _ in range(3):
        loop.call_exception_handler({"message": "accept", "exception": OSError(errno.EMFILE, "too many")})
    loop.call_exception_handler({"message": "something else"})
    stop.set()
    await asyncio.wait_for(task, 5)
    said = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert said == ["connections are not accepted: Too many open files", "something else"]


def test_a_demo_whose_reader_leaves_ends_quietly() -> None:
    command = [sys.executable, "-m", "exporter", "demo", "--web.listen-address", f"127.0.0.1:{free_port()}"]
    demo = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        demo.stdout.readline()
        demo.stdout.close()
        assert demo.wait(20) == 0
        assert demo.stderr.read() == ""
    finally:
        demo.kill()
        demo.wait(5)
        demo.stderr.close()


def test_a_bug_ends_it_with_1_and_a_traceback() -> None:
    code = (
        "import exporter.sources.logs as logs\n"
        "async def once(self): raise KeyError('a bug of ours')\n"
        "logs.LogSource.once = once\n"
        "from exporter.cli import main\n"
        f"main(['run', '--log', '/nonexistent', '--web.listen-address', '127.0.0.1:{free_port()}'])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "KeyError: 'a bug of ours'" in result.stderr


def test_what_was_written_while_it_was_down_is_counted_once(tmp_path: Path) -> None:
    log, state = tmp_path / "server.log", tmp_path / "state"
    log.write_text(SEED * 100)
    arguments = ("--log", str(log), "--state-dir", str(state), "--gpus", "none")
    counted = 'stopline_requests_total{{model="",outcome="ok"}} {:.1f}'
    with Process(*arguments) as run:
        eventually(lambda: "stopline_log_lines_total" in fetch(run.port))
        with log.open("a") as out:
            out.write(SEED)
        eventually(lambda: counted.format(1) in fetch(run.port))
        run.end()
    with log.open("a") as out:
        out.write(SEED)
    with Process(*arguments) as run:
        eventually(lambda: counted.format(1) in fetch(run.port))
        run.end()


def test_a_reload_keeps_the_counters_and_a_bad_edit_keeps_the_settings(tmp_path: Path) -> None:
    log, settings = tmp_path / "server.log", tmp_path / "stopline.yml"
    log.touch()
    settings.write_text(f"log:\n  paths: ['{log}']\nthresholds:\n  latency_ratio: 3\n")
    with Process("-c", str(settings), "--gpus", "none") as run:
        eventually(lambda: 'stopline_threshold{line="latency_ratio"} 3.0' in fetch(run.port))
        with log.open("a") as out:
            out.write(SEED)
        eventually(lambda: 'outcome="ok"} 1.0' in fetch(run.port))
        settings.write_text("log:\n  paths: [\nthresholds: 5\n")
        run.process.send_signal(signal.SIGHUP)
        page = eventually(lambda: (p := fetch(run.port)) and "last_reload_successful 0.0" in p and p)
        assert 'stopline_threshold{line="latency_ratio"} 3.0' in page
        good = f"log:\n  paths: ['{log}']\n  fields:\n    t_ms: {{signal: request_latency_seconds, unit: ms}}\n"
        settings.write_text(good + "thresholds:\n  latency_ratio: 4\n")
        run.process.send_signal(signal.SIGHUP)
        page = eventually(lambda: (p := fetch(run.port)) and "last_reload_successful 1.0" in p and p)
        assert 'stopline_threshold{line="latency_ratio"} 4.0' in page
        with log.open("a") as out:
            out.write("t_ms=5\n")
        eventually(lambda: 'stopline_request_latency_seconds_count{model="",source="log"} 2.0' in fetch(run.port))
        _, errors = run.end()
    assert "configuration not reloaded, the old one stays" in errors


def test_a_reload_asked_for_while_it_starts_ends_nothing_and_is_heard(tmp_path: Path) -> None:
    settings = tmp_path / "stopline.yml"
    settings.write_text("thresholds: {latency_ratio: 3}\n")
    as_it_starts = f"""
import os, pathlib, signal, sys
class Imports:  # the first of the command's own modules, and one that is loaded when the settings have been read
    def find_spec(self, name, *_):
        if name == "exporter.sidecar":
            pathlib.Path({str(settings)!r}).write_text("thresholds: {{latency_ratio: 4}}\\n")
        if name in ("exporter.cli", "exporter.sidecar"):
            os.kill(os.getpid(), signal.SIGHUP)
sys.meta_path.insert(0, Imports())
from exporter.__main__ import main
main()
"""
    with Process("-c", str(settings), "--gpus", "none", python=("-c", as_it_starts)) as run:
        eventually(lambda: 'stopline_threshold{line="latency_ratio"} 4.0' in fetch(run.port))
        assert run.end()[0] == 0


def test_the_doctor_works_beside_a_sidecar_with_the_same_settings(tmp_path: Path) -> None:
    log, state = tmp_path / "server.log", tmp_path / "state"
    log.write_text(SEED)
    arguments = ("--log", str(log), "--state-dir", str(state), "--gpus", "none")
    with Process(*arguments) as run:
        eventually(lambda: "stopline_log_lines_total" in fetch(run.port))
        listen = ("--web.listen-address", f"127.0.0.1:{run.port}", "--seconds", "0.1")
        command = [sys.executable, "-m", "exporter", "doctor", *arguments, *listen]
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert (result.returncode, result.stderr) == (1, "")
        assert result.stdout.splitlines()[-3:] == [
            "  latency  can be judged: from the log",
            "  errors   can be judged: from the log",
            "  memory   cannot be judged: no GPU is read, no page is read and no line tells how full the KV cache is",
        ]
        with log.open("a") as out:
            out.write(SEED)
        eventually(lambda: 'stopline_requests_total{model="",outcome="ok"} 1.0' in fetch(run.port))
        assert run.end()[0] == 0


def test_spans_that_an_engine_sends_are_on_the_page_and_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    body = (Path(__file__).parent / "fixtures/vllm/0.32.0/otlp-body-1-span.bin").read_bytes()
    config, port = tmp_path / "stopline.yml", free_port()
    config.write_text(f"engine: {{name: vllm}}\ntraces: {{listen_address: '127.0.0.1:{port}'}}\n")
    with Process("-c", str(config), "--gpus", "none") as run:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/traces", body, {"Content-Type": "application/x-protobuf"}
        )
        assert urllib.request.urlopen(request, timeout=5).status == 200
        assert 'stopline_request_latency_seconds_count{model="",source="trace"} 1.0' in fetch(run.port)
        assert 'stopline_source_up{source="traces"} 1.0' in fetch(run.port)
        command = [sys.executable, "-m", "exporter", "run", "-c", str(config), "--gpus", "none"]
        command += ["--web.listen-address", f"127.0.0.1:{free_port()}"]
        second = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        assert run.end()[0] == 0
    assert second.returncode == 2
    assert second.stderr.splitlines()[-1].startswith(f"traces.listen_address 127.0.0.1:{port}: ")

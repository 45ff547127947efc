"""Strangers, other limits and other clocks: the next scrape is answered, and nothing is lost or counted twice."""

import asyncio
import re
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from incidents import poisson
from process import Process, eventually, fetch
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from realengine import until
from replay import Replica
from vitals import Vitals

from exporter.simulator import EngineConfig
from exporter.web import build_app

SEED = "[request_id=xxx] queue_wait_ms=12.3 step_latency_ms=45.6 total_ms=57.9\n"
OK = 'stopline_requests_total{{model="",outcome="ok"}} {:.1f}'


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    path.touch()
    return path


@contextmanager
def running(log: Path, *arguments: str, **options: object) -> Iterator[Process]:
    with Process("--log", str(log), "--gpus", "none", *arguments, **options) as run:
        eventually(lambda: "stopline_log_lines_total" in fetch(run.port))
        yield run


def write(log: Path, text: str) -> None:
    with log.open("a") as out:
        out.write(text)


def limited(what: int, most: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(what, (most, most))


def resident_bytes(run: Process) -> int:
    return Vitals.of(run.process.pid).resident_bytes


@pytest.mark.parametrize("said", [b"", b"GET /metr", b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"])
def test_two_hundred_clients_that_never_finish_keep_nobody_waiting(log: Path, said: bytes) -> None:
    with running(log) as run, ExitStack() as clients:
        for _ in range(200):
            clients.enter_context(socket.create_connection(("127.0.0.1", run.port), 5)).sendall(said)
        write(log, SEED)
        eventually(lambda: OK.format(1) in fetch(run.port))
        assert run.end()[0] == 0


async def test_a_thousand_scrapes_at_once_are_answered_and_cost_few_renderings() -> None:
    rendered: list[int] = []

    class Counted:
        def collect(self) -> Iterator[GaugeMetricFamily]:
            rendered.append(1)
            yield GaugeMetricFamily("told", "Anything.", 1.0)

    registry = CollectorRegistry()
    registry.register(Counted())
    rendered.clear()
    app = build_app(registry, ready=list, state=lambda: pytest.fail("nobody asked"))
    async with TestClient(TestServer(app)) as client:
        answers = await asyncio.gather(*(client.get("/metrics") for _ in range(1000)))
        bodies = {await answer.text() for answer in answers}
    assert bodies == {"# HELP told Anything.\n# TYPE told gauge\ntold 1.0\n"}
    assert len(rendered) < 500


def test_a_header_of_a_megabyte_is_refused(log: Path) -> None:
    with running(log) as run:
        with socket.create_connection(("127.0.0.1", run.port), 5) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX: ")
            answer = b""
            try:
                for _ in range(16):
                    client.sendall(b"a" * 65536)
                answer = client.recv(100)
            except (BrokenPipeError, ConnectionResetError):
                pass  # refused before it was all sent
        assert answer in (b"",) or b" 400 " in answer
        assert "stopline_build_info" in fetch(run.port)
        code, errors = run.end()
    assert (code, "Traceback" in errors) == (0, False)


def test_with_sixty_four_descriptors_it_goes_on_once_they_are_free(log: Path) -> None:
    with running(log, preexec_fn=limited(resource.RLIMIT_NOFILE, 64)) as run:
        with ExitStack() as clients:
            for _ in range(100):
                clients.enter_context(socket.create_connection(("127.0.0.1", run.port), 5))
            write(log, SEED * 3)
        eventually(lambda: OK.format(3) in fetch(run.port))
        code, errors = run.end()
    assert (code, errors.count("connections are not accepted") <= 1, "Traceback" in errors) == (0, True, False)


def test_suspended_while_the_log_is_rotated_it_counts_each_line_once(log: Path) -> None:
    with running(log) as run:
        write(log, SEED)
        eventually(lambda: OK.format(1) in fetch(run.port))
        run.process.send_signal(signal.SIGSTOP)
        write(log, SEED * 2)
        log.rename(log.with_suffix(".1"))
        write(log, SEED * 4)
        run.process.send_signal(signal.SIGCONT)
        eventually(lambda: OK.format(7) in fetch(run.port))
        write(log, SEED)
        eventually(lambda: OK.format(8) in fetch(run.port))


def test_where_nothing_can_be_written_only_the_checkpoint_is_lost(log: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    with running(log, "--state-dir", str(state), preexec_fn=limited(resource.RLIMIT_FSIZE, 0)) as run:
        write(log, SEED * 2)
        eventually(lambda: OK.format(2) in fetch(run.port))
        write(log, SEED)
        eventually(lambda: OK.format(3) in fetch(run.port))
        code, errors = run.end()
    assert (code, errors.count("no checkpoint")) == (0, 1)


def test_a_line_of_a_hundred_megabytes_and_garbage_take_no_memory(log: Path) -> None:
    with running(log) as run:
        write(log, SEED)
        eventually(lambda: OK.format(1) in fetch(run.port))
        before = resident_bytes(run)
        with log.open("ab") as out:
            for _ in range(100):
                out.write(b"queue_wait_ms=" + b"9" * (2**20 - 14))
            out.write(b"\n")
            garbage = bytes(range(256)) * 256
            for _ in range(300):
                out.write(garbage)
            out.write(b"\n" + SEED.encode())
        until(lambda: OK.format(2) in fetch(run.port), 120, "all of it was read")
        assert resident_bytes(run) - before < 16 * 2**20


def test_a_flood_of_garbage_and_forged_prompts_is_told_and_counts_as_nothing(log: Path) -> None:
    """A hundred megabytes at once, in which a thousand prompts speak of errors."""
    start = "(APIServer pid=914) {} 11-30 07:26:42 [{}] Request cmpl-{}"
    forged = start.format(
        "DEBUG", "request_logger.py:53", "{} details: prompt: 'why?\\nERROR 11-30 07:26:24 [core.py:9] {}\\n', "
    )
    forged += "prompt_token_ids: None, prompt_embeds shape: None.\n"
    aborted = start.format("INFO", "async_llm.py:700", "1 aborted.\n")
    with running(log, "--engine", "vllm") as run:
        before, behind = resident_bytes(run), [0.0]

        def read() -> bool:
            page = fetch(run.port)
            behind.append(float(re.search(r"(?m)^stopline_log_lag_bytes\S* (\S+)", page)[1]))
            return 'stopline_requests_total{model="",outcome="aborted"} 1.0' in page and behind[-1] == 0

        with log.open("ab") as out:
            garbage = bytes(range(256)) * 4096
            for n in range(100):
                out.write(garbage + b"\n")
                for prompt in range(10):
                    out.write(forged.format(10 * n + prompt, "torch.OutOfMemoryError: CUDA out of memory.").encode())
            out.write(aborted.encode())
        until(read, 120, "all of it was read")
        assert max(behind) > 2**20
        assert resident_bytes(run) - before < 16 * 2**20
        kinds = re.findall(r'(?m)^stopline_errors_total\{kind="\w+",source="log"\} (\S+)', fetch(run.port))
        assert set(kinds) == {"0.0"}


def _seen(replica: Replica) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in replica.sidecar.registry.collect()
        for sample in family.samples
        if family.type in ("counter", "histogram") and not sample.name.startswith("process_")
    }


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_clock_that_is_set_changes_no_count_and_no_time(step: float) -> None:
    """By an hour and back, amid traffic."""
    told = []
    for ahead in (0.0, step):
        replica = Replica("clock", EngineConfig.hy3_h20())
        replica.set_load(poisson(2.0))
        for offset in (0.0, ahead, 0.0):
            replica.wall_ahead = offset
            replica.run(60)
        told.append(_seen(replica))
    assert told[0] == told[1]

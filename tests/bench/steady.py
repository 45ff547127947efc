"""What a sidecar costs beside a server that does nothing unusual: at rest, at each poll, and for who scrapes it."""

import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import beside
import engine_page
import fake_nvml
import log_path
import vllm_log
from prometheus_client.parser import text_string_to_metric_families
from rows import Row

from exporter.engines import profile as profiles
from exporter.sources.page import PageReader

GPUS = 8
RANKS = 6  # whose page has 200 KB
POLLS = 30
MODELS = 5  # whose series are some 2,000
SCRAPE_SECONDS = 15.0
PROBES = 100
STARTS = 5
_GROWTH = 60  # pages that differ
_NO_GPU = ("--gpus", "none")


def polling(rounds: int) -> Row:
    """Processor time for one large page whose values changed since the last, beside the stock parser."""
    page = engine_page.of_engines(RANKS)
    pages = [engine_page.later(page, poll) for poll in range(POLLS)]
    reader = PageReader(profiles.bundled("vllm"))
    for text in pages[:3]:
        reader.read(text)
    mine, other = in_turns(
        lambda: [reader.read(text) for text in pages],
        lambda: [list(text_string_to_metric_families(text)) for text in pages],
        rounds,
    )
    return Row.beside(
        f"vLLM page of {len(page) / 1000:.0f} KB read",
        "CPU ms",
        1000 * mine / POLLS,
        1000 * other / POLLS,
        "stock parser",
    )


def in_turns(ours: Callable[[], object], theirs: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median processor seconds of both, taken in turns."""

    def cpu(function: Callable[[], object]) -> float:
        began = time.process_time()
        function()
        return time.process_time() - began

    times = [(cpu(ours), cpu(theirs)) for _ in range(rounds)]
    return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)


def beside_a_server(seconds: float) -> Iterator[Row]:
    """Percent of a core and resident memory: GPUs alone, then all that a sidecar usually has."""
    with _gpus() as (library, environment):
        with beside.running("--gpus", "all", environment=environment) as sidecar:
            before = sidecar.vitals()
            time.sleep(seconds)
            yield Row(f"{GPUS} GPUs once a second, alone", "% of a core", beside.share(before, sidecar.vitals()))
        page = engine_page.of_engines(RANKS)
        pages = [engine_page.later(page, poll) for poll in range(_GROWTH)]
        log = library.with_name("server.log")
        log.touch()
        with engine_page.served(pages) as url:
            arguments = ("--engine-url", url, "--gpus", "all", "--log", str(log))
            with beside.running(*arguments, environment=environment) as sidecar:
                before = sidecar.vitals()
                _usual(sidecar, log, seconds)
                after = sidecar.vitals()
    yield Row("steady: page, GPUs, 100 lines/s, scrapes", "% of a core", beside.share(before, after))
    yield Row("resident memory then", "MB", after.resident_bytes / 1e6)


@contextmanager
def _gpus() -> Iterator[tuple[Path, dict[str, str]]]:
    """The stand-in library with eight GPUs, and the environment in which it is found."""
    with tempfile.TemporaryDirectory() as folder:
        library = fake_nvml.build(Path(folder))
        hardware = fake_nvml.Hardware(Path(folder))
        hardware.set({"count": GPUS})
        state = {"FAKE_NVML_STATE": hardware.env["FAKE_NVML_STATE"], "LD_LIBRARY_PATH": folder}
        yield library, state


def _usual(sidecar: beside.Sidecar, log: Path, seconds: float) -> None:
    """A hundred lines a second, and a scrape every so often."""
    lines = _lines(1)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        log_path.grow(log, lines, 100, min(SCRAPE_SECONDS, end - time.monotonic()))
        sidecar.page()


def _lines(megabytes: int) -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "server.log")
        vllm_log.write(path, vllm_log.MIXED, megabytes)
        return [line for line in path.read_bytes().splitlines(keepends=True) if b" aborted." not in line]


def scrapes(count: int) -> Iterator[Row]:
    """Milliseconds for a page of 2,000 series; asked for a tenth of a second apart, for else it is the one before."""
    one = engine_page.of_engines(1)
    page = "".join(one.replace('model_name="', f'model_name="{model}-') for model in range(MODELS))
    with engine_page.served([page]) as url, beside.running("--engine-url", url, *_NO_GPU) as sidecar:
        told = sidecar.until("stopline_request_latency_seconds_bucket")
        series = sum(line[:1] not in ("#", "") for line in told.split("\n"))
        took = []
        for _ in range(count):
            time.sleep(0.11)
            began = time.perf_counter()
            sidecar.page()
            took.append(1000 * (time.perf_counter() - began))
    yield Row(f"/metrics of {series:,} series, P50", "ms", statistics.median(took))
    yield Row(f"/metrics of {series:,} series, P99", "ms", _p99(took))


def line_to_metric() -> Iterator[Row]:
    """Milliseconds from a line's being written to its being on the page: of a hundred, the second slowest."""
    with tempfile.TemporaryDirectory() as folder:
        probe, busy = Path(folder, "probe.log"), Path(folder, "busy.log")
        probe.touch()
        busy.touch()
        arguments = ("--engine", "vllm", *_NO_GPU, "--log", str(probe), "--log", str(busy))
        with beside.running(*arguments) as sidecar:
            yield Row("line to metric, quiet, P99", "ms", _p99(_probes(sidecar, probe, 0)))
            stop = threading.Event()
            thread = threading.Thread(target=_grow_until, args=(stop, busy, _lines(4)))
            thread.start()
            try:
                yield Row("line to metric, 10,000 lines/s, P99", "ms", _p99(_probes(sidecar, probe, PROBES)))
            finally:
                stop.set()
                thread.join()


def _grow_until(stop: threading.Event, path: Path, lines: list[bytes]) -> None:
    while not stop.is_set():
        log_path.grow(path, lines, log_path.LINES_A_SECOND, 1.0)


def _probes(sidecar: beside.Sidecar, log: Path, already: int) -> list[float]:
    name, rng, took = "stopline_requests_total", random.Random(1), []
    for number in range(already + 1, already + PROBES + 1):
        time.sleep(rng.uniform(0.0, 0.2))
        began = time.perf_counter()
        with log.open("a") as out:
            out.write(f"INFO 11-30 07:26:42 [async_llm.py:700] Request cmpl-{number} aborted.\n")
        sidecar.until(f'{name}{{model="",outcome="aborted"}} {number:.1f}\n', name)
        took.append(1000 * (time.perf_counter() - began))
    return took


def starts() -> Iterator[Row]:
    """Seconds from the command to the first page, and processor seconds of the imports beside what they need."""
    took = []
    for _ in range(STARTS):
        began = time.perf_counter()
        with beside.started("--engine-url", "http://127.0.0.1:9", *_NO_GPU) as sidecar:
            sidecar.until("stopline_build_info")
            took.append(time.perf_counter() - began)
    yield Row("start to the first page", "s", statistics.median(took))
    ours, needed = "exporter.cli, exporter.sidecar", "aiohttp.web, prometheus_client, yaml, msgspec, click, tenacity"
    times = [(_importing(ours), _importing(needed)) for _ in range(STARTS)]
    mine, other = (1000 * statistics.median(t[n] for t in times) for n in (0, 1))
    yield Row.beside("imports", "CPU ms", mine, other, "of its libraries alone")


def _importing(modules: str) -> float:
    process = subprocess.Popen([sys.executable, "-c", f"import {modules}"])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"import {modules} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98]

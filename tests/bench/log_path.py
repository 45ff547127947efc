"""The log path beside mtail: reading whole logs, a backlog, and following a growing one.

mtail runs `usual.mtail`, which counts the same. Both must count what was written, else there is no figure.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import beside
import vllm_log
from rows import Row
from vitals import Vitals

from exporter import catalog
from exporter.engines import profile as profiles
from exporter.lifecycle import Lifecycle
from exporter.sources.files import LogFiles
from exporter.sources.lines import Lines
from exporter.store import Store

PROGRAM = Path(__file__).parent / "usual.mtail"
LINES_A_SECOND = 10_000
_WRITES_A_SECOND = 50
_FOLLOWING = ("--engine", "vllm", "--gpus", "none", "--log")


def read(mix: vllm_log.Mix, megabytes: int, rounds: int) -> Row:
    """CPU seconds for a whole log, in turns; medians."""
    with tempfile.TemporaryDirectory() as folder:
        log, empty = Path(folder, "server.log"), Path(folder, "empty.log")
        held = vllm_log.write(log, mix, megabytes)
        empty.touch()
        ours, theirs = [], []
        for _ in range(rounds):
            for times, contestant in ((ours, stopline), (theirs, mtail)):
                seconds, counted = contestant(log)
                if counted != held:
                    sys.exit(f"{contestant.__name__} counted {counted} of {held}")
                times.append(seconds)
        mine, other = statistics.median(ours), statistics.median(theirs) - mtail(empty)[0]
        return Row.beside(f"{megabytes} MB: {mix.name}", "CPU s", mine, other, "mtail")


def stopline(path: Path) -> tuple[float, Counter[str]]:
    """Tailer, whole vLLM profile, store; without the start of Python."""
    store = Store()
    now = time.monotonic()
    lines = Lines("log", profiles.bundled("vllm"), store, Lifecycle(has_page=False), clock=lambda: now)
    files = LogFiles(path, checkpoint=None, clock=time.monotonic, wall=time.time, from_start=True)
    began = time.process_time()
    for chunk in files.poll():
        lines.feed(chunk.data, history=False)
    seconds = time.process_time() - began
    files.close()
    now += 60  # so that the last error is judged
    lines.flush()
    steps = store.histograms[catalog.STEP_LATENCY].items()
    counted = Counter({f"steps{{{labels[1]}}}": buckets.cumulative()[-1] for labels, buckets in steps})
    counted |= {f"errors{{{labels[0]}}}": int(n) for labels, n in store.counters[catalog.ERRORS].items()}
    counted["aborted"] = int(sum(store.counters[catalog.REQUESTS].values()))
    return seconds, counted


def mtail(path: Path) -> tuple[float, Counter[str]]:
    """The whole process."""
    command = ["mtail", "--one_shot", "--one_shot_format", "prometheus", "--progs", PROGRAM, "--logs", path]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"mtail ended with {process.returncode}")
        output.seek(0)
        told = re.findall(
            r'^(errors|step_seconds_count|aborted)\{(?:\w+="(\w+)",)?prog="[\w.]+"\} (\d+)$', output.read(), re.M
        )
    counted: Counter[str] = Counter()
    for name, label, count in told:
        short = name.replace("step_seconds_count", "steps")
        counted[f"{short}{{{label}}}" if label else short] = int(count)
    return usage.ru_utime + usage.ru_stime, counted


def backlog(megabytes: int) -> Row:
    """Milliseconds that ``/metrics`` takes while so much is being read: of a hundred answers, the second slowest."""
    with tempfile.TemporaryDirectory() as folder:
        log, behind = Path(folder, "server.log"), Path(folder, "behind.log")
        log.touch()
        vllm_log.write(behind, vllm_log.MIXED, megabytes)
        size = behind.stat().st_size
        with beside.running(*_FOLLOWING, str(log)) as sidecar:
            behind.replace(log)
            end, took = time.monotonic() + beside.PATIENCE_SECONDS, []
            while time.monotonic() < end:
                began = time.perf_counter()
                page = sidecar.page()
                took.append(1000 * (time.perf_counter() - began))
                if float(re.search(r"^stopline_log_bytes_total\S* (\S+)", page, re.M)[1]) >= size:
                    return Row(f"{megabytes} MB backlog, /metrics P99", "ms", statistics.quantiles(took, n=100)[98])
    sys.exit(f"a backlog of {megabytes} MB was not read in {beside.PATIENCE_SECONDS} s")


def following(seconds: float) -> Iterator[Row]:
    """Percent of a core while a log grows by 10,000 lines a second, and idle."""
    with tempfile.TemporaryDirectory() as folder:
        source, ours, theirs = (Path(folder, name) for name in ("source.log", "server.log", "mtail.log"))
        vllm_log.write(source, vllm_log.MIXED, 4)
        lines = source.read_bytes().splitlines(keepends=True)
        ours.touch()
        theirs.touch()
        with beside.running(*_FOLLOWING, str(ours)) as sidecar:
            idle, busy = (_share(sidecar.process.pid, ours, written, seconds) for written in ([], lines))
            told = re.search(r"^stopline_log_lines_total\S* (\S+)", sidecar.page(), re.M)
            if float(told[1]) < 0.95 * LINES_A_SECOND * seconds:
                sys.exit(f"only {told[1]} lines were read")
        port = beside.free_port()
        command = ["mtail", "--progs", PROGRAM, "--logs", theirs, "--port", str(port), "--address", "127.0.0.1"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            other = _share(process.pid, theirs, [], 2) and _share(process.pid, theirs, lines, seconds)
        finally:
            process.kill()
            process.wait()
        yield Row.beside("following 10,000 lines/s", "% of a core", busy, other, "mtail")
        yield Row("following a quiet log", "% of a core", idle)


def _share(pid: int, path: Path, lines: list[bytes], seconds: float) -> float:
    """Percent of a core that the process takes while *lines*, over and over, are written at their rate."""
    before = Vitals.of(pid)
    grow(path, lines, LINES_A_SECOND, seconds)
    return beside.share(before, Vitals.of(pid))


def grow(path: Path, lines: list[bytes], rate: int, seconds: float) -> None:
    """Append *lines*, over and over, *rate* a second, or nothing if there are none, for so long."""
    each, at, began = rate // _WRITES_A_SECOND, 0, time.monotonic()
    with path.open("ab", buffering=0) as out:
        for number in range(1, int(seconds * _WRITES_A_SECOND) + 1):
            if lines:
                out.write(b"".join(lines[at : at + each]))
                at = (at + each) % (len(lines) - each)
            time.sleep(max(0.0, began + number / _WRITES_A_SECOND - time.monotonic()))

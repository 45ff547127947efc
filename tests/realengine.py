"""Real engines on this machine: started, logged to a file, stopped; and a sidecar beside them."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from load import Seen, drive
from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parent / "engines"))
from install import ensure

ENGINES = Path(__file__).parent / "engines"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def until(condition, seconds: float, what: str):
    """The first true value of *condition*, asked again and again; connection errors count as not yet."""
    end = time.monotonic() + seconds
    while True:
        try:
            if value := condition():
                return value
        except OSError:
            pass
        assert time.monotonic() < end, f"not in {seconds:g} s: {what}"
        time.sleep(0.05)


def get(url: str) -> str:
    return urllib.request.urlopen(url, timeout=5).read().decode()


class Server:
    """A real inference server writing its log to *log*, appended to over restarts."""

    def __init__(self, command: list[str | Path], port: int, log: Path, **environment: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._command = [str(c) for c in command]
        self._environment = os.environ | environment
        self.process: subprocess.Popen | None = None

    def start(self, seconds: float) -> "Server":
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self._command, stdout=out, stderr=subprocess.STDOUT, env=self._environment, start_new_session=True
            )
        until(self._healthy, seconds, f"{self._command[0]} healthy; see {self.log}")
        return self

    def _healthy(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        return urllib.request.urlopen(self.url + "/health", timeout=5).status == 200

    def children(self) -> dict[int, str]:
        """Process ids of everything below the server, with their command lines."""
        assert self.process is not None
        found, parents = {}, [self.process.pid]
        while parents:
            try:
                pids = Path(f"/proc/{(parent := parents.pop())}/task/{parent}/children").read_text().split()
            except OSError:
                continue
            for pid in map(int, pids):
                parents.append(pid)
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
        return found

    def stop(self, number: int = signal.SIGTERM, seconds: float = 30.0) -> None:
        """End it, at last by force, with everything it started."""
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGKILL)


_QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",  # with two on two shared cores, a stray process stalls single requests for seconds
}
VLLM_SLOTS = 8


def vllm(log: Path, *arguments: str, model: str = "tiny-hy3", name: str = "hy3", **environment: str) -> Server:
    """vLLM serving a tiny *model* as *name* on the CPU, installed first where it is not; not started yet.

    Eight slots, so that a queue forms from sixteen clients on. Raises CalledProcessError if it cannot be installed.
    """
    root, port = ensure("vllm"), free_port()
    command = [root / "venv/bin/vllm", "serve", root / model, "--served-model-name", name]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "512"]
    command += ["--max-num-seqs", str(VLLM_SLOTS), "--enforce-eager", *arguments]
    log.touch()
    return Server(command, port, log, **_QUIET, **environment)


def with_traces(port: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Arguments and environment for vLLM to send its spans to *port*, twice a second."""
    arguments = ("--otlp-traces-endpoint", f"http://127.0.0.1:{port}/v1/traces")
    return arguments, {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "500"}


def traced_watcher(server: Server, port: int, directory: Path) -> "Watcher":
    """A sidecar that takes the spans of *server* in at *port*."""
    config = directory / "traced.yml"
    config.write_text(f"engine: {{name: vllm}}\ntraces: {{listen_address: '127.0.0.1:{port}'}}\n")
    return Watcher("-c", str(config), "--engine-url", server.url, "--engine", "vllm", "--gpus", "none")


class Page:
    """One exposition of the sidecar: samples by name and labels."""

    def __init__(self, text: str) -> None:
        self.samples = {
            (s.name, frozenset(s.labels.items())): s.value
            for f in text_string_to_metric_families(text)
            for s in f.samples
        }

    def __call__(self, name: str, /, **labels: str) -> float:
        """The sum of the series of ``stopline_name`` with these labels; 0 if there is none."""
        return sum(self.all(name, **labels).values())

    def all(self, name: str, /, **labels: str) -> dict[frozenset, float]:
        wanted = set(labels.items())
        return {k[1]: v for k, v in self.samples.items() if k[0] == f"stopline_{name}" and wanted <= k[1]}

    def labelled(self, name: str, label: str, /, **labels: str) -> dict[str, float]:
        """The series of ``stopline_name`` by the value of *label*."""
        return {dict(key)[label]: value for key, value in self.all(name, **labels).items()}

    def errors(self) -> dict[str, float]:
        """Errors by kind, of those that occurred."""
        kinds = self.labelled("errors_total", "kind")
        return {kind: total for kind in kinds if (total := self("errors_total", kind=kind))}

    def mean(self, name: str, before: "Page", /, **labels: str) -> float:
        """The mean of what a histogram got since the page *before*."""
        total, count = (
            self(f"{name}_{part}", **labels) - before(f"{name}_{part}", **labels) for part in ("sum", "count")
        )
        return total / count

    def quantile(self, q: float, name: str, before: "Page", /, **labels: str) -> float:
        """The *q* quantile of what a histogram got since the page *before*, as Prometheus would compute it."""
        counts: dict[float, float] = {}
        for page, sign in ((self, 1), (before, -1)):
            for key, value in page.all(f"{name}_bucket", **labels).items():
                le = float(dict(key)["le"])
                counts[le] = counts.get(le, 0.0) + sign * value
        bounds = sorted(counts)
        rank, low, below = q * counts[bounds[-1]], 0.0, 0.0
        for le in bounds:
            if counts[le] >= rank:
                return low + (le - low) * (rank - below) / (counts[le] - below)
            low, below = le, counts[le]
        raise AssertionError("unreachable")


class Watcher:
    """``stopline run`` beside a server, as a user starts it."""

    def __init__(self, *arguments: str) -> None:
        self.port = free_port()
        self._command = [sys.executable, "-m", "exporter", "run", "--web.listen-address", f"127.0.0.1:{self.port}"]
        self._command += arguments

    def __enter__(self) -> "Watcher":
        self.process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True)
        until(lambda: get(f"http://127.0.0.1:{self.port}/-/ready"), 20, "the sidecar is ready")
        return self

    def page(self) -> Page:
        return Page(get(f"http://127.0.0.1:{self.port}/metrics"))

    def settled(self) -> Page:
        """The page after two further polls of the engine."""
        start = self.page()("source_last_success_timestamp_seconds", source="metrics")
        until(
            lambda: self.page()("source_last_success_timestamp_seconds", source="metrics") > start + 1.5,
            20,
            "two further polls",
        )
        return self.page()

    def drive(self, url: str, model: str, **options) -> tuple[list[Seen], dict[str, float]]:
        """Load on the server, and the highest gauges on any page meanwhile."""
        most = {"requests_running": 0.0, "requests_waiting": 0.0, "kv_cache_usage_ratio": 0.0}

        def watch() -> None:
            page = self.page()
            most.update({name: max(value, page(name)) for name, value in most.items()})

        return asyncio.run(drive(url, model, watch, **options)), most

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=10)
        self.errors = errors
        assert self.process.returncode == 0, errors

"""``stopline run`` as a process of its own, for measuring it from outside."""

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from vitals import Vitals

PATIENCE_SECONDS = 300.0


class Sidecar:
    """A running one: its process and its page, over one connection that is kept."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process, self.port = process, port
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)

    def page(self, *names: str) -> str:
        """/metrics, or only the families of these names; empty as long as nothing answers."""
        query = "&".join(f"name[]={name}" for name in names)
        try:
            self._connection.request("GET", f"/metrics?{query}")
            return self._connection.getresponse().read().decode()
        except (ConnectionError, http.client.HTTPException):
            self._connection.close()
            return ""

    def vitals(self) -> Vitals:
        return Vitals.of(self.process.pid)

    def until(self, text: str, *names: str) -> str:
        """The first page that holds *text*; SystemExit if there is none."""
        end = time.monotonic() + PATIENCE_SECONDS
        while text not in (page := self.page(*names)):
            if self.process.poll() is not None or time.monotonic() > end:
                sys.exit(f"stopline never told {text!r}")
            time.sleep(0.01)
        return page


@contextmanager
def started(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[Sidecar]:
    """As soon as the process is there; nothing may answer yet."""
    port = free_port()
    command = [sys.executable, "-m", "exporter", "run", "--web.listen-address", f"127.0.0.1:{port}", *arguments]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, env=os.environ | (environment or {}), **quiet)
    try:
        yield Sidecar(process, port)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


@contextmanager
def running(*arguments: str, environment: dict[str, str] | None = None) -> Iterator[Sidecar]:
    """When it reads its sources and what starting costs is over."""
    with started(*arguments, environment=environment) as sidecar:
        sidecar.until("stopline_source_up")
        time.sleep(2)
        yield sidecar


def share(before: Vitals, after: Vitals) -> float:
    """Percent of a core between two moments."""
    return 100 * (after.cpu_seconds - before.cpu_seconds) / (after.at - before.at)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

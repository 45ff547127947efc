"""The whole way of a page: Debian's Prometheus with the shipped rules, its Alertmanager, and somebody who is paged.

The rules are shortened by the generator that ships with them, so that minutes are seconds.
"""

import json
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

import yaml
from realengine import free_port, get, until

GENERATE = Path(__file__).parent.parent / "deploy/rules/generate.py"
TIMES = 30  # as fast: five minutes are ten seconds

_Json = dict


class _Webhook(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.received += json.loads(self.rfile.read(int(self.headers["Content-Length"])))["alerts"]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


class Pager:
    """Scrapes *port* of this host each second; what Alertmanager sends is in *alerts*, oldest first."""

    def __init__(self, port: int, directory: Path) -> None:
        self._target, self._directory = port, directory
        self._processes: list[subprocess.Popen] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Webhook)
        self.alerts: list[_Json] = []
        self._server.received = self.alerts
        self._prometheus, self._alertmanager = free_port(), free_port()

    def __enter__(self) -> "Pager":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        webhook = f"http://127.0.0.1:{self._server.server_address[1]}/"
        self._write("alertmanager.yml", {
            "route": {"receiver": "all", "group_wait": "0s", "group_interval": "1s", "group_by": ["alertname"]},
            "receivers": [{"name": "all", "webhook_configs": [{"url": webhook, "send_resolved": True}]}],
        })  # fmt: skip
        rules = subprocess.run(
            [sys.executable, GENERATE, "--form", "rules", "--shorten", str(TIMES)], check=True, capture_output=True
        ).stdout
        (self._directory / "rules.yml").write_bytes(rules)
        self._write("prometheus.yml", {
            "global": {"scrape_interval": "1s", "scrape_timeout": "900ms", "evaluation_interval": "1s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [
                {"job_name": "stopline", "static_configs": [{"targets": [f"127.0.0.1:{self._target}"]}]}
            ],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{self._alertmanager}"]}]}]},
        })  # fmt: skip
        self._start(
            *("prometheus-alertmanager", "--config.file=alertmanager.yml", "--storage.path=alertmanager"),
            *("--cluster.listen-address=", f"--web.listen-address=127.0.0.1:{self._alertmanager}"),
        )
        self._start(
            *("prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=tsdb"),
            *("--query.lookback-delta=10s", f"--web.listen-address=127.0.0.1:{self._prometheus}"),
        )
        for port in (self._alertmanager, self._prometheus):
            until(lambda port=port: get(f"http://127.0.0.1:{port}/-/ready"), 30, "ready to page")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self._processes:
            process.terminate()
            process.wait(10)
        self._server.shutdown()
        self._server.server_close()

    def query(self, expression: str) -> list[_Json]:
        """What Prometheus gives for *expression* now."""
        asked = urllib.parse.urlencode({"query": expression})
        return json.loads(get(f"http://127.0.0.1:{self._prometheus}/api/v1/query?{asked}"))["data"]["result"]

    def value(self, expression: str) -> float | None:
        """The number that *expression* gives; None without one."""
        found = self.query(expression)
        return float(found[0]["value"][1]) if found else None

    def told(self, status: str = "firing") -> set[str]:
        """Names of all alerts that wake somebody and were sent with this *status*."""
        sent = (alert["labels"] for alert in self.alerts if alert["status"] == status)
        return {labels["alertname"] for labels in sent if labels["severity"] == "critical"}

    def wait(self, name: str, seconds: float, status: str = "firing") -> _Json:
        """The last alert *name* that was sent with this *status*."""

        def sent() -> list[_Json]:
            return [a for a in self.alerts if a["labels"]["alertname"] == name and a["status"] == status]

        until(sent, seconds, f"{name} {status}; sent were {[(a['labels'], a['status']) for a in self.alerts]}")
        return sent()[-1]

    def _write(self, name: str, content: _Json) -> None:
        (self._directory / name).write_text(yaml.safe_dump(content))

    def _start(self, *command: str) -> None:
        with (self._directory / f"{command[0]}.log").open("wb") as log:
            self._processes.append(subprocess.Popen(command, cwd=self._directory, stdout=log, stderr=subprocess.STDOUT))

"""deploy/compose as podman-compose starts it: the image, an engine's stand-in, Prometheus and Alertmanager, and a page.

The file is the one that ships. Beside it an override puts all services into the network of the test, under the names
that they have there, as podman can make no network of its own here. The images of Prometheus and Alertmanager are made
of Debian's programs (run.sh). The rules are shortened by their own generator. Grafana is left out: there is no image of it.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from manifests import DEPLOY
from pager import GENERATE, TIMES
from realengine import Page, get, until

SERVICES = ("engine", "stopline", "prometheus", "alertmanager")


class Stack:
    """A copy of deploy/ and what podman-compose makes of it."""

    def __init__(self, directory: Path) -> None:
        self._compose = directory / "deploy/compose"
        shutil.copytree(DEPLOY, directory / "deploy")
        for path in (directory / "deploy/rules").glob("*.yaml"):
            path.unlink()
        made = [sys.executable, GENERATE, "--form", "rules", "--shorten", str(TIMES)]
        fast = subprocess.run(made, capture_output=True, check=True).stdout
        (directory / "deploy/rules/fast.yaml").write_bytes(fast)
        prometheus = self._compose / "prometheus.yml"
        prometheus.write_text(prometheus.read_text().replace(": 15s", ": 1s"))
        here = {"network_mode": "host", "extra_hosts": [f"{name}:127.0.0.1" for name in SERVICES]}
        services = {"services": dict.fromkeys(SERVICES, here)}
        (self._compose / "override.yaml").write_text(yaml.safe_dump(services))

    def __call__(self, *arguments: str) -> str:
        """What podman-compose prints for a command."""
        compose = Path(sys.executable).parent / "podman-compose"
        command = [compose, "-f", "compose.yaml", "-f", "override.yaml", *arguments]
        result = subprocess.run(
            command, cwd=self._compose, capture_output=True, text=True, check=False, env=os.environ | {"NO_COLOR": "1"}
        )
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("compose"))
    try:
        stack("up", "--detach", "--no-build", *SERVICES)
        yield stack
    finally:
        if container("engine")["State"]["Status"] == "paused":  # such a one cannot be stopped
            podman("unpause", "compose_engine_1")
        stack("down", "--volumes", "--timeout", "2")


def page() -> Page:
    return Page(get("http://127.0.0.1:10777/metrics"))


def alerts() -> set[str]:
    """Names of the alerts that Alertmanager holds."""
    given = json.loads(get("http://127.0.0.1:9093/api/v2/alerts"))
    return {alert["labels"]["alertname"] for alert in given}


def podman(*arguments: str) -> str:
    return subprocess.run(["podman", *arguments], capture_output=True, text=True, check=True).stdout


def container(name: str) -> dict:
    return json.loads(podman("inspect", f"compose_{name}_1"))[0]


def test_page_log_and_rules_arrive(stack: Stack) -> None:
    until(lambda: page()("engine_up") == 1, 30, "the engine's page is read")
    until(lambda: page()("log_lines_total") > 0, 30, "its log is read")
    targets = "http://127.0.0.1:9090/api/v1/targets"
    until(lambda: [t["health"] for t in json.loads(get(targets))["data"]["activeTargets"]] == ["up"], 30, "scraped")
    groups = json.loads(get("http://127.0.0.1:9090/api/v1/rules"))["data"]["groups"]
    assert len({group["name"] for group in groups}) > 5


def test_stopline_has_no_right_that_it_does_not_need(stack: Stack) -> None:
    host = container("stopline")["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert (host["Memory"], host["NanoCpus"]) == (256 << 20, 250_000_000)
    status = Path(f"/proc/{container('stopline')['State']['Pid']}/status").read_text()
    told = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (told["CapEff"], told["CapBnd"], told["NoNewPrivs"]) == ("0" * 16, "0" * 16, "1")
    assert told["Uid"].split() == ["65532"] * 4
    refused = subprocess.run(
        ["podman", "exec", "compose_stopline_1", "touch", "/var/log/engine/x"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Read-only file system" in refused.stderr


def test_a_frozen_engine_is_an_alert_in_alertmanager(stack: Stack) -> None:
    assert "StoplineEngineUnreachable" not in alerts()
    podman("pause", "compose_engine_1")
    until(lambda: "StoplineEngineUnreachable" in alerts(), 60, "the alert")
    podman("unpause", "compose_engine_1")


def test_a_stopped_stopline_goes_on_where_it_was(stack: Stack) -> None:
    """Its place in the log is in the volume `state`: each line that came while it was down is counted once."""
    log = Path(podman("volume", "inspect", "compose_log", "--format", "{{.Mountpoint}}").strip()) / "server.log"

    def written() -> int:
        """Lines in the log, all of them read; the engine is frozen from here on."""
        podman("pause", "compose_engine_1")
        until(lambda: page()("log_lines_total") > 0 and page()("log_lag_bytes") == 0, 30, "it has read all there is")
        return log.read_text().count("\n")

    before = written()
    stack("stop", "stopline")
    assert container("stopline")["State"]["ExitCode"] == 0
    podman("unpause", "compose_engine_1")
    until(lambda: log.read_text().count("\n") > before + 100, 60, "a hundred lines more")
    stack("start", "stopline")
    until(lambda: page()("log_lines_total") > 0, 30, "it reads again")
    after = written()
    until(lambda: page()("log_lines_total") == after - before, 30, f"{after - before} lines are counted")

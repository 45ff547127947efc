"""The image in a pod: the rendered example of llama.cpp, with a stand-in for the engine, run by podman (make test-image).

What podman cannot show: the order in which a kubelet starts and stops, probes, RBAC, admission, GPUs.
"""

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from manifests import DEPLOY, ROOT, containers, kustomize, parsed, pods
from pager import Pager
from prometheus_client.parser import text_string_to_metric_families
from realengine import until
from to_podman import pod

BASE, IMAGE = "localhost/ci/python:3.13-slim-trixie", "localhost/stopline:ci"
LOG = "/var/log/engine/server.log"
HERE = Path(__file__).parent


def podman(*arguments: str | Path, ok: bool = True) -> str:
    result = subprocess.run(["podman", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert not ok or result.returncode == 0, result.stderr
    return result.stdout


def page() -> dict[str, float]:
    """Sidecar's page: the series by ``name{first label's value}``, summed over the other labels."""
    text = urllib.request.urlopen("http://127.0.0.1:10777/metrics", timeout=5).read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> float:
    """Seconds until *condition* holds."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        try:
            if condition():
                return time.monotonic() - began
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError(podman("logs", "--tail", "30", "engine-stopline", ok=False))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    rendered = parsed(kustomize(DEPLOY / "kustomize/examples/llamacpp"))
    settings = [m for m in rendered if m["kind"] == "ConfigMap"]
    made = pod("engine", next(pods(rendered)), {"stopline": IMAGE, "server": BASE})
    models = tmp_path_factory.mktemp("models")
    for name, source in (
        ("engine.py", HERE / "engine.py"),
        ("metrics.txt", ROOT / "tests/fixtures/llamacpp/11434/metrics-idle.txt"),
    ):
        (models / name).write_bytes(source.read_bytes())
    server = made["spec"]["containers"][1]
    server["command"] = [*server["command"][:3], "python3", "/models/engine.py"]  # still behind with-log
    server["args"] = []
    server["resources"] = {}
    server["env"] = [{"name": "STOPLINE_LOG_BYTES", "value": "4000"}, {"name": "STOPLINE_LOG_LOOK", "value": "2"}]
    for volume in made["spec"]["volumes"]:  # a kubelet lets everybody write to an emptyDir; podman its first user
        if "emptyDir" in volume:
            directory = models if volume["name"] == "models" else tmp_path_factory.mktemp(volume["name"])
            directory.chmod(0o777)
            del volume["emptyDir"]
            volume["hostPath"] = {"path": str(directory), "type": "Directory"}
    path = models.parent / "pod.yaml"
    path.write_text(yaml.safe_dump_all([*settings, made]))
    podman("pod", "rm", "-f", "-t", "0", "engine", ok=False)
    podman("kube", "play", path)
    yield
    podman("pod", "rm", "-f", "-t", "0", "engine", ok=False)
    podman("volume", "prune", "-f", ok=False)


def test_the_image_is_small_and_has_no_pip_and_no_root() -> None:
    (image,) = json.loads(podman("image", "inspect", IMAGE))
    assert image["Config"]["User"] == "65532:65532"
    assert image["Size"] < 200e6
    assert image["Labels"]["org.opencontainers.image.version"]
    options = ("--rm", "--read-only", "--cap-drop=all", "--network=none", "--security-opt=no-new-privileges")
    assert "stopline, version" in podman("run", *options, IMAGE, "--version")
    left = podman(
        "run", *options, "--entrypoint=find", IMAGE, "/opt/stopline", "/etc/pip.conf", "-name", "pip*", ok=False
    )
    assert [line for line in left.splitlines() if "pip.conf" not in line] == []
    print(f"image: {image['Size'] / 1e6:.0f} MB")


def test_the_sidecar_has_no_right_that_it_does_not_need(running: None) -> None:
    eventually(lambda: page()["stopline_engine_up"] == 1)
    status = podman("exec", "engine-stopline", "cat", "/proc/1/status")
    values = dict(re.findall(r"(?m)^(Uid|CapEff|CapBnd|NoNewPrivs|Seccomp):\s+(\w+)", status))
    assert values == {"Uid": "65532", "CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1", "Seccomp": "2"}
    for path in ("/x", "/tmp/x", "/var/log/engine/x", "/etc/stopline/x"):
        assert podman("exec", "engine-stopline", "sh", "-c", f"echo > {path} || echo refused", ok=False) == "refused\n"
    podman("exec", "engine-stopline", "python3", "-m", "exporter.alive")  # the image's health check
    (template,) = pods(parsed(kustomize(DEPLOY / "kustomize/examples/llamacpp")))
    probe = containers(template)["stopline"]["livenessProbe"]["httpGet"]
    assert urllib.request.urlopen(f"http://127.0.0.1:10777{probe['path']}", timeout=5).status == 200


def test_page_and_log_arrive_and_the_log_is_cut_without_loss(running: None) -> None:
    """What was written before the sidecar had started is history; from then on all counts."""

    def uncounted() -> float:
        return podman("logs", "engine-server").count("of the engine\n") - page()["stopline_log_lines_total"]

    before, cuts = uncounted(), page()["stopline_log_truncations_total"]
    eventually(lambda: page()["stopline_log_truncations_total"] >= cuts + 2, 40)
    told = page()
    assert told["stopline_source_up"] >= 2
    assert abs(uncounted() - before) <= 30  # 20 lines a second, asked one after the other
    size = int(podman("exec", "engine-server", "stat", "-c", "%s", LOG))
    assert size < 12_000


def test_it_stays_far_below_its_limits(running: None) -> None:
    (template,) = pods(parsed(kustomize(DEPLOY / "kustomize/examples/llamacpp")))
    assert containers(template)["stopline"]["resources"]["limits"] == {"cpu": "250m", "memory": "256Mi"}
    before = page()
    time.sleep(5)
    after = page()
    cpu = (after["process_cpu_seconds_total"] - before["process_cpu_seconds_total"]) / 5
    memory = after["process_resident_memory_bytes"]
    print(f"memory {memory / 2**20:.0f} MiB of 256, CPU {cpu * 1000:.0f} m of 250")
    assert memory < 128 * 2**20
    assert cpu < 0.150  # measured: 0.05


def test_a_killed_sidecar_comes_back_and_the_server_does_not_notice(running: None) -> None:
    started = podman("inspect", "engine-server", "--format", "{{.State.StartedAt}}")
    os.kill(int(podman("inspect", "engine-stopline", "--format", "{{.State.Pid}}")), signal.SIGKILL)
    eventually(lambda: page()["stopline_engine_up"] == 1)
    assert podman("inspect", "engine-server", "--format", "{{.State.StartedAt}}") == started
    eventually(lambda: page()["stopline_log_lines_total"] > 0)


def test_a_frozen_server_pages_by_the_shipped_rules(running: None, tmp_path: Path) -> None:
    """With durations shortened by the rules' own generator: a minute is two seconds."""
    with Pager(10777, tmp_path) as pager:
        until(lambda: pager.value("stopline_engine_up") == 1, 20, "scraped")
        began = time.monotonic()
        podman("pause", "engine-server")
        pager.wait("StoplineEngineUnreachable", 60)
        print(f"frozen server paged after {time.monotonic() - began:.1f} s")
        podman("unpause", "engine-server")
        pager.wait("StoplineEngineUnreachable", 60, "resolved")


def test_the_server_ends_as_it_wants_to_and_its_last_words_are_read(running: None) -> None:
    copy = podman("exec", "engine-stopline", "cat", "/etc/stopline/with-log")
    assert copy == (DEPLOY / "kustomize/parts/with-log").read_text()
    podman("update", "--restart=no", "engine-server", ok=False)
    process = subprocess.run(["podman", "stop", "-t", "10", "engine-server"], capture_output=True, check=False)
    assert process.returncode == 0
    assert podman("inspect", "engine-server", "--format", "{{.State.ExitCode}}") == "7\n"
    assert "last words" in podman("logs", "--tail", "3", "engine-server")
    assert podman("exec", "engine-stopline", "tail", "-n1", LOG) == "last words\n"


def test_told_to_end_the_sidecar_ends_well(running: None) -> None:
    began = time.monotonic()
    podman("stop", "-t", "10", "engine-stopline")
    assert podman("inspect", "engine-stopline", "--format", "{{.State.ExitCode}}") == "0\n"
    assert time.monotonic() - began < 20  # podman and a busy machine included; five seconds are the sidecar's own

"""`auto` as in a pod: eight GPUs in sight of the sidecar, two of them the engine's, and real processes to tell which.

Each case has a PID namespace of its own, in which the sidecar has no capability, as in the manifests. The engine is a
process that has an engine's name, and nothing of it but its environment.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from realengine import Page, free_port, get, until

pytest_plugins = ("fake_nvml",)
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make a PID namespace and change users in it")

NO_RIGHTS = "--bounding-set=-all --inh-caps=-all"
ENGINE = f"setpriv {NO_RIGHTS}"
"""Who starts the engine where nothing else is said: the sidecar's own user and group, without a capability either."""
UUIDS = [f"GPU-{n:08x}-0000-0000-0000-000000000000" for n in range(8)]
MIG = "MIG-{:08x}-0000-0000-0000-{:012x}"
FIND = "import json; from exporter.sources.devices import find_engines; print(json.dumps(find_engines()))"


def started(environment: dict[str, str], name: str = "VLLM::EngineCore", by: str = ENGINE) -> str:
    """Shell that starts a process of this *name* and goes on once it is one; *by* changes its rights."""
    given = " ".join(f"{key}={shlex.quote(value)}" for key, value in environment.items())
    process = f"env -i PATH=$PATH {given} {by} bash -c {shlex.quote(f'exec -a {name} sleep 600')} &"
    return f"{process}\nuntil grep -qa '^{name}' /proc/$!/cmdline; do kill -0 $! || exit; done\n"


def namespace(engines: str, *command: str) -> list[str]:
    """*command*, without a right, in a PID namespace in which *engines* run; all end when it is killed."""
    script = f'{engines}exec setpriv {NO_RIGHTS} --no-new-privs "$@"'
    return ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c", script, "-", *command]


def found_by(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


@pytest.mark.parametrize(
    ("engines", "found"),
    [
        pytest.param(started({"CUDA_VISIBLE_DEVICES": "2,5"}), [{"CUDA_VISIBLE_DEVICES": "2,5"}], id="may be read"),
        pytest.param(
            started({"CUDA_VISIBLE_DEVICES": "2"}) + started({"CUDA_VISIBLE_DEVICES": "5"}, "VLLM::Worker_TP1"),
            [{"CUDA_VISIBLE_DEVICES": "2"}, {"CUDA_VISIBLE_DEVICES": "5"}],
            id="two ranks",
        ),
        pytest.param(  # setproctitle, which vLLM's and SGLang's ranks use, overwrites the environment that /proc shows
            started({}) + started({"CUDA_VISIBLE_DEVICES": "2,5"}, "vllm"),
            [{"CUDA_VISIBLE_DEVICES": "2,5"}],
            id="a rank that has overwritten its own",
        ),
        pytest.param(started({"HOME": "/"}), [], id="without a variable"),
        pytest.param(started({"CUDA_VISIBLE_DEVICES": "2,5"}, name="postgres"), [], id="no engine"),
        pytest.param("", [], id="no process"),
        pytest.param(
            started({"CUDA_VISIBLE_DEVICES": "2,5"}, by=f"{ENGINE} --reuid=65532 --regid=65532 --clear-groups"),
            [],
            id="another user's",
        ),
        pytest.param(
            started({"CUDA_VISIBLE_DEVICES": "2,5"}, by=f"{ENGINE} --regid=65532 --clear-groups"),
            [],
            id="another group's",
        ),
        pytest.param(
            started({"CUDA_VISIBLE_DEVICES": "2,5"}, by="setpriv --bounding-set=-all,+chown"), [], id="one right more"
        ),
    ],
)
def test_an_engine_tells_its_devices_to_a_sidecar_of_the_same_user_group_and_rights(engines: str, found: list) -> None:
    result = found_by(namespace(engines, sys.executable, "-c", FIND))
    assert result.returncode == 0, result.stderr
    assert sorted(json.loads(result.stdout), key=str) == found


def test_of_an_engine_in_another_pid_namespace_nothing_is_seen() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "2,5"}
    with subprocess.Popen(["VLLM::EngineCore", "600"], executable="sleep", env=os.environ | environment) as engine:
        try:
            result = found_by(namespace("", sys.executable, "-c", FIND))
        finally:
            engine.kill()
    assert (result.returncode, result.stdout) == (0, "[]\n")


WATCH = """
import asyncio, json
from exporter.catalog import GPU_UP
from exporter.sources.gpu import GpuSource
from exporter.store import Store

async def main():
    store = Store()
    task = asyncio.create_task(GpuSource("auto", store).run())
    while not (up := store.gauges().get(GPU_UP)):
        await asyncio.sleep(0.02)
    print(json.dumps([uuid for _, uuid in up]))

asyncio.run(main())
"""


@pytest.fixture
def visible(nvml_library: Path, hardware) -> dict[str, str]:
    """The environment of who sees eight GPUs."""
    hardware.set({"count": 8})
    own = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")}
    return own | hardware.env | {"LD_LIBRARY_PATH": str(nvml_library.parent)}


def watched(engines: str, visible: dict[str, str]) -> set[str]:
    """The uuids of the GPUs that the source watches beside *engines*."""
    command = namespace(engines, sys.executable, "-c", WATCH)
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=visible)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout))


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        pytest.param({"CUDA_VISIBLE_DEVICES": "2,5"}, {UUIDS[2], UUIDS[5]}, id="indices"),
        pytest.param({"CUDA_VISIBLE_DEVICES": f"{UUIDS[2]},{UUIDS[5]}"}, {UUIDS[2], UUIDS[5]}, id="uuids"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": f"{UUIDS[2]},{UUIDS[5]}"}, {UUIDS[2], UUIDS[5]}, id="the runtime's"),
    ],
)
def test_of_eight_gpus_the_two_of_the_engine_are_watched(visible, environment, wanted: set[str]) -> None:
    assert watched(started(environment), visible) == wanted


def test_of_eight_split_gpus_the_two_instances_of_the_engine_are_watched(visible, hardware) -> None:
    hardware.set({f"gpu{n}.{key}": value for n in range(8) for key, value in (("mig", 1), ("migs", 2))})
    wanted = {MIG.format(2, 1), MIG.format(5, 0)}
    assert watched(started({"CUDA_VISIBLE_DEVICES": ",".join(sorted(wanted))}), visible) == wanted


def test_where_the_engine_may_not_be_read_all_that_the_container_sees_is_watched(visible) -> None:
    other = started({"CUDA_VISIBLE_DEVICES": "2,5"}, by=f"{ENGINE} --reuid=65532 --regid=65532 --clear-groups")
    assert watched(other, visible) == set(UUIDS)


def test_the_two_of_eight_are_on_the_page(visible, tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "exporter", "run", "--gpus", "auto", "--web.listen-address", f"127.0.0.1:{port}"]
    with (tmp_path / "stopline.log").open("wb") as log:
        run = subprocess.Popen(
            namespace(started({"CUDA_VISIBLE_DEVICES": "2,5"}), *command), env=visible, stderr=log, stdout=log
        )
        try:
            page = until(lambda: Page(get(f"http://127.0.0.1:{port}/metrics")).all("gpu_up"), 30, "GPUs on the page")
        finally:
            run.kill()
            run.wait(10)
    assert {dict(labels)["uuid"] for labels in page} == {UUIDS[2], UUIDS[5]}

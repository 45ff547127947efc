"""GPU faults in the whole process, real pynvml on a stand-in library: the rest of the page stays whole and in time."""

import json
import os
import time
from pathlib import Path

import pytest
from realengine import Page, get, until
from test_sidecar import SEED, Process

pytest_plugins = ("fake_nvml",)
GIB = 1 << 30


@pytest.fixture
def run(nvml_library: Path, hardware, tmp_path: Path):
    """A sidecar that sees two GPUs of different size, with a log beside them."""
    hardware.set({"count": 2, "gpu0.total": 80 * GIB, "gpu0.used": 72 * GIB, "gpu0.reserved": GIB})
    hardware.set({"gpu1.total": 24 * GIB, "gpu1.used": 4 * GIB})
    log = tmp_path / "server.log"
    log.touch()
    environment = os.environ | hardware.env | {"LD_LIBRARY_PATH": str(nvml_library.parent)}
    with Process("--log", str(log), "--gpus", "all", env=environment) as run:
        run.log = log
        yield run
        began = time.monotonic()
        code, errors = run.end()
    assert code == 0, errors
    assert time.monotonic() - began < 5, "a call that never returns must not hold up the end"


def page(run: Process) -> Page:
    began = time.monotonic()
    text = get(f"http://127.0.0.1:{run.port}/metrics")
    assert time.monotonic() - began < 4, "a call that never returns must not hold up the page"
    return Page(text)


def check_the_rest(run: Process, lines: int) -> None:
    """A new line of the log is counted and the page holds everything else."""
    with run.log.open("a") as log:
        log.write(SEED)
    until(lambda: page(run)("requests_total", outcome="ok") == lines, 10, "the line is counted")
    assert page(run)("request_queue_wait_seconds_count") == lines
    assert len(page(run).all("errors_total")) == 11


def headroom(run: Process) -> dict[str, float]:
    found = page(run).all("gpu_memory_headroom_bytes")
    return {dict(labels)["gpu"]: value / GIB for labels, value in found.items()}


def test_two_gpus_then_one_lost_then_one_that_hangs_then_both_back(run: Process, hardware) -> None:
    until(lambda: headroom(run) == {"0": 7.0, "1": 20.0}, 15, "both GPUs")
    check_the_rest(run, 1)
    hardware.set({"gpu0.err": "GPU_IS_LOST"})
    until(lambda: headroom(run) == {"1": 20.0}, 15, "one GPU")
    assert page(run)("gpu_up", gpu="0") == 0
    assert page(run)("gpu_up", gpu="1") == 1
    derived = page(run).all("gpu_memory_effective_headroom_bytes") | page(run).all("gpu_memory_part_bytes")
    assert [(dict(labels)["gpu"], value / GIB) for labels, value in derived.items()] == [("1", 20.0), ("1", 4.0)]
    check_the_rest(run, 2)
    hardware.clear("gpu0.err")
    until(lambda: headroom(run) == {"0": 7.0, "1": 20.0}, 30, "both GPUs again")
    hardware.set({"gpu1.delay_ms.nvmlDeviceGetMemoryInfo_v2": 600_000})
    until(lambda: headroom(run) == {"0": 7.0}, 15, "the other GPU")
    assert page(run)("gpu_up", gpu="1") == 0
    check_the_rest(run, 3)


@pytest.mark.parametrize(
    ("code", "reason"),
    [(12, "library_not_found"), (18, "driver_mismatch"), (4, "no_permission"), (9, "driver_not_loaded")],
)
def test_nvml_that_cannot_be_opened_has_its_reason(run: Process, hardware, code: int, reason: str) -> None:
    until(lambda: headroom(run), 15, "GPUs")
    hardware.set({f"err.{name}": code for name in ("nvmlInitWithFlags", "nvmlDeviceGetCount_v2")})
    hardware.set({"gpu0.err": "GPU_IS_LOST", "gpu1.err": "GPU_IS_LOST"})
    until(lambda: page(run)("source_error", source="gpu", reason=reason) == 1, 30, reason)
    assert page(run).all("gpu_memory_headroom_bytes") == {}
    check_the_rest(run, 1)


def test_memory_that_is_not_supported_is_absent_and_the_other_gpu_whole(run: Process, hardware) -> None:
    hardware.set(
        {f"gpu1.err.{name}": "NOT_SUPPORTED" for name in ("nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetMemoryInfo")}
    )
    until(lambda: headroom(run) == {"0": 7.0}, 15, "one GPU with memory")
    assert page(run)("gpu_up", gpu="1") == 1
    check_the_rest(run, 1)


def test_mig_instances_are_devices_of_their_own(run: Process, hardware) -> None:
    state: dict[str, object] = {"gpu0.mig": 1, "gpu0.migs": 2}
    for n, (name, total, used) in enumerate((("MIG 1g.10gb", 10, 9), ("MIG 3g.40gb", 40, 0))):
        keys = {"uuid": f"MIG-{n}", "name": f"H100 {name}", "total": total * GIB, "used": used * GIB}
        state |= {f"gpu0.mig{n}.{key}": value for key, value in keys.items()}
    hardware.set(state)
    until(lambda: sorted(headroom(run).values()) == [1.0, 20.0, 40.0], 60, "two instances and a whole GPU")
    profiles = {dict(labels)["mig"] for labels in page(run).all("gpu_info")}
    assert profiles == {"1g.10gb", "3g.40gb", ""}
    check_the_rest(run, 1)


def test_gpus_alone_are_judged_and_nothing_is_told_of_an_engine(nvml_library: Path, hardware) -> None:
    hardware.set({"count": 1, "gpu0.total": 80 * GIB, "gpu0.used": 72 * GIB})
    environment = os.environ | hardware.env | {"LD_LIBRARY_PATH": str(nvml_library.parent)}
    with Process("--gpus", "all", env=environment) as run:
        until(lambda: headroom(run) == {"0": 8.0}, 15, "the GPU")
        assert not any(name.startswith("stopline_engine_") for name, _ in page(run).samples)
        state = json.loads(get(f"http://127.0.0.1:{run.port}/api/state"))
        assert {line["line"]: (line["state"], line["says"]) for line in state["lines"]} == {
            "latency": ("unknown", "No engine is watched."),
            "errors": ("unknown", "Neither a log nor a page has been read yet."),
            "memory": ("ok", "The fullest GPU has 8.0\u00a0GiB free."),
        }
        assert state["engine"]["up"] is None
        live = get(f"http://127.0.0.1:{run.port}/")
    assert "no engine is watched" in live
    assert "None is watched" in live

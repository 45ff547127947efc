"""The demo shows live numbers, from the real sidecar, and ends when it is told to."""

import json
import signal
import subprocess
import sys
from typing import Any

import pytest
from realengine import Page, free_port, get, until


def test_the_demo_shows_live_numbers_within_seconds_and_a_stop_line_within_two_minutes() -> None:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "exporter", "demo", "--web.listen-address", f"127.0.0.1:{port}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: Page(get(f"{url}/metrics"))("request_latency_seconds_count") >= 3, 30, "three requests")
        page = Page(get(f"{url}/metrics"))
        html = get(f"{url}/")
        until(lambda: Page(get(f"{url}/metrics"))("step_latency_seconds_count", source="log") > 20, 30, "steps")
        assert process.stdout is not None
        shown = next(line for line in process.stdout if "GiB" in line)
        until(lambda: _latency(url)["state"] == "tripped", 120, "a stop line on the page")
        latency = _latency(url)
        red = get(f"{url}/")
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (0, "")
    assert page("engine_up") == 1
    assert page("engine_info", engine="vllm", model="hy3", version="0.32.0") == 1
    assert page("parallelism", dimension="tensor") == 8
    assert page("experts", scope="per_rank") == 24
    assert len(page.all("gpu_memory_headroom_bytes")) == 8
    parts = page.labelled("gpu_memory_part_bytes", "part", gpu="7")
    assert sum(parts.values()) == pytest.approx(page("gpu_memory_used_bytes", gpu="7"))
    assert parts["kv_free"] > 10 * 2**30, parts
    assert page("requests_running") > 0
    assert "hy3 on vllm 0.32.0" in html
    assert html.count("effective headroom</span>") == 8
    assert shown.split()[1] == "4", shown  # clients
    assert latency["baseline_source"] == "pinned"
    assert latency["value"] >= latency["threshold"] >= 2 * latency["baseline"] > 1
    assert "Stop line: latency" in red


def _latency(url: str) -> dict[str, Any]:
    return json.loads(get(f"{url}/api/state"))["lines"][0]

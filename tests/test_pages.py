"""A page goes out: simulated vLLM, the real sidecar, Debian's Prometheus and Alertmanager, and a webhook that is called.

Latency doubles, a GPU fills up, the engine dies; between them all is calm again and nobody is called.
"""

import asyncio
import os
import re
from pathlib import Path

import pytest
from pager import Pager
from realengine import until
from test_sidecar import Process

from exporter.simulator import ClosedLoop, EngineConfig, Simulation, serve
from exporter.simulator.load import requests, uniform

pytest_plugins = ("fake_nvml",)
GIB = 1 << 30
MIX = requests(uniform(20, 60), uniform(60, 100))
CALM, BUSY = 2, 48
P99, BASELINE = "stopline:request_latency_seconds:p99_5m", "stopline:request_latency_seconds:p99_baseline"


@pytest.fixture
async def engine(tmp_path: Path):
    """A simulated vLLM in real time: its address, the simulation, and the load on it."""
    simulation = Simulation(EngineConfig.tiny(), seed=1, log=tmp_path / "server.log")
    load = ClosedLoop(CALM, mix=MIX, seed=1)
    async with serve(simulation) as url:
        simulation.set_load(load)
        yield url, simulation, load


async def test_three_pages_and_no_other(engine, tmp_path: Path, nvml_library: Path, hardware) -> None:
    url, simulation, load = engine
    hardware.set({"count": 1, "gpu0.total": 80 * GIB, "gpu0.used": 72 * GIB})
    pins = tmp_path / "baseline.yaml"
    pins.write_text("pins: []\n")
    arguments = ("--engine-url", url, "--log", str(tmp_path / "server.log"), "--gpus", "all", "--pin", str(pins))
    environment = os.environ | hardware.env | {"LD_LIBRARY_PATH": str(nvml_library.parent)}
    with Process(*arguments, env=environment) as sidecar, Pager(sidecar.port, tmp_path) as pager:

        async def wait(*what, **how) -> dict:
            return await asyncio.to_thread(pager.wait, *what, **how)

        # calm: what it shows now is pinned as its baseline
        await asyncio.to_thread(until, lambda: pager.value(P99), 30, "requests are judged")
        await asyncio.sleep(10)  # a whole window of them
        calm = pager.value(P99)
        pins.write_text(f"pins:\n- {{signal: request, quantile: 0.99, seconds: {calm:.3f}s}}\n")
        await asyncio.to_thread(until, lambda: pager.value(BASELINE), 30, "the baseline is pinned")
        assert pager.value(BASELINE) == pytest.approx(calm, abs=0.001)
        assert pager.told() == set()

        # 48 clients for 8 places: whoever comes must wait, and the step stays
        load.resize(BUSY)
        page = await wait("StoplineLatencyDoubled", 60)
        assert page["labels"] | {"severity": "critical", "line": "latency", "model": "tiny"} == page["labels"]
        assert page["annotations"]["runbook_url"].endswith("/StoplineLatencyDoubled.md")
        description = page["annotations"]["description"]
        assert re.search(r"P99 of tiny is \d+(\.\d+)? times its baseline", description)
        assert f"against {round(calm * 1000)}ms" in description
        assert description.endswith("Cause: queue.")
        load.resize(CALM)
        await wait("StoplineLatencyDoubled", 90, status="resolved")
        assert pager.told() == {"StoplineLatencyDoubled"}, pager.alerts

        # a GPU fills up, and then the engine dies of it
        hardware.set({"gpu0.used": int(79.5 * GIB)})
        page = await wait("StoplineMemoryNearLimit", 30)
        assert "GPU 0: 512MiB free" in page["annotations"]["description"]
        simulation.engine.fail("out_of_memory")
        page = await wait("StoplineEngineFailed", 30)
        assert re.search(r"Kind: (out_of_memory|engine_dead)\..*Phase now: dead\.$", page["annotations"]["description"])
        assert pager.told() <= {
            "StoplineLatencyDoubled",
            "StoplineMemoryNearLimit",
            "StoplineEngineFailed",
        }

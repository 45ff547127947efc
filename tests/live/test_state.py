"""Where the memory line is on each GPU, and which are over it: as judge.py, and so the rules, decide."""

import pytest
from outline import Outline

from exporter import catalog
from exporter.config import Config, EngineConfig, GpuConfig
from exporter.history import Moment, Moments
from exporter.judge import Evidence, judge
from exporter.live import page
from exporter.live.state import _gpus
from exporter.sidecar import Sidecar
from exporter.signals import Reading
from exporter.store import gauge

GIB = float(1 << 30)
LABELS = ("0", "GPU-0")


@pytest.mark.parametrize(
    ("reserves", "used", "peak", "plateau", "limit", "over"),
    [
        pytest.param(1.0, 87, 87, 87, 88, 0, id="at rest"),
        pytest.param(1.0, 88, 88, 87, 88, 0, id="grown up to the line"),
        pytest.param(1.0, 90, 90, 87, 88, 2, id="grown beyond it"),
        pytest.param(1.0, 87, 90, 87, 88, 0, id="a peak is no growth"),
        pytest.param(1.0, 87, 94, 87, 88, 1, id="a peak takes the last free memory"),
        pytest.param(None, 94, 94, None, 93, 1, id="nothing is known of the engine"),
        pytest.param(0.0, 50, 50, None, 86.4, 0, id="takes memory as needed"),
        pytest.param(0.0, 80, 92.4, None, 86.4, 6, id="the peak of one that takes it as needed"),
    ],
)
def test_a_gpu_is_over_its_line_where_the_line_is_reached(reserves, used, peak, plateau, limit, over) -> None:
    """2 of the 96 GiB are reserved by the driver."""
    gauges = {
        catalog.GPU_UP: {LABELS: 1.0},
        catalog.GPU_TOTAL: {LABELS: 96 * GIB},
        catalog.GPU_USED: {LABELS: used * GIB},
        catalog.GPU_PEAK: {LABELS: peak * GIB},
        catalog.GPU_HEADROOM: {LABELS: (94 - used) * GIB},
    }
    if plateau is not None:
        gauges[catalog.GPU_PLATEAU] = {LABELS: plateau * GIB}
    if reserves is not None:
        gauges[catalog.ENGINE_PREALLOCATES] = {(): reserves}
    (gpu,) = _gpus(gauges, Config())
    assert (gpu.limit_bytes, gpu.over_bytes) == (pytest.approx(limit * GIB), pytest.approx(over * GIB))
    moments = Moments([Moment(0.0, True, "serving")], lambda _: ())
    memory = judge(Evidence(moments, gauges, Config().thresholds, 0.0, 0.0, gpus=gauges))[2]
    assert (memory.state == "tripped") == (over > 0)


def test_a_page_that_lacks_metrics_is_not_just_read() -> None:
    sidecar = Sidecar(Config(engine=EngineConfig(url="http://127.0.0.1:9"), gpus=GpuConfig(devices="none")))
    lost = tuple(gauge(catalog.METRIC_MISSING, 1.0, f"vllm:{name}") for name in ("c", "a", "b"))
    sidecar.store.publish(Reading("metrics", "metrics", ok=True, at=1000.0, samples=lost, seconds=0.01))
    (source,) = sidecar.live.state().sources
    assert (source.ok, source.reason, source.last_success) == (False, "metric_missing", 1000.0)
    assert source.cause == (
        "it lacks vllm:a, vllm:b and 1 more: this version of the engine has no such metric, or a flag is off"
    )
    assert "metrics is read, but it lacks vllm:a" in Outline(page.render(sidecar.live.state())).text

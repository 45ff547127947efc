"""The GPUs: are they there, are they the engine's, and does each tell its memory?"""

from collections.abc import Iterator

from exporter import catalog, remedies
from exporter.doctor.findings import NOT_TRIED, Finding, listed, unreadable
from exporter.remedies import plain
from exporter.sidecar import Sidecar
from exporter.sources.gpu import GpuSource

_SOURCE = "gpu"
_GIB = 2**30


def findings(sidecar: Sidecar) -> Iterator[Finding]:
    if sidecar.gpus is None:
        yield Finding("gpus", "note", "none are read: gpus.devices is none")
        return
    reading = sidecar.store.readings.get(_SOURCE)
    if reading is None:
        yield Finding("gpus", "failed", "they were not read", NOT_TRIED)
        return
    if not reading.ok:
        yield unreadable("gpus", "they", remedies.GPU, reading.reason, reading.detail)
        return
    gauges = sidecar.store.gauges()
    up = {gpu: value > 0 for (gpu, _), value in gauges.get(catalog.GPU_UP, {}).items()}
    names = {gpu: name for gpu, _, name, *_ in gauges.get(catalog.GPU_INFO, {})}
    yield _match(sidecar.gpus, len(up))
    if missing := sidecar.gpus.missing:
        yield Finding("gpus", "warning", f"not found: {listed(missing)}", plain(remedies.GPU["no_devices"].remedy))
    if down := [gpu for gpu, is_up in up.items() if not is_up]:
        yield unreadable("gpus", f"GPU {listed(down)}", remedies.GPU, reading.reason)
    free = {gpu: value for (gpu, _), value in gauges.get(catalog.GPU_HEADROOM, {}).items()}
    if free:
        text = listed(f"GPU {gpu} ({names.get(gpu, '')}) {value / _GIB:.1f} GiB" for gpu, value in free.items())
        yield Finding("gpus", "ok", f"free memory: {text}")
    if silent := [gpu for gpu, is_up in up.items() if is_up and gpu not in free]:
        remedy = "this device or its driver does not tell it; take it from a node-wide exporter"
        yield Finding("gpus", "warning", f"no memory is told by GPU {listed(silent)}", remedy)


def _match(gpus: GpuSource, chosen: int) -> Finding:
    of = f"{chosen} of the {gpus.visible} that can be seen"
    if gpus.chosen_by == "engine":
        return Finding("gpus", "ok", f"{of}: those of the engine's process")
    if gpus.chosen_by == "settings":
        return Finding("gpus", "ok", f"{of}: as gpus.devices says")
    remedy = (
        "if some are not the engine's: name its GPUs with --gpus, or let it be seen (README: three ways to the GPUs)"
    )
    return Finding("gpus", "note", f"{of}: no process of an engine was seen to tell which are its own", remedy)

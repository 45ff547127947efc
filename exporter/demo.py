"""The demo: a simulated server, the real sidecar beside it, and a load that rises until a stop line trips.

Everything but the engine and its GPUs is what runs in production: the log is tailed, the page is scraped, and the
numbers printed here are read from the sidecar's own histograms.
"""

import asyncio
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import click

from exporter import catalog
from exporter.baseline import Pin
from exporter.catalog import Family
from exporter.config import Config, EngineConfig, GpuConfig, LogConfig
from exporter.quantile import quantile, total
from exporter.sidecar import Sidecar, Source, until_signalled
from exporter.signals import Reading
from exporter.simulator import ClosedLoop, LogOptions, Simulation, serve
from exporter.simulator import EngineConfig as SimulatedConfig
from exporter.simulator.load import lognormal, requests, uniform
from exporter.store import gauge
from exporter.strictyaml import Seconds

_EVERY = 2.0  # seconds between two printed lines
_WINDOW = 5  # lines a window of the moving quantiles has
_MIX = requests(lognormal(300, 0.5, most=2000), uniform(16, 64))
_HEADER = " time  clients  running  waiting   queue P99    step P50  latency P99  vs. calm  errors  GPU free"


@dataclass(frozen=True, slots=True)
class Act:
    """What happens from *at* seconds on, and what there is to see."""

    at: float
    says: str
    clients: int
    does: Callable[[Simulation], None] = lambda _: None


def _leak(simulation: Simulation) -> None:
    simulation.engine.leak(2.8e8)


def _fail(simulation: Simulation) -> None:
    simulation.engine.fail("out_of_memory")


def _restart(simulation: Simulation) -> None:
    simulation.engine.leak(0)
    simulation.engine.restart()


ACTS = (
    Act(0, "4 clients: calm; their P99 becomes the baseline", 4),
    Act(30, "48 clients: once their prompts are read none waits, but the step grows with the batch", 48),
    Act(50, "160 clients for 64 places: the queue grows, the step stays", 160),
    Act(85, "4 clients: calm again", 4),
    Act(100, "memory leaks on every GPU", 4, _leak),
    Act(130, "a worker runs out of memory and the engine dies", 4, _fail),
    Act(140, "the engine is started again", 4, _restart),
)
_AGAIN = 170.0


class SimulatedGpus:
    """Stands in for NVML: the memory of the simulated cards."""

    def __init__(self, simulation: Simulation, sidecar: Sidecar) -> None:
        self._simulation = simulation
        self._store = sidecar.store
        self._used: deque[float] = deque(maxlen=60)  # a minute of it, as many as NVML's peak covers

    async def run(self) -> None:
        total = float(self._simulation.engine.config.gpu_memory_bytes)
        while True:
            samples = []
            self._used.append(float(max(self._simulation.gpu_memory_used_bytes)))
            for index, used in enumerate(self._simulation.gpu_memory_used_bytes):
                labels = (str(index), f"GPU-simulated-{index}")
                samples += [
                    gauge(catalog.GPU_TOTAL, total, *labels),
                    gauge(catalog.GPU_USED, used, *labels),
                    gauge(catalog.GPU_PEAK, max(self._used), *labels),
                    gauge(catalog.GPU_INFO, 1.0, *labels, "simulated H20", "", ""),
                    gauge(catalog.GPU_HEADROOM, max(0.0, total - used), *labels),
                    gauge(catalog.GPU_UP, 1.0, *labels),
                ]
            self._store.publish(Reading("gpu", "gpu", ok=True, at=self._store.wall(), samples=tuple(samples)))
            await asyncio.sleep(1.0)


class Story:
    """Plays the acts, over and over, and prints a line every two seconds."""

    def __init__(self, simulation: Simulation, load: ClosedLoop, sidecar: Sidecar) -> None:
        self._simulation = simulation
        self._load = load
        self._sidecar = sidecar
        self._past: dict[Family, deque[list[int]]] = {
            f: deque(maxlen=_WINDOW + 1) for f in (catalog.QUEUE_WAIT, catalog.STEP_LATENCY, catalog.LATENCY)
        }
        self._baseline: float | None = None
        self._errors: deque[float] = deque([0.0], maxlen=_WINDOW + 1)
        self._clients = 0
        self._first = True  # nothing but calm was seen since the start

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            began = clock()
            acts = list(ACTS)
            while clock() - began < _AGAIN:
                while acts and clock() - began >= acts[0].at:
                    act = acts.pop(0)
                    self._clients = act.clients
                    self._load.resize(act.clients)
                    act.does(self._simulation)
                    click.secho(f"\n{act.says}\n{_HEADER}", bold=True)
                await asyncio.sleep(_EVERY)
                self._line(clock() - began, calm=len(acts) == len(ACTS) - 1)

    def _line(self, elapsed: float, *, calm: bool) -> None:
        store, lifecycle = self._sidecar.store, self._sidecar.lifecycle
        gauges = store.gauges(up=lifecycle.up)
        queue, step, latency = (
            self._moving(family, q)
            for family, q in ((catalog.QUEUE_WAIT, 0.99), (catalog.STEP_LATENCY, 0.5), (catalog.LATENCY, 0.99))
        )
        if calm and latency is not None:
            self._baseline = latency
            if self._first:
                self._pin(latency)
        self._first &= calm
        free = min(gauges.get(catalog.GPU_HEADROOM, {(): 0.0}).values())
        errors = sum(store.counters[catalog.ERRORS].values())
        self._errors.append(errors)
        ratio = latency / self._baseline if latency and self._baseline else None
        text = (
            f"{elapsed:4.0f}s {self._clients:8d} {_total(gauges.get(catalog.RUNNING)):>8} "
            f"{_total(gauges.get(catalog.WAITING)):>8} {_time(queue):>11} {_time(step):>11} {_time(latency):>12} "
            f"{f'{ratio:.1f}x' if ratio else '-':>9} {errors:7.0f} {free / 2**30:5.1f} GiB"
        )
        limits = self._sidecar.config.thresholds
        tripped = [
            name
            for name, trips in (
                ("LATENCY", ratio is not None and ratio >= limits.latency_ratio),
                ("ERRORS", errors > self._errors[0]),
                ("MEMORY", free < limits.memory_headroom_bytes),
            )
            if trips
        ]
        if tripped:
            text += click.style(f"  STOP LINE: {', '.join(tripped)}", fg="red", bold=True)
        click.echo(text)

    def _pin(self, latency: float) -> None:
        """What was calm since the start becomes the baseline of the live page: nobody waits an hour for a demo."""
        store = self._sidecar.store
        calm = [Pin("request", 0.99, Seconds(latency))]
        if wait := quantile(*total(store, catalog.QUEUE_WAIT), 0.99):
            calm.append(Pin("queue_wait", 0.99, Seconds(wait)))
        if step := quantile(*total(store, catalog.STEP_LATENCY), 0.99):
            calm.append(Pin("step", 0.99, Seconds(step)))
        self._sidecar.pins = tuple(calm)

    def _moving(self, family: Family, q: float) -> float | None:
        """The *q* quantile, in seconds, of what came within the last lines."""
        bounds, counts = total(self._sidecar.store, family)
        past = self._past[family]
        past.append(counts)
        if not counts or len(past) < 2:
            return None
        first = past[0] or [0] * len(counts)
        return quantile(bounds, [b - a for a, b in zip(first, counts, strict=True)], q)


async def show(config: Config, *, engine_port: int, seed: int) -> None:
    """Run the demo with the sidecar's settings *config* until a signal ends it."""
    with tempfile.TemporaryDirectory(prefix="stopline-demo-") as directory:
        log = Path(directory) / "server.log"
        options = LogOptions(iterations=True)
        simulation = Simulation(SimulatedConfig.hy3_h20(), seed=seed, log=log, log_options=options)
        load = ClosedLoop(4, mix=_MIX, seed=seed)
        async with serve(simulation, port=engine_port) as url:
            config = replace(
                config,
                engine=EngineConfig(url=url),
                log=LogConfig(paths=(str(log),)),
                gpus=GpuConfig(devices="none"),
            )
            sidecar = Sidecar(config)
            simulation.set_load(load)
            address = config.web.listen_address
            click.echo(f"simulated vLLM serving Hy3 on 8 GPUs: {url} (metrics at {url}/metrics, log at {log})")
            click.echo(f"Stopline beside it: http://{address}/ and http://{address}/metrics; Ctrl-C ends it")
            extra: dict[str, Source] = {
                "gpu": SimulatedGpus(simulation, sidecar),
                "story": Story(simulation, load, sidecar),
            }
            await until_signalled(sidecar, extra=extra)


def _total(series: dict[tuple[str, ...], float] | None) -> str:
    return f"{sum(series.values()):.0f}" if series else "-"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"

"""The GPUs: memory, utilization and whether they answer, sampled once a second through NVML.

    store = Store()
    source = GpuSource("auto", store)
    task = asyncio.create_task(source.run())
    await asyncio.sleep(3)
    print(store.readings["gpu"])

Ownership: all state belongs to the event loop. Every physical GPU has one daemon thread that makes its
NVML calls; one more initialises NVML, and one looks for the engine's process. A thread has one call out
at most, so a wedged driver costs as many threads as there are GPUs and never delays a render or the exit
of the process.

What a reading says:

- ok: the devices chosen, each with ``gpu_up``. One that is lost or has not answered within the deadline
  is at 0 and has no other series, while the rest are whole; *reason* is then that of the first device
  that is down.
- not ok: nothing can be said about any GPU. All series are gone, and *reason* says why.

A field that a device does not tell is absent, never 0. A value is at most the deadline and one interval
old. Label ``gpu`` is NVML's index, for a MIG instance ``GPU.INSTANCE`` (``0.1``); ``uuid`` is the key. A
GPU split by MIG is represented by its instances alone, so nothing is counted twice.
"""

import asyncio
import logging
import math
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Literal

from tenacity import RetryCallState, Retrying, wait_exponential_jitter, wait_fixed, wait_random
from tenacity.wait import wait_base

from exporter import remedies
from exporter.catalog import GPU_INFO, GPU_PEAK, GPU_UP, GPU_USED
from exporter.signals import Reading, Sample
from exporter.sources.devices import choose, find_engines, parse
from exporter.sources.nvml import Device, Nvml, NvmlError, PyNvml, Reason, Values, Worker
from exporter.store import Store

log = logging.getLogger(__name__)

_LOOK_SECONDS = 30.0
_PEAK_SECONDS = 60.0
_NEW_PROCESS_ONLY = wait_fixed(600) + wait_random(0, 60)


class GpuSource:
    """Samples the GPUs that *devices* names (see exporter.sources.devices) and publishes one reading a round.

    *interval* is seconds between rounds. A call out for longer than *deadline* seconds (by default three
    intervals, at least 2 s) counts as hung. *tick* is the wait between two rounds, *backoff* the wait
    before NVML is initialised, or a GPU that is down looked up, again. Raises ValueError for a setting
    that names none.
    """

    def __init__(
        self,
        devices: str | Iterable[str | int],
        store: Store,
        *,
        interval: float = 1.0,
        deadline: float | None = None,
        nvml: Nvml | None = None,
        tick: Callable[[], Awaitable[None]] | None = None,
        backoff: wait_base | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        proc: Path = Path("/proc"),
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._names = parse(devices)
        self._store = store
        self._nvml = nvml or PyNvml()
        self._deadline = deadline or max(3 * interval, 2.0)
        self._tick = tick or partial(asyncio.sleep, interval)
        self._wait = backoff or wait_exponential_jitter(max=60, jitter=2)
        self._clock, self._wall, self._proc, self._environ = clock, wall, proc, environ

        self._control = Worker("nvml", clock)
        self._retry = Backoff(self._wait)
        self._open_at = -math.inf
        self._opened = False
        self._ever_opened = False
        self._down: NvmlError | None = None
        self._driver = ""

        self._scout = Worker("gpu-engine", clock)
        self._engines: list[Mapping[str, str]] = []
        self._look_at = -math.inf if self._names == ("auto",) else math.inf

        self._gpus: list[_Gpu] = []
        self._choice: tuple[list[str], list[str]] = [], []
        self._peaks: dict[str, Peak] = {}
        self._notes: dict[str, Reason | None] = {}

    async def run(self) -> None:
        """Sample until cancelled. Raises only what shows a mistake of ours, never what NVML says."""
        try:
            while True:
                pause = asyncio.ensure_future(self._tick())
                try:
                    await self._round(pause)
                    await pause
                finally:
                    pause.cancel()
        finally:
            self._close()

    @property
    def chosen_by(self) -> Literal["settings", "engine", "container"]:
        """What decided which devices are watched: with ``container`` no process of an engine was seen."""
        if self._names != ("auto",):
            return "settings"
        return "engine" if self._engines else "container"

    @property
    def missing(self) -> list[str]:
        """Names that fit no device."""
        return self._choice[1]

    @property
    def visible(self) -> int:
        """Devices that can be seen here, those not chosen included."""
        return sum(len(gpu.devices) for gpu in self._gpus if not gpu.forbidden)

    async def _round(self, pause: asyncio.Future[None]) -> None:
        """Ask everything once and publish what is known when all have answered, or *pause* is over."""
        begin = self._clock()
        await self._settle(pause, [], [self._control, self._scout, *(gpu.worker for gpu in self._gpus)])
        await self._settle(pause, self._prepare())
        if self._askable:
            await self._settle(pause, [gpu.look_up() for gpu in self._gpus if gpu.due])
        if self._askable:  # still: what was just said may have ended the session
            self._choose()
            await self._settle(pause, [gpu.read() for gpu in self._gpus if gpu.readable])
        self._publish(begin)

    async def _settle(
        self, pause: asyncio.Future[None], started: list[Worker], finished: Iterable[Worker] = ()
    ) -> None:
        """Wait for the calls *started*, though not beyond *pause*, and take their answers."""
        while not pause.done() and (out := {w.future for w in started if w.future and not w.future.done()}):
            await asyncio.wait({*out, pause}, return_when=asyncio.FIRST_COMPLETED)
        for worker in (*started, *finished):
            worker.collect()
        if over := next((gpu.fatal for gpu in self._gpus if gpu.fatal), None):
            self._begun(over)

    # the session with NVML

    @property
    def _askable(self) -> bool:
        """A session is open and is not being begun anew: no other call is made meanwhile."""
        return self._opened and not self._control.busy

    def _prepare(self) -> list[Worker]:
        """Start what is due before GPUs can be asked: the look for the engine, and a session with NVML."""
        now, started = self._clock(), []
        if now >= self._look_at and not self._scout.busy:
            self._look_at = now + _LOOK_SECONDS
            self._scout.start(partial(find_engines, self._proc), self._found)
            started.append(self._scout)
        calls_out = any(gpu.worker.busy for gpu in self._gpus)
        all_lost = not calls_out and all(gpu.lost for gpu in self._gpus)
        if now >= self._open_at and not self._control.busy and (all_lost or not self._opened):
            # the last session is not ended under a call that is out: the library may free what that call uses
            end = self._ever_opened and not calls_out
            self._control.start(partial(_open, self._nvml, end), self._begun)
            started.append(self._control)
        return started

    def _begun(self, outcome: tuple[str, int] | NvmlError) -> None:
        """A session began, or it could not begin, or it turned out to be over."""
        rarely = isinstance(outcome, NvmlError) and outcome.reason == "driver_mismatch"
        self._open_at = self._clock() + (Backoff(_NEW_PROCESS_ONLY) if rarely else self._retry).next()
        self._opened = not isinstance(outcome, NvmlError)
        if isinstance(outcome, NvmlError):
            self._down = outcome
            for gpu in self._gpus:
                gpu.forget()
            return
        self._ever_opened = True
        self._driver, count = outcome
        for gpu in self._gpus[count:]:
            gpu.worker.close()
        new = (_Gpu(i, self._nvml, self._clock, self._wait) for i in range(len(self._gpus), count))
        self._gpus = [*self._gpus[:count], *new]
        for gpu in self._gpus:
            gpu.list_at = -math.inf

    def _close(self) -> None:
        if self._opened and not any(w.busy for w in (self._control, *(gpu.worker for gpu in self._gpus))):
            self._control.start(self._nvml.shutdown, lambda _: None)
        for worker in (self._control, self._scout, *(gpu.worker for gpu in self._gpus)):
            worker.close()

    # which GPUs

    def _found(self, engines: list[Mapping[str, str]] | NvmlError) -> None:
        """Processes of the engine were looked for; while none is there, the last ones' devices still hold."""
        if engines and not isinstance(engines, NvmlError):
            self._engines = engines

    def _choose(self) -> None:
        there = [device for gpu in self._gpus if not gpu.forbidden for device in gpu.devices]
        chosen, missing = choose(self._names, there, self._engines, self._environ)
        for gpu in self._gpus:
            gpu.choose(chosen)
        if any(not gpu.fault for gpu in self._gpus):
            self._retry.reset()
        self._peaks = {d.uuid: self._peaks[d.uuid] for d in chosen if d.uuid in self._peaks}
        labels = [f"{device.gpu}={device.uuid}" for device in chosen]
        if (labels, missing) != self._choice:
            self._choice = labels, missing
            log.info("source=gpu devices=%s driver=%s", ",".join(labels), self._driver)
            if missing:
                log.warning("source=gpu missing=%s remedy=%r", ",".join(missing), _remedy("no_devices"))

    # what is said

    def _publish(self, begin: float) -> None:
        for gpu in self._gpus:
            gpu.check(self._deadline)
        down = self._nothing()
        samples, reasons = self._told() if self._opened else ([], [])
        if down:
            reasons = [down.reason]
        if samples or down:
            self._note("all", down)
            reason, now = reasons[0] if reasons else "", self._clock()
            reading = Reading(
                "gpu", "gpu", not down, self._wall(), tuple(samples), reason, now - begin, str(down or "")
            )
            self._store.publish(reading)

    def _nothing(self) -> NvmlError | None:
        """Why nothing is said of any GPU; None if something is, or while that is not known."""
        if not self._opened:
            if self._control.overdue(self._deadline):
                self._down = NvmlError("timeout", "nvmlInit does not return")
            return self._down
        if any(gpu.chosen for gpu in self._gpus):
            return None
        faults = [gpu.fault for gpu in self._gpus if not gpu.listed]
        if faults:
            return None if None in faults else faults[0]
        return NvmlError("no_devices", f"{len(self._gpus)} GPUs are here, wanted: {','.join(self._names)}")

    def _told(self) -> tuple[list[Sample], list[Reason]]:
        """The samples of the chosen devices, and for which reasons some are down."""
        samples: list[Sample] = []
        reasons: list[Reason] = []
        for gpu in self._gpus:
            for device in gpu.chosen:
                outcome = gpu.fault or gpu.answers.get(device)
                if outcome is None:
                    continue
                if isinstance(outcome, NvmlError):
                    reasons.append(outcome.reason)
                    samples.append(Sample(GPU_UP, (device.gpu, device.uuid), 0.0))
                    self._note(device.uuid or device.gpu, outcome)
                else:
                    samples += self._samples(device, outcome)
                    self._note(device.uuid or device.gpu, None)
        return samples, reasons

    def _samples(self, device: Device, values: Values) -> list[Sample]:
        labels = (device.gpu, device.uuid)
        samples = [Sample(family, labels, value) for family, value in values.items()]
        samples.append(Sample(GPU_UP, labels, 1.0))
        samples.append(Sample(GPU_INFO, (*labels, device.name, self._driver, device.mig), 1.0))
        if GPU_USED in values:
            peak = self._peaks.setdefault(device.uuid, Peak(_PEAK_SECONDS))
            samples.append(Sample(GPU_PEAK, labels, peak.add(self._clock(), values[GPU_USED])))
        return samples

    def _note(self, subject: str, error: NvmlError | None) -> None:
        """Log a change of state once; what repeats only at debug."""
        was, now = self._notes.get(subject), error.reason if error else None
        self._notes[subject] = now
        if error and error.reason != was:
            text = "source=gpu device=%s state=down reason=%s error=%r remedy=%r"
            log.warning(text, subject, error.reason, str(error), _remedy(error.reason))
        elif error:
            log.debug("source=gpu device=%s state=down reason=%s", subject, error.reason)
        elif was:
            log.info("source=gpu device=%s state=up", subject)


class _Gpu:
    """One physical GPU: the thread that asks it, and what it said last.

    *devices* are it or its MIG instances as last listed, before that a nameless stand-in. While *fault*
    is set it as a whole does not answer, and *answers* is empty. Else *answers* holds what each device
    chosen tells, or why it does not.
    """

    def __init__(self, index: int, nvml: Nvml, clock: Callable[[], float], wait: wait_base) -> None:
        self.worker = Worker(f"nvml-{index}", clock)
        self.devices = [Device(str(index), "")]
        self.chosen: list[Device] = []
        self.fault: NvmlError | None = None
        self.answers: dict[Device, Values | NvmlError] = {}
        self.list_at = -math.inf
        self.listed = False
        self._index, self._nvml, self._clock = index, nvml, clock
        self._retry = Backoff(wait)

    @property
    def due(self) -> bool:
        return not self.worker.busy and self._clock() >= self.list_at

    @property
    def readable(self) -> bool:
        return bool(self.chosen) and not self.fault and not self.worker.busy

    @property
    def lost(self) -> bool:
        return self.fault is not None and self.fault.reason != "timeout"

    @property
    def forbidden(self) -> bool:
        """Not ours: NVML counts it, and this container may not open it."""
        return self.fault is not None and self.fault.reason == "no_permission"

    @property
    def fatal(self) -> NvmlError | None:
        """An answer that means that the session is over."""
        outcomes = (self.fault, *self.answers.values())
        return next((o for o in outcomes if isinstance(o, NvmlError) and o.fatal), None)

    def look_up(self) -> Worker:
        self.worker.start(partial(self._nvml.devices, self._index), self._listed)
        return self.worker

    def choose(self, wanted: Iterable[Device]) -> None:
        self.chosen = [device for device in self.devices if device in wanted]
        if not self.chosen:
            self.answers = {}

    def read(self) -> Worker:
        self.worker.start(partial(_read, self._nvml, self.chosen), self._answered)
        return self.worker

    def check(self, deadline: float) -> None:
        """Give up on a call that is out for longer than *deadline* seconds."""
        if self.worker.overdue(deadline):
            self.fault, self.answers = NvmlError("timeout", "a call of NVML does not return"), {}
            self.worker.disown(self._returned)

    def forget(self) -> None:
        """The session is over: what was said in it no longer holds, except that a call is still out."""
        self.answers = {}
        if not self.worker.busy:
            self.fault = None

    def _listed(self, outcome: list[Device] | NvmlError) -> None:
        if isinstance(outcome, NvmlError):
            self.fault, self.answers = outcome, {}
            self.list_at = self._clock() + self._retry.next()
            return
        self.fault, self.devices, self.listed = None, outcome, True
        self.list_at = self._clock() + _LOOK_SECONDS
        self._retry.reset()

    def _answered(self, outcome: dict[Device, Values | NvmlError] | NvmlError) -> None:
        was_whole = not any(isinstance(o, NvmlError) for o in self.answers.values())
        self.answers = {} if isinstance(outcome, NvmlError) else outcome
        if was_whole and any(isinstance(o, NvmlError) for o in self.answers.values()):
            self.list_at = -math.inf  # at once: an instance may have been destroyed, a handle may be void

    def _returned(self, _: object) -> None:
        """A call given up returned: ask anew, for what it says is old."""
        self.list_at = -math.inf


class Peak:
    """The highest of the values of the last *seconds*."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._falling: deque[tuple[float, float]] = deque()

    def add(self, now: float, value: float) -> float:
        """Enter *value*, read at *now*, and give the highest; what a later value exceeds is not kept."""
        while self._falling and self._falling[-1][1] <= value:
            self._falling.pop()
        self._falling.append((now, value))
        while self._falling[0][0] < now - self._seconds:
            self._falling.popleft()
        return self._falling[0][1]


class Backoff:
    """Seconds until the next attempt, as one of tenacity's wait objects has it."""

    def __init__(self, wait: wait_base) -> None:
        self._wait = wait
        self.reset()

    def reset(self) -> None:
        self._state = RetryCallState(Retrying(), None, (), {})

    def next(self) -> float:
        seconds = self._wait(self._state)
        self._state.prepare_for_next_attempt()
        return seconds


def _remedy(reason: Reason) -> str:
    return remedies.plain(remedies.GPU[reason].remedy)


def _open(nvml: Nvml, end: bool) -> tuple[str, int]:
    """Begin a session, if *end* after ending the last one: the driver's version and the number of GPUs."""
    if end:
        with suppress(NvmlError):
            nvml.shutdown()
    nvml.init()
    try:
        return nvml.driver(), nvml.count()
    except NvmlError:
        with suppress(NvmlError):
            nvml.shutdown()
        raise


def _read(nvml: Nvml, chosen: Iterable[Device]) -> dict[Device, Values | NvmlError]:
    answers: dict[Device, Values | NvmlError] = {}
    for device in chosen:
        try:
            answers[device] = nvml.read(device)
        except NvmlError as error:
            answers[device] = error
    return answers

"""GpuSource on the real pynvml over the stand-in library: what each state of the hardware becomes."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from tenacity import wait_fixed

from exporter.signals import Reading
from exporter.sources.gpu import Backoff, GpuSource, Peak
from exporter.sources.nvml import PyNvml
from exporter.store import Store

pytest_plugins = ("fake_nvml",)

MIB, GIB = 1 << 20, 1 << 30
NEVER = 3_600_000  # ms: a call that does not return while a test runs
MEMORY = "nvmlDeviceGetMemoryInfo_v2"
RETRY = 5.0


def uuid(index: int) -> str:
    return f"GPU-{index:08x}-0000-0000-0000-000000000000"


def gpu(index: int, total: int, used: int, reserved: int, util: int, name: str = "NVIDIA H100 80GB HBM3") -> dict:
    key = f"gpu{index}"
    return {
        f"{key}.total": total,
        f"{key}.used": used,
        f"{key}.reserved": reserved,
        f"{key}.util": util,
        f"{key}.name": name,
    }


TWO = {
    "count": 2,
    "driver": "570.124.06",
    **gpu(0, 81559 * MIB, 72000 * MIB, 618 * MIB, 97),
    **gpu(1, 24 * GIB, 1 * GIB, 0, 0, "NVIDIA L4"),
}
FIRST = {
    ("gpu_up", "0", uuid(0)): 1,
    ("gpu_info", "0", uuid(0), "NVIDIA H100 80GB HBM3", "570.124.06", ""): 1,
    ("gpu_memory_total_bytes", "0", uuid(0)): 81559 * MIB,
    ("gpu_memory_used_bytes", "0", uuid(0)): 72000 * MIB,
    ("gpu_memory_reserved_bytes", "0", uuid(0)): 618 * MIB,
    ("gpu_memory_headroom_bytes", "0", uuid(0)): 8941 * MIB,
    ("gpu_memory_used_peak_bytes", "0", uuid(0)): 72000 * MIB,
    ("gpu_utilization_ratio", "0", uuid(0)): 0.97,
}
SECOND = {
    ("gpu_up", "1", uuid(1)): 1,
    ("gpu_info", "1", uuid(1), "NVIDIA L4", "570.124.06", ""): 1,
    ("gpu_memory_total_bytes", "1", uuid(1)): 24 * GIB,
    ("gpu_memory_used_bytes", "1", uuid(1)): 1 * GIB,
    ("gpu_memory_reserved_bytes", "1", uuid(1)): 0,
    ("gpu_memory_headroom_bytes", "1", uuid(1)): 23 * GIB,
    ("gpu_memory_used_peak_bytes", "1", uuid(1)): 1 * GIB,
    ("gpu_utilization_ratio", "1", uuid(1)): 0,
}
FIRST_LOST = {("gpu_up", "0", uuid(0)): 0}


def told(reading: Reading) -> dict:
    samples = {(s.family.short, *s.labels): s.value for s in reading.samples}
    assert len(samples) == len(reading.samples)
    return samples


class Heard(Store):
    """A store that also keeps what was published until a test takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: asyncio.Queue[Reading] = asyncio.Queue()

    def publish(self, reading: Reading) -> None:
        super().publish(reading)
        self.queue.put_nowait(reading)


class Rig:
    """A source whose clock and rounds a test moves."""

    def __init__(self, devices, **options) -> None:
        self.now = 1000.0
        self.store = Heard()
        self._wait = asyncio.Event()
        options.setdefault("backoff", wait_fixed(RETRY))
        options.setdefault("environ", {})
        self.source = GpuSource(
            devices,
            self.store,
            tick=self._tick,
            clock=lambda: self.now,
            wall=lambda: 1.7e9 + self.now,
            **options,
        )

    def _tick(self):
        self._wait = asyncio.Event()
        return self._wait.wait()

    def move(self, seconds: float = 1.0) -> None:
        """Let time pass and the wait between two rounds end."""
        self.now += seconds
        self._wait.set()

    async def heard(self) -> Reading:
        """The next reading published."""
        return await asyncio.wait_for(self.store.queue.get(), 30)

    async def step(self, seconds: float = 1.0) -> Reading:
        """One more round, and its reading."""
        assert self.store.queue.empty()
        self.move(seconds)
        return await self.heard()

    async def begin_without(self, held: int) -> None:
        """Begin a round and wait until every GPU has answered except that one, which keeps the round open."""
        self.move()
        async with asyncio.timeout(30):
            while self._wait.is_set() or any(self._out(g) for g in range(len(self.source._gpus)) if g != held):
                await asyncio.sleep(0.001)

    def _out(self, gpu: int) -> bool:
        future = self.source._gpus[gpu].worker.future
        return future is not None and not future.done()

    async def reaches(self, samples: dict, reason: str = "") -> Reading:
        """Let rounds go by, those that have nothing to say included, until this is said."""
        async with asyncio.timeout(30):
            while True:
                with suppress(TimeoutError):
                    reading = await asyncio.wait_for(self.store.queue.get(), 0.02)
                    if (told(reading), reading.reason) == (samples, reason):
                        return reading
                self.move()


@asynccontextmanager
async def running(devices="all", **options):
    rig = Rig(devices, **options)
    task = asyncio.create_task(rig.source.run())
    try:
        yield rig
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])
        for thread in threading.enumerate():
            if thread.name == "nvml":  # it may have NVML to shut down, and the next test begins with none
                thread.join(30)


# what is told


async def test_every_sample_of_two_different_gpus(nvml_here):
    nvml_here.set(TWO)
    async with running() as rig:
        reading = await rig.heard()
    assert told(reading) == FIRST | SECOND
    assert (reading.source, reading.origin, reading.ok, reading.reason) == ("gpu", "gpu", True, "")
    assert reading.at == 1.7e9 + 1000


async def test_memory_that_is_not_supported_is_absent_and_the_rest_stays(nvml_here):
    nvml_here.set(TWO)
    nvml_here.set({f"gpu1.err.{MEMORY}": "NOT_SUPPORTED", "gpu1.err.nvmlDeviceGetMemoryInfo": "NOT_SUPPORTED"})
    async with running() as rig:
        reading = await rig.heard()
    without = {key: value for key, value in SECOND.items() if "memory" not in key[0]}
    assert told(reading) == FIRST | without
    assert reading.reason == ""


@pytest.mark.parametrize("why", ["FUNCTION_NOT_FOUND", "ARGUMENT_VERSION_MISMATCH", "NOT_SUPPORTED"])
async def test_version_1_of_memory_gives_the_same_headroom(nvml_here, why):
    nvml_here.set({**TWO, f"err.{MEMORY}": why})
    async with running(["0"]) as rig:
        reading = await rig.heard()
    expected = dict(FIRST)
    del expected["gpu_memory_reserved_bytes", "0", uuid(0)]
    expected["gpu_memory_used_bytes", "0", uuid(0)] = 72618 * MIB
    expected["gpu_memory_used_peak_bytes", "0", uuid(0)] = 72618 * MIB
    assert told(reading) == expected


async def test_failure_of_one_field_costs_that_field(nvml_here):
    nvml_here.set({**TWO, "gpu0.err.nvmlDeviceGetUtilizationRates": "INVALID_ARGUMENT"})
    async with running() as rig:
        reading = await rig.heard()
    expected = FIRST | SECOND
    del expected["gpu_utilization_ratio", "0", uuid(0)]
    assert told(reading) == expected


async def test_text_of_the_driver_is_made_printable(nvml_here):
    nvml_here.set({"gpu0.name": "A\tB\x1b[0m", "gpu0.uuid": "GPU-\x07"})
    async with running() as rig:
        samples = told(await rig.heard())
    assert samples["gpu_info", "0", "GPU-?", "A?B?[0m", "570.124.06", ""] == 1


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"gpu0.name": "H\udcff100"}, id="not UTF-8"),
        pytest.param({"gpu0.err.nvmlDeviceGetName": "NOT_SUPPORTED"}, id="not supported"),
    ],
)
async def test_a_name_that_cannot_be_told_is_empty(nvml_here, keys):
    nvml_here.set(keys)
    async with running() as rig:
        samples = told(await rig.heard())
    assert samples["gpu_info", "0", uuid(0), "", "570.124.06", ""] == 1


async def test_mig_instances_are_devices_and_their_gpu_is_not(nvml_here):
    nvml_here.set(TWO)
    nvml_here.set({"gpu0.mig": 1, "gpu0.migs": 2})
    for slot, (name, total, used) in enumerate([("1g.10gb", 10 * GIB, 9 * GIB), ("3g.40gb", 40 * GIB, 0)]):
        key = f"gpu0.mig{slot}"
        nvml_here.set({f"{key}.name": f"NVIDIA H100 MIG {name}", f"{key}.uuid": f"MIG-{name}"})
        nvml_here.set({f"{key}.total": total, f"{key}.used": used})
    expected = {}
    for slot, (mig, total, used) in enumerate([("1g.10gb", 10 * GIB, 9 * GIB), ("3g.40gb", 40 * GIB, 0)]):
        labels = (f"0.{slot}", f"MIG-{mig}")
        expected |= {
            ("gpu_up", *labels): 1,
            ("gpu_info", *labels, "NVIDIA H100", "570.124.06", mig): 1,
            ("gpu_memory_total_bytes", *labels): total,
            ("gpu_memory_used_bytes", *labels): used,
            ("gpu_memory_reserved_bytes", *labels): 0,
            ("gpu_memory_headroom_bytes", *labels): total - used,
            ("gpu_memory_used_peak_bytes", *labels): used,
        }
    async with running() as rig:
        assert told(await rig.heard()) == expected | SECOND
        nvml_here.set({"gpu0.mig1.err.nvmlDeviceGetUUID": "UNKNOWN", f"gpu0.mig1.err.{MEMORY}": "UNKNOWN"})
        reading = await rig.step()
    rest = {key: value for key, value in expected.items() if "MIG-3g.40gb" not in key}
    assert told(reading) == rest | {("gpu_up", "0.1", "MIG-3g.40gb"): 0} | SECOND


async def test_instances_made_anew_replace_the_old(nvml_here):
    nvml_here.set({"gpu0.mig": 1, "gpu0.migs": 1, "gpu0.mig0.uuid": "MIG-old"})
    async with running() as rig:
        assert ("gpu_up", "0.0", "MIG-old") in told(await rig.heard())
        nvml_here.set({"gpu0.mig0.uuid": "MIG-new", f"gpu0.mig0.err.{MEMORY}": "INVALID_ARGUMENT"})
        nvml_here.set({"gpu0.mig0.err.nvmlDeviceGetMemoryInfo": "INVALID_ARGUMENT"})
        reading = await rig.step()
        assert (told(reading), reading.reason) == ({("gpu_up", "0.0", "MIG-old"): 0}, "unknown")
        nvml_here.clear(f"gpu0.mig0.err.{MEMORY}", "gpu0.mig0.err.nvmlDeviceGetMemoryInfo")
        assert {key[2] for key in told(await rig.step())} == {"MIG-new"}


async def test_peak_is_the_highest_of_the_last_minute(nvml_here):
    nvml_here.set({"gpu0.used": 5 * GIB})
    peak = ("gpu_memory_used_peak_bytes", "0", uuid(0))
    async with running() as rig:
        await rig.heard()
        nvml_here.set({"gpu0.used": 7 * GIB})
        await rig.step()
        nvml_here.set({"gpu0.used": 2 * GIB})
        assert told(await rig.step())[peak] == 7 * GIB
        assert told(await rig.step(59))[peak] == 7 * GIB
        assert told(await rig.step(1))[peak] == 2 * GIB


def test_peak_keeps_no_more_than_it_needs():
    peak = Peak(60)
    assert [peak.add(t, v) for t, v in enumerate([3, 9, 4, 6, 5])] == [3, 9, 9, 9, 9]
    assert list(peak._falling) == [(1, 9), (3, 6), (4, 5)]
    assert peak.add(61.5, 1) == 6


async def test_a_round_costs_two_calls_for_each_gpu(nvml_here):
    nvml_here.set(TWO)
    async with running() as rig:
        await rig.heard()
        nvml_here.calls()
        await rig.step()
    calls = nvml_here.calls()
    assert sorted(calls[:4]) == sorted([MEMORY, "nvmlDeviceGetUtilizationRates"] * 2)
    assert calls[4:] in ([], ["nvmlShutdown"])


# a device that fails


@pytest.mark.parametrize(
    ("code", "reason"), [("GPU_IS_LOST", "gpu_lost"), ("UNKNOWN", "unknown"), ("TIMEOUT", "timeout")]
)
async def test_a_lost_gpu_is_down_alone_and_comes_back(nvml_here, code, reason):
    nvml_here.set(TWO)
    async with running() as rig:
        await rig.heard()
        nvml_here.set({"gpu0.err": code})
        for _ in range(3):
            reading = await rig.step()
            assert (told(reading), reading.ok, reading.reason) == (FIRST_LOST | SECOND, True, reason)
        nvml_here.set({"gpu0.err": 0})
        reading = await rig.step(RETRY)
        assert (told(reading), reading.reason) == (FIRST | SECOND, "")
    assert "nvmlShutdown" not in nvml_here.calls()[:-1]  # the other one was never taken away


@pytest.mark.parametrize("call", ["nvmlDeviceGetMigMode", "nvmlDeviceGetHandleByIndex_v2"])
async def test_a_gpu_that_cannot_be_looked_up_is_down_alone(nvml_here, call):
    nvml_here.set({**TWO, f"gpu0.err.{call}": "UNKNOWN"})
    async with running() as rig:
        reading = await rig.heard()
        assert (told(reading), reading.reason) == (SECOND | {("gpu_up", "0", ""): 0}, "unknown")
        nvml_here.clear(f"gpu0.err.{call}")
        assert told(await rig.step(RETRY)) == FIRST | SECOND


async def test_when_every_gpu_is_lost_nvml_is_initialised_anew(nvml_here, caplog):
    caplog.set_level(logging.INFO)
    nvml_here.set({**TWO, "gpu0.err": 15, "gpu1.err": 15})
    async with running() as rig:
        reading = await rig.heard()
        assert (told(reading), reading.reason) == ({("gpu_up", "0", ""): 0, ("gpu_up", "1", ""): 0}, "gpu_lost")
        nvml_here.calls()
        await rig.step(RETRY)
        assert nvml_here.calls()[:2] == ["nvmlShutdown", "nvmlInitWithFlags"]
        nvml_here.set({"gpu0.err": 0, "gpu1.err": 0})
        assert told(await rig.step(RETRY)) == FIRST | SECOND
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 2
    assert "device=0 state=down reason=gpu_lost" in warnings[0]


async def test_a_gpu_that_may_not_be_opened_is_not_ours(nvml_here):
    nvml_here.set({**TWO, "gpu0.err.nvmlDeviceGetHandleByIndex_v2": "NO_PERMISSION"})
    async with running() as rig:
        reading = await rig.heard()
        assert (told(reading), reading.reason) == (SECOND, "")
        nvml_here.set({"gpu1.err.nvmlDeviceGetHandleByIndex_v2": "NO_PERMISSION"})
        reading = await rig.step(31)
        assert (reading.samples, reading.ok, reading.reason) == ((), False, "no_permission")


# calls that hang


class Holding(PyNvml):
    """Holds back the calls for one device, or the init, until a test lets them go."""

    def __init__(self) -> None:
        super().__init__()
        self.held: str | None = None
        self.holds = threading.Event()
        self.go = threading.Event()

    def init(self) -> None:
        if self.held == "init":
            self.holds.set()
            self.go.wait(60)
        super().init()

    def read(self, device):
        values = super().read(device)
        if device.gpu == self.held:
            self.go.wait(60)
        return values


async def test_one_of_eight_that_hangs_leaves_seven_whole(nvml_here):
    nvml_here.set({"count": 8})
    async with running() as rig:
        whole = told(await rig.heard())
        assert len(whole) == 8 * 8
        seven = {key: value for key, value in whole.items() if key[1] != "5"}
        nvml_here.set({f"gpu5.delay_ms.{MEMORY}": NEVER})
        await rig.begin_without(5)  # the call that hangs is made at 1001
        rig.move()
        for reading in (await rig.heard(), await rig.heard(), await rig.step(), await rig.step()):
            assert (told(reading), reading.reason) == (whole, "")  # its last values stand, up to 1004
        reading = await rig.step()
        assert (told(reading), reading.reason) == (seven | {("gpu_up", "5", uuid(5)): 0}, "timeout")
        nvml_here.set({"gpu0.used": 3 * GIB})
        seven |= {(f"gpu_memory_{what}_bytes", "0", uuid(0)): 3 * GIB for what in ("used", "used_peak")}
        seven["gpu_memory_headroom_bytes", "0", uuid(0)] = 85520809984 - 3 * GIB
        for _ in range(40):  # a round no longer waits for it, and its last values never return
            reading = await rig.step()
            assert told(reading) == seven | {("gpu_up", "5", uuid(5)): 0}
            assert (reading.ok, reading.reason) == (True, "timeout")
    assert sum(thread.name == "nvml-5" for thread in threading.enumerate()) == 1


async def test_a_call_that_returns_late_is_made_anew(nvml_here):
    nvml_here.set(TWO)
    nvml = Holding()
    async with running(nvml=nvml) as rig:
        await rig.heard()
        nvml.held = "0"
        await rig.begin_without(0)
        rig.move(10)
        for reading in (await rig.heard(), await rig.heard()):
            assert (told(reading), reading.reason) == (FIRST_LOST | SECOND, "timeout")
        nvml_here.set({"gpu0.used": 8 * GIB})  # what the late call read before is not to be seen
        nvml.held = None
        nvml.go.set()
        while (reading := await rig.step()).reason:
            assert told(reading) == FIRST_LOST | SECOND
        assert told(reading)["gpu_memory_used_bytes", "0", uuid(0)] == 8 * GIB


async def test_a_gpu_that_hangs_from_the_start_is_known_by_its_index(nvml_here):
    nvml_here.set({**TWO, "gpu0.delay_ms.nvmlDeviceGetUUID": NEVER})
    async with running() as rig:
        await rig.reaches(SECOND | {("gpu_up", "0", ""): 0}, "timeout")
    async with running([uuid(0)]) as rig:
        await rig.reaches({}, "timeout")  # not no_devices: it may well be there


async def test_init_that_hangs_is_a_timeout_until_it_returns(nvml_here):
    nvml_here.set(TWO)
    nvml = Holding()
    nvml.held = "init"
    async with running(nvml=nvml) as rig:
        reading = await rig.reaches({}, "timeout")
        assert not reading.ok
        assert rig.now > 1003  # the deadline: until then there is nothing to say
        nvml.go.set()
        await rig.reaches(FIRST | SECOND)


async def test_nothing_is_asked_while_a_new_init_hangs(nvml_here):
    nvml_here.set({**TWO, "gpu0.err": "GPU_IS_LOST", "gpu1.err": "GPU_IS_LOST"})
    nvml = Holding()
    async with running(nvml=nvml) as rig:
        await rig.heard()
        nvml_here.calls()
        nvml.held = "init"
        rig.move(RETRY)
        assert await asyncio.to_thread(nvml.holds.wait, 30)
        rig.move(RETRY)
        for reading in (await rig.heard(), await rig.heard(), await rig.step(RETRY), await rig.step(RETRY)):
            assert (reading.ok, reading.reason) == (True, "gpu_lost")
        assert nvml_here.calls() == ["nvmlShutdown"]
        nvml_here.set({"gpu0.err": 0, "gpu1.err": 0})
        nvml.go.set()
        await rig.reaches(FIRST | SECOND)


def test_a_call_that_never_returns_does_not_delay_the_exit(nvml_library, hardware):
    hardware.set({"count": 2, f"gpu1.delay_ms.{MEMORY}": NEVER})
    code = """
import asyncio
from exporter.sources.gpu import GpuSource
from exporter.store import Store

async def main():
    store = Store()
    task = asyncio.create_task(GpuSource("all", store, interval=0.05).run())
    while "gpu" not in store.readings:
        await asyncio.sleep(0.01)
    task.cancel()
    print(sorted({s.labels[0] for s in store.readings["gpu"].samples}))

asyncio.run(main())
"""
    env = os.environ | {"LD_LIBRARY_PATH": str(nvml_library.parent)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], env=env, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "['0']\n", "")


# NVML as a whole


@pytest.mark.parametrize(
    ("code", "reason", "wait"),
    [
        ("LIB_RM_VERSION_MISMATCH", "driver_mismatch", 660),
        ("DRIVER_NOT_LOADED", "driver_not_loaded", RETRY),
        ("NO_PERMISSION", "no_permission", RETRY),
        ("OPERATING_SYSTEM", "no_permission", RETRY),
        ("UNKNOWN", "unknown", RETRY),
    ],
)
async def test_init_that_fails_says_why_once_and_is_tried_again(nvml_here, caplog, code, reason, wait):
    caplog.set_level(logging.INFO)
    nvml_here.set({**TWO, "err.nvmlInitWithFlags": code})
    async with running() as rig:
        for reading in [await rig.heard(), await rig.step(), await rig.step(wait)]:
            assert (reading.samples, reading.ok, reading.reason) == ((), False, reason)
        assert nvml_here.calls().count("nvmlInitWithFlags") == 2
        nvml_here.set({"err.nvmlInitWithFlags": 0})
        assert not (await rig.step(wait - 1 if wait == RETRY else 590)).ok
        assert told(await rig.step(wait)) == FIRST | SECOND
    first, devices, back = [r for r in caplog.records if r.name == "exporter.sources.gpu"]
    assert first.levelno == logging.WARNING
    assert f"state=down reason={reason}" in first.getMessage()
    assert ("restart the container or pod" in first.getMessage()) == (reason == "driver_mismatch")
    assert f"devices=0={uuid(0)},1={uuid(1)}" in devices.getMessage()
    assert back.getMessage() == "source=gpu device=all state=up"


async def test_without_the_library_one_line_is_logged(nvml_here, monkeypatch, caplog):
    import pynvml

    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", missing)
    async with running() as rig:
        for reading in [await rig.heard(), *[await rig.step(RETRY) for _ in range(5)]]:
            assert (reading.samples, reading.ok, reading.reason) == ((), False, "library_not_found")
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "reason=library_not_found" in line
    assert "container runtime" in line


async def test_a_session_that_ends_is_begun_anew(nvml_here):
    nvml_here.set(TWO)
    async with running() as rig:
        await rig.heard()
        nvml_here.set({f"err.{MEMORY}": "UNINITIALIZED", "err.nvmlInitWithFlags": "DRIVER_NOT_LOADED"})
        reading = await rig.step()
        assert (reading.samples, reading.ok, reading.reason) == ((), False, "unknown")
        nvml_here.calls()
        assert (await rig.step(RETRY)).reason == "driver_not_loaded"
        assert nvml_here.calls() == ["nvmlShutdown", "nvmlInitWithFlags"]
        nvml_here.set({f"err.{MEMORY}": 0, "err.nvmlInitWithFlags": 0})
        assert told(await rig.step(RETRY)) == FIRST | SECOND


async def test_an_init_that_is_half_done_is_undone(nvml_here):
    nvml_here.set({**TWO, "err.nvmlDeviceGetCount_v2": "UNKNOWN"})
    async with running() as rig:
        assert (await rig.heard()).reason == "unknown"
        assert nvml_here.calls()[-1] == "nvmlShutdown"
        nvml_here.set({"err.nvmlDeviceGetCount_v2": 0})
        assert told(await rig.step(RETRY)) == FIRST | SECOND


async def test_no_gpu_is_a_reason(nvml_here):
    nvml_here.set({"count": 0})
    async with running() as rig:
        reading = await rig.heard()
        assert (reading.samples, reading.ok, reading.reason) == ((), False, "no_devices")
        nvml_here.set(TWO)
        assert told(await rig.step(RETRY)) == FIRST | SECOND


async def test_a_mistake_of_ours_ends_the_source(nvml_here):
    class Broken(PyNvml):
        def read(self, device):
            raise ZeroDivisionError

    rig = Rig("all", nvml=Broken())
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(rig.source.run(), 30)


def test_backoff_grows_to_a_minute():
    source = GpuSource("all", Store(), nvml=object())
    backoff = Backoff(source._wait)
    waits = [backoff.next() for _ in range(2000)]
    assert 1 <= waits[0] <= 3
    assert 32 <= waits[5] <= 34
    assert waits[-1] == 60
    backoff.reset()
    assert backoff.next() <= 3


def test_import_loads_no_library():
    code = "import sys, exporter.sources.gpu; assert not {'pynvml', 'ctypes'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# which GPUs


async def test_only_what_is_listed_is_watched(nvml_here, caplog):
    nvml_here.set(TWO)
    async with running(["GPU-00000001", "7"]) as rig:
        assert told(await rig.heard()) == SECOND
        assert told(await rig.step()) == SECOND
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "missing=7" in line


async def test_when_nothing_listed_is_there_the_reason_says_so(nvml_here):
    nvml_here.set(TWO)
    async with running("GPU-beef") as rig:
        reading = await rig.heard()
    assert (reading.samples, reading.ok, reading.reason) == ((), False, "no_devices")


async def test_auto_follows_the_engine(nvml_here, tmp_path: Path):
    nvml_here.set(TWO)
    async with running("auto", proc=tmp_path) as rig:
        assert told(await rig.heard()) == FIRST | SECOND
        (process := tmp_path / "42").mkdir()
        (process / "cmdline").write_bytes(b"/usr/bin/python3\0/usr/local/bin/vllm\0serve\0m\0")
        (process / "environ").write_bytes(b"HOME=/root\0CUDA_VISIBLE_DEVICES=1\0")
        assert told(await rig.step(29)) == FIRST | SECOND
        assert told(await rig.step(1)) == SECOND
        (process / "cmdline").unlink()  # while it restarts, its GPUs are still the ones
        assert told(await rig.step(30)) == SECOND


@pytest.mark.parametrize("setting", ["none", "", [], ["none"], ["auto", "0"]])
def test_a_setting_that_names_no_gpu_builds_no_source(setting):
    with pytest.raises(ValueError, match=r"GPU|stand alone"):
        GpuSource(setting, Store(), nvml=object())

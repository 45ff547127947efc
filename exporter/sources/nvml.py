"""How NVML is asked: a small protocol, its real form over ``pynvml``, and the thread a call is made in.

NVML is NVIDIA's management library (``libnvidia-ml.so.1``); only calls that read are made. Its calls
block, and while a driver is wedged they do not return and cannot be cancelled. They may be made from
several threads at once, so each physical GPU is asked in a thread of its own (`Worker`), and one that
hangs costs only itself its answer.
"""

import asyncio
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, Protocol, TypeVar

from exporter.catalog import GPU_HEADROOM, GPU_RESERVED, GPU_TOTAL, GPU_USED, GPU_UTILIZATION, Family

T = TypeVar("T")
Values = dict[Family, float]
Reason = Literal[
    "library_not_found",
    "driver_mismatch",
    "driver_not_loaded",
    "no_permission",
    "gpu_lost",
    "timeout",
    "no_devices",
    "unknown",
]

# NVML return codes (nvml.h, nvmlReturn_t), as numbers: pynvml is not loaded until it is wanted
_REASONS: dict[int, Reason] = {
    4: "no_permission",
    9: "driver_not_loaded",
    10: "timeout",
    12: "library_not_found",
    15: "gpu_lost",
    16: "gpu_lost",  # the GPU wants a reset
    17: "no_permission",  # blocked by the operating system or a cgroup
    18: "driver_mismatch",
    28: "no_devices",
}
_UNINITIALIZED, _NOT_SUPPORTED, _NO_PERMISSION, _NOT_FOUND = 1, 3, 4, 6
_FUNCTION_NOT_FOUND, _VERSION_MISMATCH = 13, 25
_SESSION_IS_OVER = {_UNINITIALIZED, 9, 18}
_GPU_IS_DOWN = {10, 15, 16, 999} | _SESSION_IS_OVER
_NOT_TOLD = {_NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND, _VERSION_MISMATCH}
_MIG_PROFILE = re.compile(r"\s*\bMIG (\S+)$")
_MAX_TEXT = 96


class NvmlError(Exception):
    """A call failed, for *reason*. *fatal* means that NVML itself has to be initialised anew."""

    def __init__(self, reason: Reason, message: str = "", *, fatal: bool = False) -> None:
        super().__init__(message or reason)
        self.reason: Reason = reason
        self.fatal = fatal


@dataclass(frozen=True, slots=True)
class Device:
    """A whole GPU, or one MIG instance of it.

    *gpu* is NVML's index, for an instance ``GPU.INSTANCE`` (``0.1``). *mig* is the instance's profile
    (``1g.10gb``) and *parent* the uuid of the GPU it is part of; both are empty for a whole GPU. *uuid* is
    empty only while a GPU has never told it.
    """

    gpu: str
    uuid: str
    name: str = ""
    mig: str = ""
    parent: str = ""
    handle: Any = field(default=None, compare=False, repr=False)


class Nvml(Protocol):
    """What is asked of NVML. Every call blocks, raises NvmlError, and is made in a worker's thread."""

    def init(self) -> None:
        """Load the library and begin a session."""

    def shutdown(self) -> None:
        """End the session. Not to be called while another call is out."""

    def driver(self) -> str:
        """Version of the driver, empty if it is not told."""

    def count(self) -> int:
        """Number of physical GPUs, those that do not answer included."""

    def devices(self, index: int) -> list[Device]:
        """The GPU with this index, or its MIG instances if it is split into any."""

    def read(self, device: Device) -> Values:
        """What *device* tells now, in bytes and ratios; what it does not tell is absent.

        Raises NvmlError if the device as a whole does not answer.
        """


@dataclass(frozen=True, slots=True)
class _Query:
    """One call, and the families its answer holds: (family, attribute, divisor)."""

    call: str
    fields: tuple[tuple[Family, str, int], ...]
    arguments: tuple[int, ...] = ()


_MEMORY_2 = _Query(
    "nvmlDeviceGetMemoryInfo",
    (
        (GPU_TOTAL, "total", 1),
        (GPU_USED, "used", 1),
        (GPU_RESERVED, "reserved", 1),
        (GPU_HEADROOM, "free", 1),
    ),
    arguments=(0x02000028,),  # nvmlMemory_v2
)
_MEMORY_1 = _Query(  # counts what the driver reserves as used; free is the same in both
    "nvmlDeviceGetMemoryInfo",
    ((GPU_TOTAL, "total", 1), (GPU_USED, "used", 1), (GPU_HEADROOM, "free", 1)),
)
_RATES = _Query("nvmlDeviceGetUtilizationRates", ((GPU_UTILIZATION, "gpu", 100),))

_OF_INSTANCE = ((_MEMORY_2, _MEMORY_1),)
_OF_GPU = (*_OF_INSTANCE, (_RATES,))
"""What is asked of a device: of each group the first form that the driver knows."""


class PyNvml:
    """NVML through the module ``pynvml`` (distribution nvidia-ml-py), imported when this is built."""

    def __init__(self) -> None:
        import pynvml  # not at the top: 20 ms and 5 MB that a host without GPUs need not pay

        self._nv: Any = pynvml

    def init(self) -> None:
        self._call("nvmlInit")

    def shutdown(self) -> None:
        self._call("nvmlShutdown")

    def driver(self) -> str:
        return self._text("nvmlSystemGetDriverVersion")

    def count(self) -> int:
        return int(self._call("nvmlDeviceGetCount"))

    def devices(self, index: int) -> list[Device]:
        handle = self._call("nvmlDeviceGetHandleByIndex", index)
        uuid = self._text("nvmlDeviceGetUUID", handle)
        if not self._is_split(handle):
            return [Device(str(index), uuid, self._text("nvmlDeviceGetName", handle), handle=handle)]
        slots = range(self._call("nvmlDeviceGetMaxMigDeviceCount", handle))
        return [d for slot in slots if (d := self._instance(f"{index}.{slot}", handle, slot, uuid))]

    def read(self, device: Device) -> Values:
        values: Values = {}
        failures: list[int] = []
        for forms in _OF_INSTANCE if device.mig else _OF_GPU:
            for query in forms:
                try:
                    answer = getattr(self._nv, query.call)(device.handle, *query.arguments)
                except self._nv.NVMLError as error:
                    if error.value in _GPU_IS_DOWN:
                        raise _translated(error) from error
                    failures.append(error.value)
                    continue
                values |= {family: getattr(answer, name) / by for family, name, by in query.fields}
                break
        if not values and (odd := set(failures) - _NOT_TOLD):
            raise NvmlError("unknown", f"no field answers: NVML return codes {sorted(odd)}")
        return values

    def _is_split(self, handle: Any) -> bool:
        try:
            return bool(self._nv.nvmlDeviceGetMigMode(handle)[0])
        except self._nv.NVMLError as error:
            if error.value in _NOT_TOLD:
                return False
            raise _translated(error) from error

    def _instance(self, gpu: str, parent: Any, slot: int, parent_uuid: str) -> Device | None:
        try:
            handle = self._nv.nvmlDeviceGetMigDeviceHandleByIndex(parent, slot)
        except self._nv.NVMLError as error:
            if error.value == _NOT_FOUND:  # slots may be empty, also between two that are not
                return None
            raise _translated(error) from error
        name = self._text("nvmlDeviceGetName", handle)
        profile = _MIG_PROFILE.search(name)
        mig = profile[1] if profile else "unknown"
        return Device(
            gpu, self._text("nvmlDeviceGetUUID", handle), _MIG_PROFILE.sub("", name), mig, parent_uuid, handle
        )

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._nv, name)(*arguments)
        except self._nv.NVMLError as error:
            raise _translated(error) from error

    def _text(self, name: str, *arguments: Any) -> str:
        """A string of the driver's, printable and of bounded length; empty if the driver has none."""
        try:
            text = str(getattr(self._nv, name)(*arguments))
        except UnicodeDecodeError:  # pynvml decodes strictly
            return ""
        except self._nv.NVMLError as error:
            if error.value in _NOT_TOLD:
                return ""
            raise _translated(error) from error
        return "".join(c if c.isprintable() else "?" for c in text)[:_MAX_TEXT]


def _translated(error: Any) -> NvmlError:
    return NvmlError(_REASONS.get(error.value, "unknown"), str(error), fatal=error.value in _SESSION_IS_OVER)


class Worker:
    """A daemon thread that makes one call at a time for the event loop that owns it.

    Every method belongs to the loop; only the function given to `start` runs in the thread. An answer is held
    until `collect` hands it on, so its owner's state changes at one place. As it is a daemon, a thread whose
    call never returns does not hold up the exit of the process.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.future: asyncio.Future[Any] | None = None
        self._clock = clock
        self._since = 0.0
        self._take: Callable[[Any], None] = _drop
        self._calls: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    @property
    def busy(self) -> bool:
        """A call is out, or its answer has not been collected."""
        return self.future is not None

    def start(self, function: Callable[[], T], take: Callable[[T | NvmlError], None]) -> None:
        """Call *function* in the thread; *take* is given what it returns, or the NvmlError that it raises."""
        if not self._thread.ident:
            self._thread.start()
        self.future = asyncio.get_running_loop().create_future()
        self._take, self._since = take, self._clock()
        self._calls.put((function, self.future))

    def collect(self) -> None:
        """Hand on the answer, if there is one. Raises what the function raised, other than NvmlError."""
        if self.future is not None and self.future.done():
            future, self.future = self.future, None
            self._take(future.result())

    def overdue(self, seconds: float) -> bool:
        """Whether a call has been out for more than *seconds*."""
        return self.future is not None and self._clock() - self._since > seconds

    def disown(self, take: Callable[[Any], None]) -> None:
        """Give a late answer to *take*: it tells that calls return again, not what is true now."""
        self._take = take

    def close(self) -> None:
        """Let the thread end after its call, should that ever return."""
        self._calls.put(None)

    def _work(self) -> None:
        while task := self._calls.get():
            function, future = task
            try:
                answer = partial(future.set_result, function())
            except NvmlError as error:
                answer = partial(future.set_result, error)
            except Exception as error:  # a bug: raised again by collect
                answer = partial(future.set_exception, error)
            with suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
                future.get_loop().call_soon_threadsafe(answer)


def _drop(answer: object) -> None:
    """Nobody asked."""

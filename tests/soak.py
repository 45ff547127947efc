#!/usr/bin/env python3
"""A real sidecar beside a simulated vLLM that serves many times faster than real time, while things go wrong.

    make soak                                       # ten minutes, more than three hours of service
    python tests/soak.py --minutes 30 --speed 20 --json

Every few seconds one thing happens: the log is rotated, the engine dies and is started again, a GPU is lost, somebody
writes garbage. Then the load pauses until the sidecar tells what really happened, to the last line and token; it ends
with 1 if that does not come to be, and if memory, descriptors or threads grow.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import fake_nvml
from process import Process
from realengine import Page, free_port, get
from vitals import Vitals

from exporter.simulator import (
    ClosedLoop,
    EngineConfig,
    LogOptions,
    Observer,
    RequestRecord,
    Simulation,
    StepRecord,
    serve,
)
from exporter.simulator.load import lognormal, requests, uniform
from exporter.simulator.records import Event
from exporter.sources.chunks import HEAD_BYTES

GPUS = 8
CLIENTS = 32
FORGED = "why?\nERROR 11-30 07:26:24 [core.py:9] torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n"
MIX = requests(lognormal(300, 0.5, most=2000), uniform(16, 64), aborted=0.05, text=FORGED)
FAILURES: dict[Event, tuple[str, ...]] = {
    "out_of_memory": ("out_of_memory", "engine_dead"),
    "cuda": ("cuda", "engine_dead"),
    "collective": ("collective", "engine_dead"),
    "timeout": ("timeout", "engine_dead"),
    "engine_dead": ("engine_dead",),
    "worker_dead": ("engine_dead",),
    "hang": ("timeout", "engine_dead"),
}
"""What kills the engine, and the kinds of errors it is told as."""
LONG_LINE_BYTES = 3 << 20
GARBAGE_BYTES = 1 << 20
PATIENCE_SECONDS = 60.0
SLOPE_BYTES_AN_HOUR = 1e6
GROWTH_BYTES = 4 << 20  # where it did not run long enough for a slope
JITTER = 1  # descriptors: the connection to the engine is open at one look, and not at the next
SLOPE_AFTER_SECONDS = 7200.0  # before, the half hour of past that is kept and the allocator's jitter outweigh it


class Wrong(Exception):
    """What the sidecar told is not what happened."""


class ServerLog:
    """The server's log as a text file that can be rotated; knows what it was given."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: Counter[str] = Counter()
        self._rotated = path.with_suffix(".1")
        self._file = path.open("ab", buffering=0)

    def write(self, text: str) -> int:
        return self.add(text.encode())

    def flush(self) -> None: ...

    def add(self, data: bytes, *, dropped: int = 0) -> int:
        """Append whole lines, of which so many bytes will not be read."""
        self.written += Counter(lines=data.count(b"\n"), bytes=len(data) - dropped, dropped=dropped)
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()

    def rename(self) -> None:
        """Rotate as a server does that opens its log anew at once."""
        self.path.rename(self._rotated)
        self._file.close()
        self._file = self.path.open("ab", buffering=0)
        self.written["rotations"] += 1

    def cut(self) -> None:
        """Rotate as copytruncate does; what nobody has read yet is lost."""
        shutil.copy(self.path, self._rotated)
        self._file.truncate(0)
        self.written["truncations"] += 1


class Truth(Observer):
    """What really happened, as the sidecar ought to count it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def on_first_token(self, record: RequestRecord) -> None:
        self.counts["prompt tokens"] += record.prompt_tokens

    def on_tokens(self, records, gaps) -> None:
        self.counts["generated tokens"] += len(records)

    def on_finish(self, record: RequestRecord) -> None:
        if record.completed:
            self.counts["requests"] += 1
        elif record.finish_reason == "abort":
            self.counts["aborted"] += 1

    def on_step(self, step: StepRecord) -> None:
        self.counts["steps"] += 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a soak came to. *slope* is by how many bytes resident memory grew in an hour, after the first quarter."""

    seconds: float
    served_seconds: float
    events: dict[str, int]
    counts: dict[str, int]
    vitals: list[Vitals]

    @property
    def settled(self) -> list[Vitals]:
        """After the first quarter."""
        return self.vitals[len(self.vitals) // 4 :]

    @property
    def slope(self) -> float:
        """Bytes an hour."""
        line = statistics.linear_regression([v.at for v in self.settled], [v.resident_bytes for v in self.settled])
        return line.slope * 3600

    def _growth(self, name: str) -> float:
        """By how much the second half of what is settled has more than the first, in the median."""
        seen = [getattr(v, name) for v in self.settled]
        middle = len(seen) // 2
        return statistics.median(seen[middle:]) - statistics.median(seen[:middle])

    def problems(self) -> list[str]:
        """What must not be."""
        found = []
        if self.seconds >= SLOPE_AFTER_SECONDS and self.slope > SLOPE_BYTES_AN_HOUR:
            found.append(f"memory grows by {self.slope / 1e6:.2f} MB an hour")
        if (growth := self._growth("resident_bytes")) > GROWTH_BYTES:
            found.append(f"memory grew by {growth / 1e6:.1f} MB")
        growing = {name: self._growth(name) for name in ("descriptors", "threads")}
        return found + [f"{name} grow by {growth:g}" for name, growth in growing.items() if growth > JITTER]

    def table(self) -> list[str]:
        first, last = self.settled[0], self.settled[-1]
        sizes = [v.resident_bytes / 1e6 for v in self.settled]
        cpu = (last.cpu_seconds - first.cpu_seconds) / (last.at - first.at)
        rows = [
            ("served", f"{self.served_seconds / 3600:.2f} h in {self.seconds / 60:.1f} min"),
            ("resident memory", f"{min(sizes):.1f} to {max(sizes):.1f} MB, {self.slope / 1e6:+.2f} MB an hour"),
            ("descriptors", _range([v.descriptors for v in self.settled])),
            ("threads", _range([v.threads for v in self.settled])),
            ("processor", f"{100 * cpu:.1f} % of a core"),
            *((f"{name}, as told", f"{count:,}") for name, count in self.counts.items()),
            *((name, f"{times} times") for name, times in sorted(self.events.items())),
        ]
        return [f"{name:28} {text}" for name, text in rows]


def _range(numbers: list[int]) -> str:
    return f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


class Soak:
    """The server, the sidecar beside it, and what happens to them; *seed* decides in which order."""

    def __init__(self, folder: Path, *, speed: float, busy: float, seed: int = 1) -> None:
        """*speed* is simulated seconds in one, *busy* how many seconds of load there are between two looks."""
        self._folder, self._speed, self._busy = folder, speed, busy
        self._random = random.Random(seed)
        self._log = ServerLog(folder / "server.log")
        self._truth = Truth()
        self._errors: Counter[str] = Counter()
        self._load = ClosedLoop(CLIENTS, mix=MIX, seed=seed)
        self._hardware = fake_nvml.Hardware(folder)
        self._hardware.set({"count": GPUS})
        self.events: Counter[str] = Counter()
        self.vitals: list[Vitals] = []

    async def run(
        self, *, seconds: float = 0.0, served: float = 0.0, say: Callable[[str], object] = lambda _: None
    ) -> Outcome:
        """Go on until all are over: so many seconds, so many of service, and each thing once. Raises Wrong."""
        library = fake_nvml.build(self._folder)
        environment = os.environ | self._hardware.env | {"LD_LIBRARY_PATH": str(library.parent)}
        port = free_port()
        watched = ("--engine-url", f"http://127.0.0.1:{port}", "--log", str(self._log.path), "--gpus", "all")
        with (self._folder / "stderr.log").open("w") as stderr, contextlib.closing(self._log):
            self._process = Process(*watched, env=environment, stdout=subprocess.DEVNULL, stderr=stderr)
            try:  # the sidecar first, so that all of the log is live
                await asyncio.to_thread(self._process.__enter__)
                await self._until(lambda page: page.all("log_lines_total"), "the log is looked at")
                return await self._beside(port, seconds, served, say)
            finally:
                self._process.__exit__()

    async def _beside(self, port: int, seconds: float, served: float, say: Callable[[str], object]) -> Outcome:
        self._simulation = Simulation(
            EngineConfig.hy3_h20(execute_timeout_seconds=30.0),
            speed=self._speed,
            log=self._log,  # type: ignore[arg-type]  # what is used of a text file it has
            log_options=LogOptions(requests=True, prompts=True, iterations=True),
        )
        self._simulation.engine.attach(self._truth)
        began = time.monotonic()
        async with serve(self._simulation, port=port):
            await self._until(lambda page: page("source_up", source="metrics") == 1, "the page is read")
            self._simulation.set_load(self._load)
            waiting: list[Happening] = []
            while (
                time.monotonic() - began < seconds
                or self._simulation.engine.now < served
                or len(self.events) < len(set(HAPPENINGS))
            ):
                if not waiting:
                    waiting = self._random.sample(HAPPENINGS, len(HAPPENINGS))
                await self._turn(waiting.pop())
                say(self._line(time.monotonic() - began))
            await self._still()
        counts = await self._told()
        return Outcome(
            time.monotonic() - began, self._simulation.engine.now, dict(self.events), dict(counts), self.vitals
        )

    async def _turn(self, happening: "Happening") -> None:
        """Load, amid which it happens; then a pause, in which what was told must be the truth."""
        self._load.resize(CLIENTS)
        await asyncio.sleep(self._busy / 2)
        await happening(self)
        self.events[happening.__name__.strip("_").replace("_", " ")] += 1
        if self._simulation.engine.state == "serving":
            await asyncio.sleep(self._busy / 2)
            await self._drain()
        await self._settle()
        if self._simulation.engine.state != "serving":
            self._simulation.engine.restart()
        self.vitals.append(Vitals.of(self._process.process.pid))

    async def _drain(self) -> None:
        self._load.resize(0)
        end = time.monotonic() + PATIENCE_SECONDS
        while self._simulation.engine.in_flight:
            if time.monotonic() > end:
                raise Wrong(f"the simulated engine does not finish {self._simulation.engine.in_flight} requests")
            await asyncio.sleep(0.05)

    async def _settle(self) -> None:
        """Wait until what is told is what happened."""
        end = time.monotonic() + PATIENCE_SECONDS
        while (told := await self._told()) != (held := self._held()):
            if time.monotonic() > end:
                names = sorted(name for name in told | held if told[name] != held[name])
                apart = ", ".join(f"{name}: {told[name]} told, {held[name]} happened" for name in names)
                raise Wrong(f"after {'; '.join(map(str, self.events.items()))}: {apart}")
            await asyncio.sleep(0.1)

    async def _still(self) -> None:
        """What is right now must be so after two further polls."""
        polled = (await self._page())("source_last_success_timestamp_seconds", source="metrics")
        await self._until(
            lambda page: page("source_last_success_timestamp_seconds", source="metrics") > polled + 1.5, "two polls"
        )
        await self._settle()

    def _held(self) -> Counter[str]:
        errors = Counter({f"errors: {kind}": count for kind, count in self._errors.items()})
        return Counter(self._log.written | self._truth.counts | errors)

    async def _told(self) -> Counter[str]:
        page = await self._page()
        steps = (page("log_matched_total", pattern=f"iteration_{kind}") for kind in ("prefill", "decode", "mixed"))
        told = {
            "lines": page("log_lines_total"),
            "bytes": page("log_bytes_total"),
            "dropped": page("log_dropped_bytes_total"),
            "rotations": page("log_rotations_total"),
            "truncations": page("log_truncations_total"),
            "requests": page("requests_total", outcome="ok"),
            "aborted": page("requests_total", outcome="aborted"),
            "prompt tokens": page("tokens_total", kind="prompt"),
            "generated tokens": page("tokens_total", kind="generation"),
            "steps": sum(steps),
            **{f"errors: {kind}": count for kind, count in page.errors().items()},
        }
        return Counter({name: int(count) for name, count in told.items() if count})

    async def _page(self) -> Page:
        names = "&".join(f"name[]=stopline_{name}" for name in _NAMES)
        return Page(await asyncio.to_thread(get, f"http://127.0.0.1:{self._process.port}/metrics?{names}"))

    async def _until(self, condition: Callable[[Page], object], what: str) -> None:
        end = time.monotonic() + PATIENCE_SECONDS
        while not condition(await self._page()):
            if time.monotonic() > end:
                raise Wrong(f"not in {PATIENCE_SECONDS:g} s: {what}")
            await asyncio.sleep(0.1)

    def _line(self, seconds: float) -> str:
        now = self.vitals[-1]
        return (
            f"{seconds:6.0f} s  {self._simulation.engine.now / 3600:6.2f} h served  {now.resident_bytes / 1e6:6.1f} MB"
            f"  {now.descriptors:3} descriptors  {now.threads:3} threads  {self._truth.counts['requests']:8,} requests"
            f"  {self._log.written['lines']:10,} lines"
        )

    # what happens

    async def _log_renamed(self) -> None:
        self._log.rename()

    async def _log_cut(self) -> None:
        """Once all of it was read, for else something is lost, as it may be."""
        await self._drain()
        await self._settle()
        self._log.cut()

    async def _garbage(self) -> None:
        data = self._random.randbytes(GARBAGE_BYTES).replace(b"\0", b"0")  # a hole in a file is no content
        self._log.add(data + b"\n")

    async def _long_line(self) -> None:
        line = b"9" * LONG_LINE_BYTES
        self._log.add(line + b"\n", dropped=len(line) - HEAD_BYTES)

    async def _stalled_clients(self) -> None:
        with contextlib.ExitStack() as clients:
            for _ in range(50):
                client = socket.create_connection(("127.0.0.1", self._process.port), 5)
                clients.enter_context(client).sendall(b"GET /metr")
            await self._page()

    async def _many_scrapes(self) -> None:
        await asyncio.gather(*(self._page() for _ in range(20)))

    async def _settings_read_again(self) -> None:
        self._process.process.send_signal(signal.SIGHUP)

    async def _gpu_lost_and_found(self) -> None:
        self._hardware.set({"gpu3.err": "GPU_IS_LOST"})
        await self._until(lambda page: page("gpu_up") == GPUS - 1, "a GPU is lost")
        self._hardware.clear("gpu3.err")

    async def _slow_steps(self) -> None:
        self._simulation.engine.slow(3.0)
        await asyncio.sleep(self._busy / 2)
        self._simulation.engine.slow(1.0)

    async def _small_cache(self) -> None:
        self._simulation.engine.fail("kv_small")

    async def _planned_restart(self) -> None:
        """At rest, for what a page counted after it was read last is lost with it."""
        await self._drain()
        await self._settle()
        self._simulation.engine.stop()


def _failure(kind: Event) -> "Happening":
    async def happen(soak: Soak) -> None:
        engine = soak._simulation.engine
        soak._simulation.catch_up()
        engine.fail(kind)
        soak._load.resize(0)
        end = time.monotonic() + PATIENCE_SECONDS
        while engine.state != "dead":
            if time.monotonic() > end:
                raise Wrong(f"the simulated engine does not die of {kind}")
            await asyncio.sleep(0.05)
        soak._errors += Counter(FAILURES[kind])

    happen.__name__ = f"failure: {kind}"
    return happen


Happening = Callable[[Soak], Awaitable[None]]
HAPPENINGS: tuple[Happening, ...] = (
    *(Soak._log_renamed, Soak._log_renamed, Soak._log_cut, Soak._garbage, Soak._long_line),
    *(Soak._stalled_clients, Soak._many_scrapes, Soak._settings_read_again, Soak._gpu_lost_and_found),
    *(Soak._slow_steps, Soak._small_cache, Soak._planned_restart),
    *map(_failure, FAILURES),
)
_NAMES = (
    *("log_lines_total", "log_bytes_total", "log_dropped_bytes_total", "log_rotations_total", "log_truncations_total"),
    *("log_matched_total", "requests_total", "tokens_total", "errors_total", "gpu_up"),
    *("source_up", "source_last_success_timestamp_seconds"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--speed", type=float, default=20, help="simulated seconds in one")
    parser.add_argument("--busy", type=float, default=3, help="seconds of load between two looks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), speed=arguments.speed, busy=arguments.busy, seed=arguments.seed)
        try:
            outcome = asyncio.run(
                soak.run(seconds=60 * arguments.minutes, say=lambda line: print(line, file=sys.stderr))
            )
        except Wrong as wrong:
            sys.exit(f"wrong: {wrong}")
    if arguments.json:
        print(json.dumps(asdict(outcome) | {"slope": outcome.slope, "problems": outcome.problems()}, indent=2))
    else:
        print("\n".join(outcome.table()))
    for problem in outcome.problems():
        print(problem, file=sys.stderr)
    sys.exit(bool(outcome.problems()))


if __name__ == "__main__":
    main()

"""Who asks for what, and when: seeded arrivals for virtual and for real time alike.

A load lives on the engine's own timers (`start`), so it needs no task and no thread:

    Poisson(2.0)                                          two a second, independent of each other
    OpenLoop(Segment(600, 2.0), Segment(120, 2.0, 20.0))  ten minutes at 2/s, then a ramp to 20/s
    ClosedLoop(32)                                        32 clients, each asking again once answered
    Bursts(size=20, every=5.0)                            20 at once, every 5 s

What is asked is a *mix*: `requests(prompt=lognormal(600, 0.8), output=uniform(64, 512))`, or a `mixture`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Protocol

from .engine import Engine
from .records import Observer, Request, RequestRecord

Length = Callable[[Random], int]
Mix = Callable[[Random], Request]

RETRY_SECONDS = 1.0  # a client that was refused does not ask again at once


def fixed(tokens: int) -> Length:
    return lambda random: tokens


def uniform(least: int, most: int) -> Length:
    return lambda random: random.randint(least, most)


def lognormal(median: float, sigma: float, most: int = 16_384) -> Length:
    """Long-tailed, as prompts are; cut at *most*."""
    return lambda random: min(max(round(random.lognormvariate(math.log(median), sigma)), 1), most)


def requests(prompt: Length, output: Length, *, aborted: float = 0.0, ignore_eos: bool = False, text: str = "") -> Mix:
    """Requests of these lengths; the given ratio (0..1) of clients hangs up within 10 s.

    With *ignore_eos* each runs into its max_tokens (finish reason length), else it ends by itself (stop).
    *text* is what a log with prompts shows.
    """

    def draw(random: Random) -> Request:
        tokens = output(random)
        return Request(
            prompt_tokens=prompt(random),
            output_tokens=tokens,
            max_tokens=tokens if ignore_eos else None,
            abort_after=random.uniform(0.0, 10.0) if random.random() < aborted else None,
            prompt=text,
        )

    return draw


def mixture(*parts: tuple[float, Mix]) -> Mix:
    """One of several mixes, each with its weight."""
    weights, mixes = zip(*parts, strict=True)
    return lambda random: random.choices(mixes, weights)[0](random)


CHAT = requests(lognormal(500, 0.7, most=4096), lognormal(200, 0.6, most=1024))


class Load(Protocol):
    def start(self, engine: Engine) -> None:
        """Begin now, on the engine's clock; once only."""

    def stop(self) -> None:
        """Ask for nothing more; what is in flight runs on."""


@dataclass(frozen=True, slots=True)
class Segment:
    """*seconds* at *rate* requests per second, or going evenly from there to *end_rate*."""

    seconds: float
    rate: float
    end_rate: float | None = None

    @property
    def peak(self) -> float:
        return max(self.rate, self.end_rate or 0.0)

    def at(self, elapsed: float) -> float:
        if self.end_rate is None:
            return self.rate
        return self.rate + (self.end_rate - self.rate) * elapsed / self.seconds


class OpenLoop:
    """Poisson arrivals whose rate follows the segments, and which end with the last."""

    def __init__(self, *segments: Segment, mix: Mix = CHAT, seed: int = 0) -> None:
        self._segments = segments
        self._peak = max(segment.peak for segment in segments)
        self._mix = mix
        self._random = Random(seed)
        self._stopped = False

    def start(self, engine: Engine) -> None:
        self._next(engine, engine.now)

    def stop(self) -> None:
        self._stopped = True

    def _next(self, engine: Engine, began: float) -> None:
        """Thinning: draw at the peak rate, and let each pass with the ratio of the moment's rate to it."""
        moment = engine.now - began
        while True:
            moment += self._random.expovariate(self._peak) if self._peak else math.inf
            rate = self._rate(moment)
            if rate is None:
                return
            if self._random.random() * self._peak < rate:
                break

        def arrive() -> None:
            if not self._stopped:
                engine.submit(self._mix(self._random))
                self._next(engine, began)

        engine.call_at(began + moment, arrive)

    def _rate(self, moment: float) -> float | None:
        """None after the end."""
        for segment in self._segments:
            if moment < segment.seconds:
                return segment.at(moment)
            moment -= segment.seconds
        return None


class Poisson(OpenLoop):
    """A constant rate, for ever."""

    def __init__(self, rate: float, *, mix: Mix = CHAT, seed: int = 0) -> None:
        super().__init__(Segment(math.inf, rate), mix=mix, seed=seed)


class Bursts:
    """*size* requests at once, every so many seconds, beginning at the start."""

    def __init__(self, size: int, every: float, *, mix: Mix = CHAT, seed: int = 0) -> None:
        self._size, self._every, self._mix = size, every, mix
        self._random = Random(seed)
        self._stopped = False

    def start(self, engine: Engine) -> None:
        if not self._stopped:
            for _ in range(self._size):
                engine.submit(self._mix(self._random))
            engine.call_at(engine.now + self._every, partial(self.start, engine))

    def stop(self) -> None:
        self._stopped = True


class ClosedLoop(Observer):
    """A number of clients, each with one request at a time; the number may change while it runs."""

    def __init__(self, concurrency: int, *, think_seconds: float = 0.0, mix: Mix = CHAT, seed: int = 0) -> None:
        self._wanted = concurrency
        self._think_seconds, self._mix = think_seconds, mix
        self._random = Random(seed)
        self._engine: Engine | None = None
        self._clients = 0
        self._asked: set[str] = set()

    def start(self, engine: Engine) -> None:
        self._engine = engine
        engine.attach(self)
        self.resize(self._wanted)

    def stop(self) -> None:
        self.resize(0)

    def resize(self, concurrency: int) -> None:
        """New clients begin now, surplus ones leave once answered."""
        self._wanted = concurrency
        while self._engine is not None and self._clients < concurrency:
            self._clients += 1
            self._engine.call_at(self._engine.now, self._ask)

    def on_finish(self, record: RequestRecord) -> None:
        if self._engine is not None and record.id in self._asked:
            self._asked.remove(record.id)
            refused = record.finish_reason in ("error", "queue_full", "too_long")
            self._again(RETRY_SECONDS if refused else self._think_seconds)

    def _again(self, seconds: float) -> None:
        assert self._engine is not None
        self._engine.call_at(self._engine.now + seconds, self._ask)

    def _ask(self) -> None:
        if self._engine is None or self._clients > self._wanted:
            self._clients -= 1
            return
        record = self._engine.submit(self._mix(self._random))
        if record.finished is None:
            self._asked.add(record.id)
        else:
            self._again(RETRY_SECONDS)
